"""What can be found out about a configuration before anything is deployed. Knows nothing of Ray."""

from __future__ import annotations

from deployments.auth import load_api_keys
from deployments.messages import INGRESS
from deployments.placing import build_cost_model
from encoders import resolve_family
from epd.config import AppConfig
from epd.errors import ConfigError
from epd.transfer.factory import Backend, resolve_backend


def check_before_start(config: AppConfig) -> Backend:
    """Find out now what would otherwise fail in every replica, again and again; return the transfer backend to use.

    Raises ``ConfigError``.
    """
    if INGRESS in config.pools:
        raise ConfigError("args.pools.ingress", "this name is taken by the ingress deployment")
    resolve_family(config.model)
    build_cost_model(config)
    load_api_keys(config.ingress)
    return resolve_backend(config.transfer.backend)
