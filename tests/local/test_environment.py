"""What processes start with. If these fail, a token costs twice as much, or a server without keys answers everyone."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from deployments import environment
from deployments.auth import is_local
from deployments.ingress import as_arrived


def test_a_cluster_starts_with_all_that_its_replicas_need():
    assert environment.CLUSTER.items() > environment.REPLICAS.items()


@pytest.mark.parametrize(("relayed", "seems_local"), [("0", True), ("1", False)])
def test_no_request_seems_to_come_from_this_machine_when_a_load_balancer_here_relays_all(
    monkeypatch: pytest.MonkeyPatch, relayed: str, seems_local: bool
):
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", relayed)
    request = Request({"type": "http", "server": ("127.0.0.1", 30000)})
    assert is_local(as_arrived(request).scope["server"]) is seems_local
