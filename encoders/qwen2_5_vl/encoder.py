"""The vision tower of Qwen2.5-VL alone: frames to patches to embeddings. Knows nothing of KV caches or prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLVisionRotaryEmbedding,
)

from encoders.checkpoint import load_parts, weight_bytes
from encoders.qwen2_5_vl.fused_tower import can_fuse_blocks, fuse_blocks
from encoders.qwen2_5_vl.processor import Patchifier, PatchSettings
from epd.engine.native import Kernels
from epd.engine.native.linear import use_panels
from epd.engine.packing import can_pack, pack_linears
from epd.errors import MediaError
from epd.types import Embedding, MediaItem, MediaLayout, Modality

if TYPE_CHECKING:
    from PIL import Image

_TOWER_PREFIXES = {"model.visual.": "", "visual.": ""}


class LayoutRule(Protocol):
    """The sizes that prompts are laid out for; what arrives must fit them."""

    def image_layout(self, width: int, height: int, *, detail: str = "auto") -> MediaLayout: ...

    def video_layout(self, width: int, height: int, timestamps_s: Sequence[float]) -> MediaLayout: ...


class _PatchEmbedding(torch.nn.Module):
    """The tower's first layer as the matrix product that it is: a convolution whose windows do not overlap, over
    patches that are cut already. That is three times as fast, and rounds differently: so it is for half precision
    only, and in float32 embeddings stay within 1e-5 of the reference."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        matrix = weight.detach().flatten(1)
        with torch.device("meta"):
            self.proj = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
        self.proj.weight = torch.nn.Parameter(matrix, requires_grad=False)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.proj(patches)
        return projected


class Qwen2_5_VLEncoder:
    """A vision tower; implements ``Encoder``."""

    def __init__(
        self,
        rule: LayoutRule,
        directory: Path,
        settings: PatchSettings,
        *,
        dtype: str,
        device: str = "cpu",
        kernels: Kernels | None = None,
    ) -> None:
        """Read the tower's weights, and no others. Raises ``ConfigError`` if the checkpoint lacks some.

        ``kernels``, if given, are the engine's for ``dtype`` on the CPU; torch's do what they cannot.
        """
        self._rule = rule
        self._device = device
        self._patchifier = Patchifier(settings)
        self._merge_unit = settings.merge_size**2
        config = Qwen2_5_VLConfig.from_pretrained(directory).vision_config
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            self._tower = Qwen2_5_VisionTransformerPretrainedModel(config)
        self._tower.rotary_pos_emb = Qwen2_5_VLVisionRotaryEmbedding(config)
        load_parts(self._tower, directory, _TOWER_PREFIXES, dtype=getattr(torch, dtype), device=device)
        self.weight_bytes = weight_bytes(self._tower)
        if kernels is not None and can_fuse_blocks(self._tower, kernels):
            fuse_blocks(self._tower, kernels)
        if dtype != "float32":
            self._tower.patch_embed = _PatchEmbedding(self._tower.patch_embed.proj.weight)
            if can_pack(getattr(torch, dtype), device):
                pack_linears(self._tower)
            elif kernels is not None:
                use_panels(self._tower, kernels)

    def preprocess(self, item: MediaItem, frames: Sequence[Image.Image]) -> torch.Tensor:
        """Turn decoded RGB frames into float32 patches ``[item.num_patches, patch_dim]`` on the CPU.

        Raises ``MediaError`` if the frames are not those that the item was laid out for.
        """
        num_expected = max(len(item.timestamps_s), 1)
        if len(frames) != num_expected:
            raise MediaError(f"The {item.modality} has {len(frames)} frames, not {num_expected}.", item.param)
        width, height = frames[0].size
        if any(frame.size != (width, height) for frame in frames):
            raise MediaError(f"The frames of the {item.modality} differ in size.", item.param)
        if item.modality is Modality.VIDEO:
            layouts = [self._rule.video_layout(width, height, item.timestamps_s)]
        else:
            layouts = [self._rule.image_layout(width, height, detail=detail) for detail in ("auto", "low")]
        if item.grid_thw not in [layout.grid_thw for layout in layouts]:
            raise MediaError(
                f"The {item.modality} is not of the size that its header says: it decodes to {width}x{height} pixels.",
                item.param,
            )
        return torch.from_numpy(self._patchifier.patchify(frames, item.grid_thw))

    @torch.no_grad()
    def encode(self, items: Sequence[MediaItem], patches: Sequence[torch.Tensor]) -> list[Embedding]:
        """Run the tower once over all items; each embedding is a tensor of its own, on the tower's device.

        Raises ``MediaError`` if an item's patches or rows are not as many as its placeholder has tokens.
        """
        if not items:
            return []
        for item, of_item in zip(items, patches, strict=True):
            if not len(of_item) == item.num_patches == item.num_tokens * self._merge_unit:
                message = f"The {item.modality} has {len(of_item)} patches for {item.num_tokens} tokens of the prompt."
                raise MediaError(message, item.param)
        pixels = torch.cat(list(patches)).to(device=self._device, dtype=self._tower.dtype)
        grids = torch.tensor([item.grid_thw for item in items], dtype=torch.int64, device=self._device)
        rows = self._tower(pixels, grid_thw=grids).pooler_output
        if len(rows) != sum(item.num_tokens for item in items):
            raise MediaError(f"The vision tower gave {len(rows)} rows for {len(items)} items.", items[0].param)
        # Copies: a view would keep the rows of the whole batch alive for as long as one item is cached.
        return [Embedding(part.clone()) for part in rows.split([item.num_tokens for item in items])]
