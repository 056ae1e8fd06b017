"""The ingress's endpoints over fake replicas in one process: real validation, placement, life and replies, no Ray."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from starlette.applications import Starlette
from starlette.routing import Route

from deployments.auth import load_api_keys
from deployments.cluster_view import ClusterView
from deployments.metrics import IngressMetrics, render
from deployments.placing import Placer, build_cost_model
from deployments.preparation import Preparer
from deployments.service import OpenAIService
from encoders import resolve_family
from epd.config import AppConfig, parse_config
from epd.media.fetch import Fetcher
from epd.stages.life import ClientOf
from epd.testing import FakeStageWorker
from epd.types import ReplicaLoad

POOLS: dict[str, Any] = {
    "encode": {"roles": ["encode"]},
    "prefill": {"roles": ["encode", "prefill"]},
    "decode": {"roles": ["encode", "prefill", "decode"], "num_replicas": 2},
}


class FakePeers:
    """Reaches the fake replicas directly."""

    def __init__(self) -> None:
        self.workers: dict[str, FakeStageWorker] = {}

    async def read(self, owner: str, handle_id: str, first: int, count: int) -> torch.Tensor:
        return self.workers[owner].read(handle_id, first, count)

    async def renew(self, owner: str, handle_ids: Sequence[str]) -> None:
        await self.workers[owner].renew(handle_ids)

    async def release(self, owner: str, handle_ids: Sequence[str]) -> None:
        await self.workers[owner].release(handle_ids)


@dataclass
class InProcessService:
    """``http`` talks to the endpoints; ``workers`` are the replicas by id."""

    config: AppConfig
    workers: dict[str, FakeStageWorker]
    view: ClusterView
    metrics: IngressMetrics
    http: httpx.AsyncClient

    async def ask(self, path: str = "/v1/chat/completions", /, **body: Any) -> httpx.Response:
        defaults: dict[str, Any] = {"max_tokens": 8}
        if path.endswith("chat/completions"):
            defaults["messages"] = [{"role": "user", "content": "one two three"}]
        return await self.http.post(path, json={**defaults, **body})

    def page(self) -> str:
        return render([self.metrics.families()], []).decode()

    async def check_integrity(self) -> None:
        """Nothing runs and nothing is claimed on any replica."""
        for worker in self.workers.values():
            await worker.check_integrity()
            assert worker.load().num_running == 0
            assert worker.load().num_live_handles == 0


WorkerType = Callable[..., FakeStageWorker]


@contextlib.asynccontextmanager
async def in_process_service(
    directory: Path, *, worker_type: WorkerType = FakeStageWorker, **sections: Any
) -> AsyncIterator[InProcessService]:
    """Build the service over a checkpoint's tokenizer. ``sections`` update sections of the configuration."""
    model = {"source": str(directory), "name": "tiny", **sections.pop("model", {})}
    config = parse_config({"model": model, "pools": sections.pop("pools", POOLS), **sections})
    peers = FakePeers()
    for name, pool in config.pools.items():
        for index in range(pool.num_replicas or 1):
            replica_id = f"{name}#{index}"
            peers.workers[replica_id] = worker_type(replica_id, name, pool.roles, peers)

    async def ask_pool(pool: str) -> list[ReplicaLoad]:
        return [worker.load() for worker in peers.workers.values() if worker.pool == pool]

    @contextlib.contextmanager
    def open_clients() -> Iterator[ClientOf]:
        yield peers.workers.__getitem__

    view = ClusterView(list(config.pools), ask_pool, poll_interval_s=3600.0)
    await view.refresh()
    metrics = IngressMetrics("ingress#0")
    async with Fetcher(config.media) as fetcher:
        preparer = Preparer(config, resolve_family(config.model), fetcher)
        placer = Placer(config, view, build_cost_model(config))
        service = OpenAIService(config, preparer, placer, open_clients, metrics, load_api_keys(config.ingress))
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", service.chat, methods=["POST"]),
                Route("/v1/completions", service.completions, methods=["POST"]),
                Route("/v1/models", service.models),
            ]
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            yield InProcessService(config, peers.workers, view, metrics, http)
