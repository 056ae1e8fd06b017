"""The HTTP front as a Serve deployment: wires the OpenAI endpoints to live replicas.

Knows Ray, and nothing of requests: the endpoints are in ``deployments.service``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from deployments.auth import load_api_keys
from deployments.client import PayloadStore, RayStageClient, ReplicaHandle
from deployments.cluster_view import ClusterView
from deployments.environment import hides_connections
from deployments.errors import HttpError
from deployments.introductions import Introductions
from deployments.messages import INGRESS, ReplicaAddress
from deployments.metrics import IngressMetrics, ReplicaSnapshot, render
from deployments.placing import Placer, build_cost_model
from deployments.preparation import Preparer
from deployments.service import OpenAIService
from encoders import resolve_family
from epd import __version__
from epd.config import AppConfig, parse_config
from epd.media.fetch import Fetcher
from epd.stages.life import ClientOf
from epd.types import ReplicaLoad, StageClient

logger = logging.getLogger(__name__)

METRICS_TIMEOUT_S = 1.0
POLL_TIMEOUT_S = 5.0
MEETING_TIMEOUT_S = 20.0


def _http_exception(request: Request, error: Exception) -> JSONResponse:
    """Answer for unknown paths and methods as for everything else."""
    status = getattr(error, "status_code", 404)
    detail = getattr(error, "detail", "error")
    reply = HttpError(status, f"{request.method} {request.url.path}: {detail}", "invalid_request_error")
    return JSONResponse(reply.body, status_code=reply.status, headers=getattr(error, "headers", None))


def as_arrived(request: Request) -> Request:
    """Forget at which address a request arrived if that says nothing of where it came from.

    Without API keys, requests are answered that can only come from this machine, and through HAProxy all seem to.
    """
    if hides_connections():
        request.scope["server"] = None
    return request


app = FastAPI(title="ray-epd", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
app.add_exception_handler(HTTPException, _http_exception)


class Ingress:
    """One ingress replica. ``pools`` maps each pool's name to its handle."""

    def __init__(self, args: Mapping[str, Any], pools: Mapping[str, DeploymentHandle]) -> None:
        config = parse_config(args)
        context = serve.get_replica_context()
        self._app_name = context.app_name
        self._pools = dict(pools)
        self._replicas: dict[str, ReplicaHandle] = {}
        self._metrics = IngressMetrics(f"{INGRESS}#{context.replica_id.unique_id}")
        self._introductions = Introductions(partial(self._ask_replica, timeout_s=MEETING_TIMEOUT_S))
        self._view = ClusterView(
            list(self._pools),
            self._ask_pool,
            poll_interval_s=config.ingress.load_poll_interval_s,
            on_poll=self._introductions.notice,
        )
        self._fetcher = Fetcher(config.media)
        self._service = self._build_service(config)

    def _build_service(self, config: AppConfig) -> OpenAIService:
        preparer = Preparer(config, resolve_family(config.model), self._fetcher)
        placer = Placer(config, self._view, build_cost_model(config))
        keys = load_api_keys(config.ingress)
        return OpenAIService(config, preparer, placer, self._open_clients, self._metrics, keys)

    # -- endpoints -----------------------------------------------------------------------------------------------------

    @app.post("/v1/chat/completions")
    async def chat_completions(self, request: Request) -> Response:
        return await self._service.chat(as_arrived(request))

    @app.post("/v1/completions")
    async def completions(self, request: Request) -> Response:
        return await self._service.completions(as_arrived(request))

    @app.get("/v1/models")
    async def models(self, request: Request) -> Response:
        return await self._service.models(as_arrived(request))

    @app.get("/health")
    async def health(self) -> Response:
        """Answer 503 until every pool has a replica that answers."""
        self._view.start()
        if self._view.missing_pools:
            await self._view.refresh()
        missing = self._view.missing_pools
        if missing:
            return JSONResponse({"status": "starting", "missing_pools": missing}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics(self) -> Response:
        """Answer for all replicas of the application; those that do not answer in time are left out."""
        own = serve.get_deployment_handle(INGRESS, self._app_name)
        loads = self._view.loads
        ingresses, *all_stats = await asyncio.gather(
            _ask_all(own, "local_metrics", METRICS_TIMEOUT_S),
            *(self._ask_replica(load.replica_id, "stats", timeout_s=METRICS_TIMEOUT_S) for load in loads),
            return_exceptions=True,
        )
        replicas = [
            ReplicaSnapshot(load.pool, load.replica_id, stats)
            for load, stats in zip(loads, all_stats, strict=True)
            if not isinstance(stats, BaseException)
        ]
        if isinstance(ingresses, BaseException) or not ingresses:
            ingresses = [self._metrics.families()]
        page = render(ingresses, replicas)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    # -- for other ingress replicas and Serve --------------------------------------------------------------------------

    async def local_metrics(self) -> Sequence[Metric]:
        return self._metrics.families()

    async def check_health(self) -> None:
        """Start polling on this loop; Serve checks health before it sends the first request."""
        self._view.start()

    async def __del__(self) -> None:
        await self._view.close()
        await self._introductions.close()
        await self._fetcher.aclose()

    # -- the way to the replicas ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open_clients(self) -> Iterator[ClientOf]:
        store = PayloadStore()

        def client_of(replica_id: str) -> StageClient:
            replica = self._replica(replica_id)
            return RayStageClient(replica, store, on_load=self._view.update, on_lost=self._drop)

        try:
            yield client_of
        finally:
            store.close()

    def _replica(self, replica_id: str) -> ReplicaHandle:
        if replica_id not in self._replicas:
            address = ReplicaAddress.parse(replica_id)
            self._replicas[replica_id] = ReplicaHandle(self._pools[address.pool], address, self._view.update)
        return self._replicas[replica_id]

    def _drop(self, replica_id: str) -> None:
        self._view.drop(replica_id)
        self._replicas.pop(replica_id, None)

    async def _ask_pool(self, pool: str) -> list[ReplicaLoad]:
        """Ask all replicas of a pool; if one of them holds up the answer, ask those that are known one by one."""
        try:
            return await _ask_all(self._pools[pool], "load", POLL_TIMEOUT_S, raises_timeout=True)
        except TimeoutError:
            known = [load.replica_id for load in self._view.loads if load.pool == pool]
            asking = (self._ask_replica(replica_id, "load", timeout_s=POLL_TIMEOUT_S) for replica_id in known)
            answers = await asyncio.gather(*asking, return_exceptions=True)
            return [answer for answer in answers if isinstance(answer, ReplicaLoad)]

    async def _ask_replica(self, replica_id: str, method: str, *args: Any, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            return await self._replica(replica_id).call(method, *args)


async def _ask_all(
    handle: DeploymentHandle, method: str, timeout_s: float, *, raises_timeout: bool = False
) -> list[Any]:
    """Return the answers of all replicas of a deployment, without those that failed.

    Raises ``TimeoutError`` if asked to; else a time-out means no answers.
    """
    try:
        response = handle.options(_by_reference=False).broadcast(method)
        answers = await response.results_async(timeout_s=timeout_s, return_exceptions=True)
    except DeploymentUnavailableError:
        return []
    except TimeoutError:
        if raises_timeout:
            raise
        return []
    return [answer for answer in answers if not isinstance(answer, BaseException)]


# Not decorators: Ray ships a class by reference only if its name here is the class itself.
IngressDeployment = serve.deployment(serve.ingress(app)(Ingress))
