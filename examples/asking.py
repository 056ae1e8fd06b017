"""What the examples share: a client for the server named on the command line, and messages with pictures in them."""

from __future__ import annotations

import argparse
import base64
import io
import sys
from typing import Any

from openai import APIConnectionError, APIStatusError, OpenAI
from PIL import Image


def connect(description: str) -> tuple[OpenAI, str]:
    """Read `--base-url` and `--api-key`; return a client, and the name of the model that the server has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    parser.add_argument("--api-key", default="none", help="needed only if the server was given keys")
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    try:
        return client, client.models.list().data[0].id
    except APIConnectionError:
        sys.exit(f"nothing answers at {arguments.base_url}: start a server with `make serve`")
    except APIStatusError as error:
        sys.exit(f"{arguments.base_url} refuses: {error.message}")


def user_message(question: str, *images: Image.Image) -> dict[str, Any]:
    """Return one message: the pictures, then the question."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


def data_url(image: Image.Image) -> str:
    """Return the picture as a PNG inside a URL, which needs no place on the network."""
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
