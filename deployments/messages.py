"""What travels between the ingress and a replica, and between replicas. Knows nothing of Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from epd.types import ReplicaLoad, TokenChunk

T = TypeVar("T")

INGRESS = "ingress"
"""The name of the ingress deployment."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """An answer, with what the replica says of its own load at that moment."""

    value: T
    load: ReplicaLoad


@dataclass(frozen=True, slots=True)
class StreamItem:
    """All chunks that were ready when the item left, in order. ``load`` comes on the first item and now and then.

    ``index`` numbers the items of a stream, those in a channel included.
    """

    chunks: tuple[TokenChunk, ...]
    load: ReplicaLoad | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class LaneAddress:
    """Where an ingress reads a stream besides its own call; see ``deployments.token_channel``."""

    channel_id: str
    number: int


ChannelItem = tuple[int, int, tuple[Any, ...]]
"""A stream's number, the item's index in it, and its chunks, packed."""


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """What several streams of a replica had ready together; now and then with the replica's load."""

    items: tuple[ChannelItem, ...]
    load: ReplicaLoad | None = None


@dataclass(frozen=True, slots=True)
class Payloads:
    """A call's media bytes: in the call itself when small, or deposited ahead of it under a ticket."""

    inline: tuple[tuple[int, bytes], ...] = ()
    ticket: str | None = None


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """A replica as Serve knows it. Its text form, ``pool#unique_id``, is the replica id everywhere else."""

    pool: str
    unique_id: str

    def __str__(self) -> str:
        return f"{self.pool}#{self.unique_id}"

    @classmethod
    def parse(cls, replica_id: str) -> ReplicaAddress:
        pool, _, unique_id = replica_id.rpartition("#")
        return cls(pool, unique_id)
