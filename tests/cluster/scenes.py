"""Pictures to send, as data URLs, and the messages that carry them."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image, ImageDraw


def picture(color: str = "red", size: tuple[int, int] = (112, 84)) -> str:
    """Return a PNG of a disc as a data URL."""
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse((10, 10, size[0] - 10, size[1] - 10), fill=color)
    return data_url(image)


def noise(size: tuple[int, int], seed: int = 0) -> str:
    """Return a picture that does not compress, so that its bytes are many."""
    import numpy as np

    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return data_url(Image.fromarray(values))


def data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def asking(text: str, *urls: str) -> list[dict[str, Any]]:
    """Return one user message: the pictures, then the text."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
