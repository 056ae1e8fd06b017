"""Chooses and builds a replica's connectors. The one place that knows all implementations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from epd.cache.kv_cache import KVCache
from epd.errors import ConfigError
from epd.transfer import nixl_agent
from epd.transfer.base import EmbeddingConnector, KVConnector, PeerClient
from epd.transfer.by_reference import ByReferenceEmbeddingConnector, ByReferenceKVConnector
from epd.transfer.nixl import NixlEmbeddingConnector, NixlKVConnector
from epd.transfer.nixl_endpoint import NixlEndpoint
from epd.transfer.slab import EmbeddingSlab

__all__ = ["Backend", "Connectors", "build_connectors", "resolve_backend"]

Backend = Literal["nixl", "by_reference"]


@dataclass(frozen=True, slots=True)
class Connectors:
    """A replica's connectors; ``kv`` is ``None`` where there is no KV cache (a replica that only encodes)."""

    kv: KVConnector | None
    embedding: EmbeddingConnector | None
    _endpoint: NixlEndpoint | None = field(default=None, repr=False)

    def items(self) -> Sequence[tuple[Literal["kv", "embedding"], KVConnector | EmbeddingConnector]]:
        """Return what there is, by kind."""
        result: list[tuple[Literal["kv", "embedding"], KVConnector | EmbeddingConnector]] = []
        if self.kv is not None:
            result.append(("kv", self.kv))
        if self.embedding is not None:
            result.append(("embedding", self.embedding))
        return result

    def close(self) -> None:
        """End all claims, then give the transport back."""
        for _, connector in self.items():
            connector.close()
        if self._endpoint is not None:
            self._endpoint.close()


def resolve_backend(configured: str) -> Backend:
    """Turn ``args.transfer.backend`` into what this process will use.

    ``auto`` takes NIXL if it is installed and works here. Asking creates an agent, which takes up to half a second the
    first time. Raises ``ConfigError`` when NIXL is asked for by name and cannot be had.
    """
    if configured in ("object_store", "by_reference"):
        return "by_reference"
    if configured not in ("auto", "nixl"):
        raise ConfigError("args.transfer.backend", f"unknown backend {configured!r}; use auto, nixl or object_store")
    try:
        nixl_agent.Agent("epd-probe").close()
    except ImportError as error:
        if configured == "nixl":
            raise ConfigError(
                "args.transfer.backend",
                "nixl is not installed; pip install 'ray-epd[nixl]', or use auto or object_store",
            ) from error
        return "by_reference"
    except (OSError, nixl_agent.AgentError) as error:
        if configured == "nixl":
            raise ConfigError("args.transfer.backend", f"nixl is installed but does not work here: {error}") from error
        return "by_reference"
    return "nixl"


def build_connectors(
    backend: Backend,
    *,
    owner: str,
    kv_cache: KVCache | None,
    embedding_slab_bytes: int,
    embedding_layout: str,
    embedding_width: int,
    embedding_dtype: str,
    lease_s: float,
    peers: PeerClient,
    clock: Callable[[], float] = time.monotonic,
    device: str = "cpu",
) -> Connectors:
    """Build the connectors of one replica over its KV cache and a new embedding slab.

    A slab of zero bytes can fetch embeddings, but not publish any. ``device`` is where the slab lives.
    """
    slab = EmbeddingSlab(embedding_slab_bytes, embedding_width, getattr(torch, embedding_dtype), device)
    if backend == "by_reference":
        return Connectors(
            kv=None if kv_cache is None else ByReferenceKVConnector(owner, kv_cache, peers, lease_s, clock),
            embedding=ByReferenceEmbeddingConnector(owner, slab, embedding_layout, peers, lease_s, clock),
        )
    endpoint = NixlEndpoint(owner)
    return Connectors(
        kv=None if kv_cache is None else NixlKVConnector(endpoint, kv_cache, lease_s, clock),
        embedding=NixlEmbeddingConnector(endpoint, slab, embedding_layout, lease_s, clock),
        _endpoint=endpoint,
    )
