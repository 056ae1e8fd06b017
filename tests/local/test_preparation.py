"""From a body to what the stages get. If these fail, a model sees its pictures in another order, at another size or at
other times than the client sent them, or two different pictures share an embedding.
"""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from deployments.generation import Prepared
from deployments.preparation import Preparer
from deployments.protocol import ChatBody, CompletionBody
from encoders import resolve_family
from epd.config import parse_config
from epd.errors import MediaError
from epd.media.fetch import Fetcher
from epd.types import Modality, ModelFamily
from tests.cluster.scenes import asking, data_url, picture

POOLS = {"all": {"roles": ["encode", "prefill", "decode"]}}


class Ready:
    """A preparer over the tiny checkpoint, and its model family."""

    def __init__(self, preparer: Preparer, family: ModelFamily) -> None:
        self.preparer = preparer
        self.family = family

    async def chat(self, messages: list[dict[str, Any]], **fields: Any) -> Prepared:
        return await self.preparer.chat(ChatBody(messages=messages, max_tokens=4, **fields), deadline_s=9e9)


@pytest.fixture
async def ready(tiny_qwen_dir: Path) -> AsyncIterator[Ready]:
    config = parse_config({"model": {"source": str(tiny_qwen_dir)}, "pools": POOLS})
    family = resolve_family(config.model)
    async with Fetcher(config.media) as fetcher:
        yield Ready(Preparer(config, family, fetcher), family)


def clip(num_frames: int = 9, frame_ms: int = 130) -> str:
    """Return a clip as a data URL, whose frames lie at times that no sampling rate hits."""
    frames = [Image.new("RGB", (56, 56), (20 * index, 0, 0)) for index in range(num_frames)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=frame_ms)
    return "data:image/gif;base64," + base64.b64encode(buffer.getvalue()).decode()


async def test_items_keep_the_order_of_their_parts_over_messages(ready: Ready):
    urls = [picture("red", (112, 84)), picture("blue", (56, 140)), picture("red", (112, 84))]
    messages = [*asking("first?", urls[0], urls[1]), {"role": "assistant", "content": "yes"}, *asking("?", urls[2])]
    prepared = await ready.chat(messages)
    items = prepared.request.items
    assert [item.param for item in items] == [
        "messages[0].content[0]",
        "messages[0].content[1]",
        "messages[2].content[0]",
    ]
    assert all(before.placeholder.end <= after.placeholder.offset for before, after in pairwise(items))
    assert [item.grid_thw for item in items] == [
        ready.family.image_layout(*size).grid_thw for size in ((112, 84), (56, 140), (112, 84))
    ]
    assert items[0].mm_hash == items[2].mm_hash != items[1].mm_hash
    assert set(prepared.payloads) == {0, 1, 2}


async def test_a_picture_is_laid_out_as_its_camera_was_held(ready: Ready):
    image = Image.new("RGB", (140, 56), "white")
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    url = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    (item,) = (await ready.chat(asking("?", url))).request.items
    assert item.grid_thw == ready.family.image_layout(56, 140).grid_thw


async def test_a_clip_is_placed_by_the_times_at_which_it_was_sampled(ready: Ready):
    part = {"type": "video_url", "video_url": {"url": clip()}}
    content = [part, {"type": "text", "text": "?"}]
    (item,) = (await ready.chat([{"role": "user", "content": content}])).request.items
    assert item.modality is Modality.VIDEO
    assert len(item.timestamps_s) > 1
    gaps = [after - before for before, after in pairwise(item.timestamps_s)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps))
    assert item.timestamps_s == pytest.approx(ready.family.video_timestamps(9 * 0.13, 1 / 0.13, 9))


async def test_a_picture_that_cannot_be_read_is_named_before_any_stage_runs(ready: Ready):
    broken = "data:image/png;base64," + base64.b64encode(b"no picture").decode()
    with pytest.raises(MediaError) as failure:
        await ready.chat(asking("?", picture(), broken))
    assert failure.value.param == "messages[0].content[1]"


async def test_detail_is_part_of_what_an_embedding_is_known_by(ready: Ready):
    url = data_url(Image.new("RGB", (448, 448), "white"))

    async def digest(detail: str) -> str:
        part = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        return (await ready.chat([{"role": "user", "content": [part]}])).request.items[0].mm_hash

    assert await digest("low") != await digest("high")


async def test_what_the_stages_get_has_no_text(ready: Ready):
    body = CompletionBody(prompt="one two", stop=["x"], n=2, max_tokens=3, seed=5, logit_bias={"7": 1.5})
    prepared = await ready.preparer.completion(body, "one two", deadline_s=123.0)
    sampling = prepared.request.sampling
    assert (sampling.n, sampling.max_tokens, sampling.seed, sampling.logit_bias) == (2, 3, 5, ((7, 1.5),))
    assert prepared.request.deadline_s == 123.0
    given = await ready.preparer.completion(body, [5, 6], deadline_s=123.0)
    assert given.request.prompt_token_ids == (5, 6)
