"""Where images were encoded before. If these fail, a repeated image is encoded again elsewhere, or the router's memory
of images grows without bound."""

from __future__ import annotations

from epd.routing import Residency
from epd.types import (
    MediaItem,
    Modality,
    Mode,
    PlaceholderRange,
    Placement,
    ReplicaLoad,
    Request,
    SamplingParams,
    Stage,
)


def request(*hashes: str) -> Request:
    items = tuple(
        MediaItem(index, Modality.IMAGE, mm_hash, PlaceholderRange(3 * index, 2), (1, 2, 4))
        for index, mm_hash in enumerate(hashes)
    )
    return Request("r", tuple(range(3 * len(hashes) + 1)), SamplingParams(), items)


def placed(*encode: str, prefill: str = "p") -> Placement:
    return Placement(Mode.EPD, prefill, "d", encode)


def loads(*replica_ids: str) -> list[ReplicaLoad]:
    return [ReplicaLoad(replica_id, "pool", frozenset(Stage)) for replica_id in replica_ids]


LIVE = loads("e1", "e2", "p", "d")


def test_who_encoded_and_who_prefilled_hold_an_embedding():
    residency = Residency()
    residency.learn(request("a", "b"), placed("e1", "e2"))
    held = residency.affinity(request("b", "c"), LIVE).embeddings
    assert held == {"e2": {"b"}, "p": {"b"}}


def test_nothing_is_known_of_what_was_never_seen():
    assert Residency().affinity(request("a"), LIVE).embeddings == {}


def test_a_replica_that_is_gone_is_forgotten_even_if_it_comes_back():
    residency = Residency()
    residency.learn(request("a"), placed("e1"))
    assert residency.affinity(request("a"), loads("p")).embeddings == {"p": {"a"}}
    assert residency.affinity(request("a"), LIVE).embeddings == {"p": {"a"}}


def test_the_number_of_images_is_bounded_and_the_longest_unused_goes_first():
    residency = Residency(max_items=2)
    for mm_hash in ("a", "b", "a", "c"):
        residency.learn(request(mm_hash), placed("e1"))
    assert len(residency) == 2
    assert "e1" in residency.affinity(request("a"), LIVE).embeddings
    assert residency.affinity(request("b"), LIVE).embeddings == {}


def test_the_number_of_holders_of_an_image_is_bounded_and_the_latest_stay():
    residency = Residency()
    replicas = [f"e{number}" for number in range(40)]
    for replica_id in replicas:
        residency.learn(request("a"), placed(replica_id, prefill=replica_id))
    assert sorted(residency.affinity(request("a"), loads(*replicas)).embeddings) == sorted(replicas[-8:])
