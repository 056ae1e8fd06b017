"""What to type first at a running server: a curl line and a Python snippet that work as printed."""

from __future__ import annotations

import json

from epd.config import AppConfig

_PYTHON = """\
import base64, io
from openai import OpenAI
from PIL import Image, ImageDraw

image = Image.new("RGB", (112, 112), "white")
ImageDraw.Draw(image).ellipse((30, 30, 80, 80), fill=(220, 30, 30))
png = io.BytesIO()
image.save(png, "PNG")
url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()

client = OpenAI(base_url="{url}/v1", api_key="{key}")
reply = client.chat.completions.create(
    model={model},
    messages=[
        {{
            "role": "user",
            "content": [
                {{"type": "image_url", "image_url": {{"url": url}}}},
                {{"type": "text", "text": "What color is the circle?"}},
            ],
        }}
    ],
    max_tokens=32,
    extra_body={{"epd": {{"mode": "{mode}", "trace": True}}}},
)
print(reply.choices[0].message.content)
print(reply.model_extra["epd"]["placement"])
"""

BEGIN_PYTHON, END_PYTHON = "# In Python:", "# Stop with Ctrl-C."


def first_steps(url: str, config: AppConfig) -> str:
    """Return the text to print once the server at ``url`` answers."""
    model = config.model.served_name
    question = "Count from 3 to 12." if config.model.source == "demo" else "Say hello."
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 32})
    has_keys = config.ingress.api_keys_env is not None or config.ingress.api_keys_file is not None
    authorization = " -H 'authorization: Bearer <your key>'" if has_keys else ""
    curl = f"curl {url}/v1/chat/completions -H 'content-type: application/json'{authorization} -d '{body}'"
    key = "<your key>" if has_keys else "none"
    python = _PYTHON.format(url=url, key=key, model=json.dumps(model), mode=config.modes[-1].value)
    return f"Serving {model} at {url}\n\n{curl}\n\n{BEGIN_PYTHON}\n{python}\n{END_PYTHON}\n"
