"""Which replicas are likely to hold the embedding of which image, as far as finished requests tell.

A hint and no more: a replica may have evicted an embedding, and then encodes it again, after which the hint is true
again. Bounded, least recently used out first. Pure bookkeeping: no clock, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from epd.routing.predict import Affinity
from epd.types import Placement, ReplicaLoad, Request

__all__ = ["Residency"]

_MAX_HOLDERS = 8


class Residency:
    """``mm_hash`` -> replicas, most recent last."""

    def __init__(self, max_items: int = 16384) -> None:
        self._max_items = max_items
        self._holders: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def learn(self, request: Request, placement: Placement) -> None:
        """Note where a request that ran to its end has left embeddings: with who encoded, and with who prefilled."""
        encoders = placement.encode or (placement.prefill,) * len(request.items)
        for item, encoder in zip(request.items, encoders, strict=True):
            holders = self._holders.setdefault(item.mm_hash, OrderedDict())
            self._holders.move_to_end(item.mm_hash)
            for replica_id in dict.fromkeys((encoder, placement.prefill)):
                holders[replica_id] = None
                holders.move_to_end(replica_id)
            while len(holders) > _MAX_HOLDERS:
                holders.popitem(last=False)
        while len(self._holders) > self._max_items:
            self._holders.popitem(last=False)

    def affinity(self, request: Request, loads: Iterable[ReplicaLoad]) -> Affinity:
        """Return what is known of a request's media at live replicas; others are forgotten."""
        known = {
            mm_hash: self._holders[mm_hash] for item in request.items if (mm_hash := item.mm_hash) in self._holders
        }
        if not known:
            return Affinity()
        live = {load.replica_id for load in loads}
        held: defaultdict[str, set[str]] = defaultdict(set)
        for mm_hash, holders in known.items():
            for replica_id in [replica_id for replica_id in holders if replica_id not in live]:
                del holders[replica_id]
            for replica_id in holders:
                held[replica_id].add(mm_hash)
        return Affinity({replica_id: frozenset(hashes) for replica_id, hashes in held.items()})
