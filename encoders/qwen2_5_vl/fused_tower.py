"""The blocks of the vision tower on the engine's CPU kernels, one call each, over the same weights.

Owns which of a block's weights go where. The rest of the tower (patches in, windows, positions, merging) stays that of
``transformers``, which calls these blocks in place of its own.
"""

from __future__ import annotations

from typing import Any

import torch

from epd.engine.fused import is_silu
from epd.engine.native import Kernels
from epd.engine.native.tower import BlockShape, BlockWeights, NativeBlock
from epd.engine.packing import interleave, pack_panels


def fuse_blocks(tower: Any, kernels: Kernels) -> None:
    """Replace the blocks of a tower in place; their own weights are dropped."""
    for index, block in enumerate(tower.blocks):
        tower.blocks[index] = _FusedBlock(block, kernels)


def can_fuse_blocks(tower: Any, kernels: Kernels) -> bool:
    """Whether all blocks are of the kind that the kernels compute."""
    return all(
        kernels.can_attend(block.attn.head_dim)
        and is_silu(block.mlp.act_fn)
        and all(linear.in_features % 2 == 0 for linear in block.modules() if isinstance(linear, torch.nn.Linear))
        for block in tower.blocks
    )


class _FusedBlock(torch.nn.Module):
    """Stands in for ``Qwen2_5_VLVisionBlock``."""

    def __init__(self, block: Any, kernels: Kernels) -> None:
        super().__init__()
        attention, mlp = block.attn, block.mlp
        shape = BlockShape(
            hidden_size=attention.dim,
            intermediate_size=mlp.intermediate_size,
            num_heads=attention.num_heads,
            head_dim=attention.head_dim,
            epsilon=block.norm1.variance_epsilon,
            scale=attention.scaling,
        )
        weights = BlockWeights(
            first_norm=block.norm1.weight.detach(),
            qkv=pack_panels(attention.qkv.weight.detach()),
            qkv_bias=attention.qkv.bias.detach(),
            output=pack_panels(attention.proj.weight.detach()),
            output_bias=attention.proj.bias.detach(),
            second_norm=block.norm2.weight.detach(),
            gate_up=pack_panels(interleave(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())),
            gate_up_bias=torch.cat([mlp.gate_proj.bias.detach(), mlp.up_proj.bias.detach()]),
            down=pack_panels(mlp.down_proj.weight.detach()),
            down_bias=mlp.down_proj.bias.detach(),
        )
        self._native = NativeBlock(kernels, shape, weights)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> torch.Tensor:
        """``[num_patches, hidden_size]`` in and out; the argument is given up."""
        cos, sin = (table.float().contiguous() for table in position_embeddings)
        hidden_states = hidden_states.contiguous()
        self._native(hidden_states, cu_seqlens.long(), cos, sin)
        return hidden_states
