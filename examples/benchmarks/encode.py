"""Measure the vision tower on one image: the engine's CPU kernels against torch's, alternating in one process.

python examples/benchmarks/encode.py MODEL_DIR --dtype bfloat16 --threads 1
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table

from encoders import resolve_family
from epd.config import ModelConfig
from epd.engine.native import load_kernels
from epd.types import MediaItem, Modality, PlaceholderRange


def main(
    model: Annotated[str, typer.Argument(help="Checkpoint directory.")],
    dtype: str = "bfloat16",
    threads: int = 1,
    image_size: int = 448,
    rounds: int = 12,
) -> None:
    """Measure encoding."""
    torch.set_num_threads(threads)
    kernels = load_kernels(getattr(torch, dtype))
    if kernels is None:
        raise typer.BadParameter(f"there are no kernels for {dtype} here, see the log")
    family = resolve_family(ModelConfig(source=model, dtype=dtype))
    towers = {"torch": family.load_encoder(dtype=dtype), "ours": family.load_encoder(dtype=dtype, kernels=kernels)}
    layout = family.image_layout(image_size, image_size)
    item = MediaItem(0, Modality.IMAGE, "image", PlaceholderRange(0, layout.num_tokens), layout.grid_thw)
    image = Image.effect_noise((image_size, image_size), 60).convert("RGB")
    patches = towers["torch"].preprocess(item, [image])
    times: dict[str, list[float]] = {name: [] for name in towers}
    for number in range(rounds + 1):
        for name, tower in towers.items():
            started_s = time.perf_counter()
            tower.encode([item], [patches])
            if number:  # the first one sets things up
                times[name].append(time.perf_counter() - started_s)
    table = Table(title=f"{image_size}x{image_size}, {layout.num_tokens} tokens, {dtype}, {threads} thread(s)")
    for name in ("kernels", "median ms", "min ms", "max ms"):
        table.add_column(name, justify="left" if name == "kernels" else "right")
    for name, of_tower in times.items():
        figures = (statistics.median(of_tower), min(of_tower), max(of_tower))
        table.add_row(name, *(f"{seconds * 1000:.0f}" for seconds in figures))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
