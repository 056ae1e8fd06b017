"""Qwen2.5-VL (Bai et al., 2025): images and clips in the prompt as grids of tokens with three-dimensional positions."""

from __future__ import annotations

from pathlib import Path

from encoders.qwen2_5_vl.family import Qwen2_5_VLFamily
from epd.config import ModelConfig

__all__ = ["MODEL_TYPES", "Qwen2_5_VLFamily", "build_family"]

MODEL_TYPES = ("qwen2_5_vl",)


def build_family(model: ModelConfig, directory: Path) -> Qwen2_5_VLFamily:
    """Return the family over the checkpoint in ``directory``."""
    return Qwen2_5_VLFamily(model, directory)
