"""What is asked of a server, and when: request shapes, arrival times, prompts and drawn images, all from one seed.

Owns the distributions and the reading of ServeGen populations. Knows nothing of HTTP clients or of what is measured.
The same seed gives the same requests, to the byte, so contenders are compared on equal work.
"""

from __future__ import annotations

import ast
import base64
import csv
import io
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from epd.errors import ConfigError

PIXELS_PER_IMAGE_TOKEN = 28 * 28
"""Of the Qwen2-VL and Qwen2.5-VL families: patches of 14, merged two by two."""

_TEXT = (
    "the of a to and in is that for it as with be on by this are or not from at which an if you all one can will more "
    "red green blue circle square number image left right count many large small first last between above below"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The size of one request. ``text_tokens`` counts words of one token each, roughly one for most tokenizers."""

    num_images: int
    image_width: int
    image_height: int
    text_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of a workload, due ``due_s`` after its start. ``image_seeds`` name the images; equal ones repeat."""

    index: int
    due_s: float
    shape: RequestShape
    image_seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival over ``duration_s``."""

    name: str
    items: tuple[WorkItem, ...]
    duration_s: float
    seed: int


# -- arrivals


def arrival_times(rate: float, duration_s: float, cv: float, rng: np.random.Generator) -> list[float]:
    """Draw arrival times in ``[0, duration_s)`` with gamma gaps: ``cv`` 1 is Poisson, above 1 is bursty, 0 is even."""
    if rate <= 0:
        raise ValueError(f"rate must be positive, got {rate}")
    times: list[float] = []
    at_s = 0.0
    while True:
        if cv == 0:
            gap_s = 1.0 / rate
        else:
            shape = 1.0 / cv**2
            gap_s = float(rng.gamma(shape, 1.0 / (rate * shape)))
        at_s += gap_s
        if at_s >= duration_s:
            return times
        times.append(at_s)


# -- shapes

# Cumulative share -> value, as the rate-weighted ServeGen image service has them; linear between the points.
_QUANTILES: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "text": ((0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.99, 1), (36, 41, 76, 106, 1032, 1914, 3064, 3400)),
    "image_tokens": ((0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1), (4, 6, 234, 540, 1196, 1224, 1271, 1280)),
    "output": ((0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.99, 1), (2, 3, 29, 97, 185, 264, 587, 1000)),
}
_IMAGE_COUNTS = ((1, 2, 3, 4, 5, 7, 9, 12), (0.83, 0.05, 0.05, 0.025, 0.015, 0.01, 0.012, 0.008))


def builtin_shape(rng: np.random.Generator) -> RequestShape:
    """Draw a shape from a built-in distribution with the quantiles of the ServeGen image service."""

    def draw(name: str) -> int:
        shares, values = _QUANTILES[name]
        return max(1, round(float(np.interp(rng.random(), shares, values))))

    num_images = int(rng.choice(_IMAGE_COUNTS[0], p=_IMAGE_COUNTS[1]))
    width, height = image_size(draw("image_tokens"), rng)
    return RequestShape(num_images, width, height, draw("text"), draw("output"))


def image_size(num_tokens: int, rng: np.random.Generator) -> tuple[int, int]:
    """Return width and height of an image worth about ``num_tokens``, in one of the usual aspect ratios."""
    ratio = float(rng.choice([1.0, 4 / 3, 3 / 4, 16 / 9]))
    side = math.sqrt(max(4, num_tokens) * PIXELS_PER_IMAGE_TOKEN)
    return max(56, round(side * math.sqrt(ratio))), max(56, round(side / math.sqrt(ratio)))


def scale_shape(shape: RequestShape, scale: float) -> RequestShape:
    """Shrink or grow a shape's tokens and pixels by one factor, for a model or machine of another size."""
    side = math.sqrt(scale)
    return replace(
        shape,
        image_width=max(56, round(shape.image_width * side)),
        image_height=max(56, round(shape.image_height * side)),
        text_tokens=max(1, round(shape.text_tokens * scale)),
        output_tokens=max(1, round(shape.output_tokens * scale)),
    )


# -- workloads


def fixed_workload(
    shapes: Sequence[RequestShape],
    *,
    rate: float,
    duration_s: float,
    cv: float,
    seed: int,
    image_share: float = 1.0,
    image_reuse: float = 0.0,
) -> Workload:
    """Draw requests of the given shapes, in equal parts, at one mean rate.

    ``image_share`` of the requests keep their images, the others are text only. ``image_reuse`` of the images repeat
    an earlier one.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for due_s in arrival_times(rate, duration_s, cv, rng):
        shape = shapes[int(rng.integers(len(shapes)))]
        if rng.random() >= image_share:
            shape = replace(shape, num_images=0)
        drawn.append((due_s, shape))
    return _with_images("fixed", drawn, duration_s, seed, image_reuse, rng)


def builtin_workload(
    *, rate: float, duration_s: float, cv: float = 2.0, seed: int, image_reuse: float = 0.0, scale: float = 1.0
) -> Workload:
    """Draw a workload like the ServeGen image service without its data; bursty (CV 2) by default."""
    rng = np.random.default_rng(seed)
    drawn = [(due_s, scale_shape(builtin_shape(rng), scale)) for due_s in arrival_times(rate, duration_s, cv, rng)]
    return _with_images("builtin", drawn, duration_s, seed, image_reuse, rng)


def _with_images(
    name: str,
    drawn: Sequence[tuple[float, RequestShape]],
    duration_s: float,
    seed: int,
    image_reuse: float,
    rng: np.random.Generator,
) -> Workload:
    seen: list[int] = []
    items = []
    for index, (due_s, shape) in enumerate(drawn):
        seeds = []
        for _ in range(shape.num_images):
            if seen and rng.random() < image_reuse:
                seeds.append(seen[int(rng.integers(len(seen)))])
            else:
                seen.append(len(seen))
                seeds.append(seen[-1])
        items.append(WorkItem(index, due_s, shape, tuple(seeds)))
    return Workload(name, tuple(items), duration_s, seed)


# -- ServeGen


_SERVEGEN_NAMES = ("image_count", "image_tokens", "text_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class ServeGenClient:
    """One client population: token distributions by start of their window, and arrival rates by time of day."""

    windows: tuple[tuple[float, Mapping[str, Mapping[int, float]]], ...]
    rates: tuple[tuple[float, float, float], ...]
    """(start in seconds, requests per second, coefficient of variation of the gaps)."""

    def at(self, time_s: float) -> tuple[float, float, Mapping[str, Mapping[int, float]]]:
        """Return rate, CV and distributions that hold at a time of day."""
        rate, cv = next(((rate, cv) for start, rate, cv in reversed(self.rates) if start <= time_s), (0.0, 1.0))
        window = next((each for start, each in reversed(self.windows) if start <= time_s), {})
        return rate, cv, window


def read_servegen(directory: Path) -> list[ServeGenClient]:
    """Read ServeGen's multimodal image data: ``chunk-*-dataset.json`` and ``chunk-*-trace.csv`` side by side.

    Raises ``ConfigError`` if the directory holds none, or a file is not in that format.
    """
    clients = []
    for dataset_path in sorted(directory.glob("chunk-*-dataset.json"), key=lambda path: int(path.name.split("-")[1])):
        trace_path = dataset_path.with_name(dataset_path.name.replace("-dataset.json", "-trace.csv"))
        try:
            data: Mapping[str, Mapping[str, str]] = json.loads(dataset_path.read_text())
            windows = tuple(
                (float(start), {name: dict(ast.literal_eval(value)) for name, value in window.items()})
                for start, window in sorted(data.items(), key=lambda entry: float(entry[0]))
            )
            for (_, window), name in itertools.product(windows, _SERVEGEN_NAMES):
                if not window.get(name):
                    raise ValueError(f"no {name}")
            with trace_path.open(newline="") as file:
                rates = tuple((float(row[0]), float(row[1]), float(row[2] or 1.0)) for row in csv.reader(file) if row)
        except (OSError, ValueError, TypeError, SyntaxError, IndexError, AttributeError) as error:
            raise ConfigError(str(dataset_path), f"not a ServeGen population: {error}") from error
        clients.append(ServeGenClient(windows, rates))
    if not clients:
        raise ConfigError(str(directory), "holds no chunk-*-dataset.json")
    return clients


def servegen_workload(
    clients: Sequence[ServeGenClient],
    *,
    rate: float,
    duration_s: float,
    seed: int,
    start_s: float = 12 * 3600.0,
    image_reuse: float = 0.0,
    scale: float = 1.0,
) -> Workload:
    """Replay the populations from ``start_s`` (time of day), with all rates scaled so that their sum is ``rate``.

    Each client keeps its share, its burstiness (gamma gaps of its own CV) and its distributions.
    """
    rng = np.random.default_rng(seed)
    total_rate = sum(client.at(start_s)[0] for client in clients)
    if total_rate <= 0:
        raise ConfigError("start_s", f"no client is active at {start_s:.0f} s of the trace")
    drawn: list[tuple[float, RequestShape]] = []
    for client in clients:
        client_rate, cv, window = client.at(start_s)
        if client_rate <= 0 or not window:
            continue
        # Start each client somewhere in its own sequence: gaps that begin at 0 would under-count slow ones.
        lead_s = duration_s * float(rng.random())
        times = arrival_times(client_rate / total_rate * rate, duration_s + lead_s, cv or 1.0, rng)
        for due_s in times:
            if due_s >= lead_s:
                drawn.append((due_s - lead_s, scale_shape(_servegen_shape(window, rng), scale)))
    drawn.sort(key=lambda entry: entry[0])
    return _with_images("servegen", drawn, duration_s, seed, image_reuse, rng)


def _servegen_shape(window: Mapping[str, Mapping[int, float]], rng: np.random.Generator) -> RequestShape:
    def draw(name: str) -> int:
        values, weights = zip(*window[name].items(), strict=True)
        shares = np.array(weights, dtype=np.float64)
        return int(rng.choice(values, p=shares / shares.sum()))

    width, height = image_size(draw("image_tokens"), rng)
    return RequestShape(draw("image_count"), width, height, max(1, draw("text_tokens")), max(1, draw("output_tokens")))


# -- bodies


def draw_image(width: int, height: int, seed: int, salt: int = 0) -> bytes:
    """Draw coloured shapes on a plain background, as JPEG. No two pairs of seed and salt give the same bytes."""
    rng = np.random.default_rng((salt, seed))
    image = Image.new("RGB", (width, height), tuple(int(value) for value in rng.integers(0, 256, 3)))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        left, right = sorted(int(value) for value in rng.integers(0, width, 2))
        top, bottom = sorted(int(value) for value in rng.integers(0, height, 2))
        colour = tuple(int(value) for value in rng.integers(0, 256, 3))
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((left, top, right + 1, bottom + 1), fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90, comment=f"seed {seed} {salt}".encode())
    return buffer.getvalue()


def request_body(item: WorkItem, *, model: str, salt: int = 0, options: Mapping[str, Any] | None = None) -> bytes:
    """Build the JSON body of a streaming chat completion; ``options`` are added at the top level.

    ``salt`` changes the words and pixels but no size: runs with different salts share nothing that a server may cache.
    """
    rng = np.random.default_rng((salt, item.index))
    # The first word differs between requests, so that no prompt is another's prefix.
    words = [f"{salt:x}-{item.index:x}", *map(str, rng.choice(_WORDS, max(0, item.shape.text_tokens - 1)))]
    parts: list[dict[str, Any]] = []
    for image_seed in item.image_seeds:
        data = draw_image(item.shape.image_width, item.shape.image_height, image_seed, salt)
        url = "data:image/jpeg;base64," + base64.b64encode(data).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    parts.append({"type": "text", "text": " ".join(words)})
    body = {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": item.shape.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "min_tokens": item.shape.output_tokens,  # an ignored end token shows no text, and so no time of arrival
        "stream": True,
        "stream_options": {"include_usage": True},
        **(options or {}),
    }
    return json.dumps(body).encode()
