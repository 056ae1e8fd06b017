"""Environment variables that Ray Serve reads: those that replicas need, and those that a cluster should start with.

Serve reads them once, when a process imports it; so those of a cluster must be set before it starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_SERVE = {
    # What runs on the loops here is short, so one loop does it all: threads of their own for user code and for outgoing
    # calls cost each token several switches between threads.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # A whole reply with log probabilities, or the pixels of a request, may be larger than gRPC's usual 4 MiB.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(1 << 30),
}

REPLICAS = {
    **_SERVE,
    # CPU tensors leave and enter the object store without a copy.
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
}
"""For replicas: set by ``build_app``, so that a plain ``serve run`` has them too."""

CLUSTER = {
    **REPLICAS,
    # From the proxy to the ingress without Ray's object store, at half the cost a token.
    "RAY_SERVE_PROXY_USE_GRPC": "1",
}
"""For the cluster itself, whose proxies have them from the processes that start it: set by ``epd serve``."""


def hides_connections(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether Serve runs HAProxy, which relays every connection from this machine, whoever made it."""
    return environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
