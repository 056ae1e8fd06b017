"""Builds the Serve application from the ``args`` section of a ``serve run`` file: one deployment per pool, one ingress.

    import_path: deployments.app:build_app

Wires and returns; what runs is in ``deployments.pool`` and ``deployments.ingress``. Everything that a process needs in
its environment is set here, so that a plain ``serve run`` has it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig

from deployments import environment
from deployments.checks_before_start import check_before_start
from deployments.ingress import IngressDeployment
from deployments.messages import INGRESS
from deployments.pinned import ROUTER_PATH
from deployments.pool import StagePoolReplica, Worker, WorkerFactory
from encoders import resolve_family
from epd.config import AppConfig, PoolConfig, parse_config
from epd.transfer.base import PeerClient
from epd.transfer.factory import Backend

CONTROL_HEADROOM = 1024
"""Concurrent calls that a replica accepts beyond its stage calls: reads, renewals, releases, polls."""


def build_app(args: dict[str, Any]) -> Application:
    """Return the application. Raises ``ConfigError`` naming the YAML path of what cannot work."""
    config = parse_config(args)
    # Resolved once: replicas that chose for themselves could differ, and not understand each other's handles.
    backend = check_before_start(config)
    return assemble(config, lambda pool: WorkerBuilder(config, pool, backend))


def assemble(config: AppConfig, worker_factory: Callable[[str], WorkerFactory]) -> Application:
    """Wire pools and ingress. ``worker_factory`` returns what builds a pool's workers."""
    pools = {name: _pool_app(name, pool, worker_factory(name)) for name, pool in config.pools.items()}
    ingress = config.ingress
    deployment = IngressDeployment.options(
        name=INGRESS,
        num_replicas=ingress.num_replicas,
        max_ongoing_requests=ingress.max_ongoing_requests,
        ray_actor_options=_actor_options(ingress.ray_actor_options, num_cpus=0.25),
    )
    application: Application = deployment.bind(config.model_dump(mode="json"), pools)
    return application


def _pool_app(name: str, pool: PoolConfig, make_worker: WorkerFactory) -> Application:
    options: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": pool.max_ongoing_requests + CONTROL_HEADROOM,
        "graceful_shutdown_timeout_s": pool.graceful_shutdown_timeout_s,
        "ray_actor_options": _actor_options(pool.ray_actor_options),
        "request_router_config": RequestRouterConfig(request_router_class=ROUTER_PATH),
        # Every poll and renewal would be a line.
        "logging_config": LoggingConfig(enable_access_log=False),
    }
    if pool.autoscaling_config is not None:
        options["autoscaling_config"] = pool.autoscaling_config
    else:
        options["num_replicas"] = pool.num_replicas or 1
    return serve.deployment(StagePoolReplica).options(**options).bind(name, make_worker, pool.max_ongoing_requests)


def _actor_options(given: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Add what this application needs to the actor options of the configuration, which win where both speak."""
    options = {**defaults, **given}
    runtime_env = dict(options.get("runtime_env") or {})
    runtime_env["env_vars"] = {**environment.REPLICAS, **runtime_env.get("env_vars", {})}
    return {**options, "runtime_env": runtime_env}


@dataclass(frozen=True, slots=True)
class WorkerBuilder:
    """Builds the stage workers of one pool, in the process of the replica."""

    config: AppConfig
    pool: str
    backend: Backend

    def __call__(self, replica_id: str, peers: PeerClient) -> Worker:
        from epd.stages.worker import StageWorker

        config = self.config
        return StageWorker(
            replica_id=replica_id,
            pool=self.pool,
            roles=config.pools[self.pool].role_set,
            family=resolve_family(config.model),
            model=config.model,
            engine=config.engine_of(self.pool),
            transfer=config.transfer,
            media=config.media,
            peers=peers,
            backend=self.backend,
        )
