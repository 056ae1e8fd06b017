"""What splitting a request costs before its first token, and what overlap and push save: traces of single requests.

    python examples/benchmarks/split_cost.py --server push=http://127.0.0.1:8000 --server pull=http://127.0.0.1:8001 \\
        --mode aggregated --mode epd --images 1 --words 1000

One request at a time, no image like another, servers and modes in turn; medians of the traces' timings. To compare
settings (transfer.kv_mode, transfer.overlap), serve a configuration of each on a port of its own; an idle server takes
next to no time from the other.
"""

from __future__ import annotations

import base64
import io
import json
import random
import statistics
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

TIMINGS = ("ttft", "preprocess", "encode", "embedding_transfer", "prefill", "kv_transfer")


def noise_image(rng: random.Random, size: int) -> str:
    """A JPEG of noise, as a data URL: no two are alike."""
    image = Image.frombytes("RGB", (32, 32), rng.randbytes(32 * 32 * 3)).resize((size, size))
    data = io.BytesIO()
    image.save(data, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def body(model: str, mode: str, rng: random.Random, num_images: int, size: int, num_words: int) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": noise_image(rng, size)}} for _ in range(num_images)
    ]
    words = " ".join(rng.choice(("red", "green", "two", "circle", "left", "of")) for _ in range(num_words))
    content.append({"type": "text", "text": f"{rng.random()} {words}"})
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
        "epd": {"mode": mode, "trace": True},
    }


def main(
    server: Annotated[list[str], typer.Option(help="NAME=URL; repeat.")],
    mode: Annotated[list[str], typer.Option(help="Modes to compare; repeat.")] = ["aggregated", "epd"],  # noqa: B006
    images: int = 1,
    image_size: int = 448,
    words: int = 1000,
    rounds: int = 9,
    output: Path | None = None,
) -> None:
    """Measure what comes before the first token."""
    servers = dict(entry.split("=", 1) for entry in server)
    rng = random.Random(0)
    traces: dict[tuple[str, str], list[dict[str, float]]] = {(name, each): [] for name in servers for each in mode}
    with httpx.Client(timeout=300, trust_env=False) as client:
        models = {name: client.get(f"{url}/v1/models").json()["data"][0]["id"] for name, url in servers.items()}
        for number in track(range(rounds + 1), description="rounds"):
            for name, each in traces:
                request = body(models[name], each, rng, images, image_size, words)
                reply = client.post(f"{servers[name]}/v1/chat/completions", json=request)
                reply.raise_for_status()
                if number:  # the first warms up
                    traces[name, each].append(reply.json()["epd"]["timings_ms"])
    table = Table(title=f"{images} x {image_size}x{image_size} and {words} words; medians of {rounds}, ms")
    for column in ("server", "mode", *TIMINGS, "ttft min-max"):
        table.add_column(column, justify="left" if column in ("server", "mode") else "right")
    for (name, each), timings in traces.items():
        medians = [statistics.median(timing.get(key, 0.0) for timing in timings) for key in TIMINGS]
        spread = [timing["ttft"] for timing in timings]
        cells = [f"{value:.1f}" for value in medians]
        table.add_row(name, each, *cells, f"{min(spread):.0f}-{max(spread):.0f}")
    Console(width=120).print(table)
    if output is not None:
        output.write_text(json.dumps([{"server": key[0], "mode": key[1], "timings": v} for key, v in traces.items()]))


if __name__ == "__main__":
    typer.run(main)
