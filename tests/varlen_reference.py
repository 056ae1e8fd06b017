"""What the CUDA runner is given on a CPU in place of FlashAttention and of CUDA graphs.

The kernel computes what ``varlen_attn`` documents, and refuses what FlashAttention 2 as torch 2.13 ships it would
refuse or get wrong; the recorder runs a step again instead of replaying it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from epd.cache.kv_cache import KVCache
from epd.engine.cuda.runner import CudaModelRunner
from epd.types import LanguageModel


def reference_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    num_splits: int | None,
) -> torch.Tensor:
    """Attention of ragged queries ``[total_q, num_heads, head_dim]`` over pages, one sequence at a time."""
    assert cu_seq_k is not None
    assert seqused_k is not None
    assert block_table is not None
    num_seqs, num_heads, num_kv_heads = len(seqused_k), query.shape[1], key.shape[2]
    assert cu_seq_q.shape == cu_seq_k.shape == (num_seqs + 1,)
    assert block_table.shape[0] == num_seqs
    for tensor in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert tensor.dtype is torch.int32
    for tensor in (cu_seq_q, cu_seq_k, seqused_k):
        assert tensor.is_contiguous()
    for tensor in (query, key, value, block_table):
        assert tensor.stride(-1) == 1
    assert enable_gqa == (num_heads != num_kv_heads)
    assert key.shape == value.shape
    assert query.dtype is key.dtype is value.dtype
    folds_groups = max_q == 1 and num_heads > num_kv_heads and window_size == (-1, -1)
    assert num_splits == 1 or folds_groups, "split results of ragged rows are lost"
    assert max_q >= int(cu_seq_q.diff().max())
    assert max_k >= int(seqused_k.max())
    assert window_size == (-1, 0) or max_q == 1
    parts = []
    bounds = cu_seq_q.tolist()
    for row, length in enumerate(seqused_k.tolist()):
        pages = block_table[row, : -(-length // key.shape[1])].long()
        rows = query[bounds[row] : bounds[row + 1]]
        keys, values = (side[pages].flatten(0, 1)[:length].transpose(0, 1) for side in (key, value))
        mask = torch.ones(len(rows), length, dtype=torch.bool).tril(length - len(rows))
        out = F.scaled_dot_product_attention(
            rows.transpose(0, 1), keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


class RerunRecorder:
    """Records by remembering. ``num_replays`` counts what was run again."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        function()

        def replay() -> None:
            self.num_replays += 1
            function()

        return replay


def cuda_runner_on_cpu(
    model: LanguageModel,
    kv_cache: KVCache,
    recorder: RerunRecorder | None,
    *,
    max_num_seqs: int = 8,
    max_context_tokens: int | None = None,
) -> CudaModelRunner:
    """Build the CUDA runner over the reference kernel, its graphs recorded if there is a recorder."""
    runner = CudaModelRunner(
        model,
        kv_cache,
        reference_varlen_attn,
        recorder,
        device="cpu",
        max_num_seqs=max_num_seqs,
        max_context_tokens=max_context_tokens or kv_cache.num_blocks * kv_cache.block_size,
    )
    runner.capture_graphs()
    return runner
