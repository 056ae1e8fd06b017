"""If this fails, inline images are refused or misread, URLs are fetched twice, or two images share one embedding."""

from __future__ import annotations

import asyncio
import base64
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.config import MediaConfig
from epd.errors import MediaError, MediaFetchError
from epd.media.fetch import Fetcher
from epd.media.hashing import media_hash
from epd.media.source import MediaSource, decode_data_url, resolve, resolve_all
from epd.types import Modality

CONFIG = MediaConfig(max_bytes=1000)
PARAM = "messages[0].content[1]"


def decoded(url: str, config: MediaConfig = CONFIG) -> bytes:
    return decode_data_url(url, param=PARAM, config=config)


class FakeFetcher(Fetcher):
    """Answers with the URL itself; a URL that ends in ``!`` fails, one that ends in ``~`` never comes back."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.fetched: list[str] = []
        self.cancelled: list[str] = []

    async def fetch(self, url: str, *, param: str | None) -> bytes:
        self.fetched.append(url)
        try:
            await (asyncio.Event().wait() if url.endswith("~") else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled.append(url)
            raise
        if url.endswith("!"):
            raise MediaFetchError("gone", param)
        return url.encode()


async def resolved(urls: Sequence[str], fetcher: Fetcher, config: MediaConfig = CONFIG) -> list[bytes]:
    sources = [MediaSource(url, f"messages[{index}]") for index, url in enumerate(urls)]
    return await resolve_all(sources, config=config, fetcher=fetcher)


@given(st.binary(min_size=1, max_size=300))
def test_base64_data_urls_give_back_the_bytes(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    wrapped = "\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    escaped = text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    for payload in (text, text.rstrip("="), wrapped, f" {text} \r\n", escaped):
        assert decoded(f"data:image/png;base64,{payload}") == data


@given(st.binary(min_size=1, max_size=300))
def test_percent_encoded_data_urls_give_back_the_bytes(data: bytes) -> None:
    assert decoded("data:application/octet-stream," + "".join(f"%{byte:02x}" for byte in data)) == data


@pytest.mark.parametrize("header", ["data:;base64,", "DATA:image/jpeg;charset=utf-8;BASE64,", "data:base64;base64,"])
async def test_headers_of_data_urls_may_be_short_long_or_loud(header: str) -> None:
    fetcher = FakeFetcher()
    assert await resolve(f" {header}aGk=", param=PARAM, config=CONFIG, fetcher=fetcher) == b"hi"
    assert fetcher.fetched == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "empty"),
        ("data:,", "empty"),
        ("data:image/png;base64,a", "not valid base64"),
        ("data:image/png;base64,aGk_", "not valid base64"),
        ("data:image/png;base64,aG=k", "not valid base64"),
        ("data:image/png;base64,aGk=aGk=", "not valid base64"),
        ("data:image/png;base64,aGké", "not valid base64"),
        ("data:image/png;base64,%ff%fe", "not valid base64"),
        ("data:image/png;base64," + "A" * 1336, "1002 bytes; the limit is 1000"),
        ("data:," + "a" * 1001, "1001 bytes; the limit is 1000"),
    ],
)
def test_a_bad_data_url_is_refused_by_name(url: str, reason: str) -> None:
    with pytest.raises(MediaError, match=reason) as error:
        decoded(url)
    assert error.value.param == PARAM


def test_the_size_is_counted_before_decoding() -> None:
    url = "data:image/png;base64," + "A" * 4_000_000
    tracemalloc.start()
    try:
        with pytest.raises(MediaError):
            decoded(url)
        # Slicing the URL copies it; the decoded bytes would come on top of that.
        assert tracemalloc.get_traced_memory()[1] < 9_000_000
    finally:
        tracemalloc.stop()


async def test_a_large_data_url_is_decoded_too() -> None:
    data = bytes(range(256)) * 8192
    url = "data:;base64," + base64.b64encode(data).decode()
    assert await resolve(url, param=PARAM, config=MediaConfig(), fetcher=FakeFetcher()) == data


async def test_identical_urls_of_a_request_are_fetched_once_and_order_is_kept() -> None:
    fetcher = FakeFetcher()
    urls = ["http://a/1", "http://a/2", "http://a/1", "data:,x", "http://a/1"]
    assert await resolved(urls, fetcher) == [b"http://a/1", b"http://a/2", b"http://a/1", b"x", b"http://a/1"]
    assert sorted(fetcher.fetched) == ["http://a/1", "http://a/2"]


async def test_the_first_failure_names_its_part_and_cancels_the_rest() -> None:
    fetcher = FakeFetcher()
    with pytest.raises(MediaFetchError) as error:
        await resolved(["http://a/~", "http://a/!", "http://b/~"], fetcher)
    assert error.value.param == "messages[1]"
    assert sorted(fetcher.cancelled) == ["http://a/~", "http://b/~"]


async def test_too_many_parts_are_refused_before_any_is_fetched() -> None:
    fetcher = FakeFetcher()
    with pytest.raises(MediaError, match="3 images and videos; at most 2") as error:
        await resolved(["http://a/1"] * 3, fetcher, MediaConfig(max_items=2))
    assert error.value.param == "messages[2]"
    assert fetcher.fetched == []


async def test_a_request_without_media_resolves_to_nothing() -> None:
    assert await resolved([], FakeFetcher()) == []


# --------------------------------------------------------------------------------------------------------------------
# Hashes
# --------------------------------------------------------------------------------------------------------------------

ITEM: dict[str, Any] = {
    "data": b"pixels",
    "fingerprint": "model@1",
    "detail": "auto",
    "timestamps_s": (0.0, 0.5),
    "modality": Modality.VIDEO,
}


def hash_of(**changes: Any) -> str:
    fields = {**ITEM, **changes}
    return media_hash(fields.pop("data"), **fields)


def test_everything_that_changes_an_embedding_changes_the_hash() -> None:
    variants = [
        {},
        {"data": b"pixelt"},
        {"fingerprint": "model@2"},
        {"detail": "low"},
        {"timestamps_s": (0.0, 0.6)},
        {"timestamps_s": (0.0,)},
        {"timestamps_s": ()},
        {"modality": Modality.IMAGE},
    ]
    assert len({hash_of(**variant) for variant in variants}) == len(variants)
    assert hash_of() == hash_of(timestamps_s=[0.0, 0.5])


def test_fields_do_not_run_into_each_other() -> None:
    assert hash_of(fingerprint="ab", detail="c") != hash_of(fingerprint="a", detail="bc")
    assert hash_of(detail="auto", timestamps_s=(), data=b"x") != hash_of(detail="", timestamps_s=(), data=b"autox")
