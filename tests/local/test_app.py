"""What the builder makes of a configuration. If these fail, a mistake in a YAML file shows up as replicas that crash in
a loop, or Serve's own words in it are lost on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import epd.transfer.factory
from deployments.app import CONTROL_HEADROOM, WorkerBuilder, build_app
from epd.errors import ConfigError

ALL = ["encode", "prefill", "decode"]


def arguments(directory: Path, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"source": str(directory), "name": "tiny"},
        "pools": {"all": {"roles": ALL}},
        "transfer": {"backend": "object_store"},
        **sections,
    }


def deployments_of(application: Any) -> dict[str, Any]:
    """Return the deployments of an application by name; the ingress names the pools in its arguments."""
    ingress = application._bound_deployment
    pools = ingress.init_args[1]
    return {"ingress": ingress, **{name: pool._bound_deployment for name, pool in pools.items()}}


def test_there_is_one_deployment_a_pool_with_serves_own_words_passed_on(tiny_qwen_dir: Path):
    pools = {
        "vision": {
            "roles": ["encode"],
            "num_replicas": 3,
            "ray_actor_options": {"num_cpus": 0.5, "resources": {"x": 1}},
        },
        "text": {
            "roles": ["prefill", "decode"],
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 4},
            "max_ongoing_requests": 7,
            "graceful_shutdown_timeout_s": 90,
        },
    }
    found = deployments_of(build_app(arguments(tiny_qwen_dir, pools=pools)))
    assert list(found) == ["ingress", "vision", "text"]
    vision, text = found["vision"], found["text"]
    assert vision.num_replicas == 3
    assert vision.ray_actor_options["resources"] == {"x": 1}
    assert vision.ray_actor_options["num_cpus"] == 0.5
    assert text._deployment_config.autoscaling_config.max_replicas == 4
    assert text._deployment_config.graceful_shutdown_timeout_s == 90
    assert text.max_ongoing_requests == 7 + CONTROL_HEADROOM
    assert text.init_args[2] == 7


def test_replicas_get_their_environment_and_keep_the_users(tiny_qwen_dir: Path):
    options = {"runtime_env": {"env_vars": {"MINE": "1", "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "0"}}}
    pools = {"all": {"roles": ALL, "ray_actor_options": options}}
    found = deployments_of(build_app(arguments(tiny_qwen_dir, pools=pools)))
    environment = found["all"].ray_actor_options["runtime_env"]["env_vars"]
    assert environment.items() >= options["runtime_env"]["env_vars"].items()
    environment = found["ingress"].ray_actor_options["runtime_env"]["env_vars"]
    assert environment["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] == "1"


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"pools": {}}, "args.pools"),
        ({"pools": {"all": {"roles": ["encode"]}}}, "args: pools: no pool has the role decode"),
        ({"pools": {"all": {"roles": ALL, "num_replica": 2}}}, "args.pools.all.num_replica"),
        ({"pools": {"ingress": {"roles": ALL}}}, "args.pools.ingress"),
        ({"model": {"source": "/no/such/directory"}}, "args.model.source"),
        ({"router": {"profile": "/no/such/file"}}, "args.router.profile"),
        ({"router": {"mode": "epd"}}, "router.mode"),
        ({"ingress": {"api_keys_env": "NO_SUCH_VARIABLE"}}, "args.ingress.api_keys_env"),
        ({"engine": {"block_size": 0}}, "args.engine.block_size"),
        ({"transfer": {"backend": "carrier pigeon"}}, "args.transfer.backend"),
        ({"router": {"slo": {"ttft": 1}}}, "args.router.slo.ttft"),
    ],
)
def test_what_cannot_work_fails_before_anything_is_deployed(tiny_qwen_dir: Path, sections: dict[str, Any], path: str):
    with pytest.raises(ConfigError) as failure:
        build_app(arguments(tiny_qwen_dir, **sections))
    assert path in failure.value.message


def test_asking_for_nixl_without_it_is_an_error_and_auto_is_not(tiny_qwen_dir: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(epd.transfer.factory.nixl_agent, "Agent", missing)
    with pytest.raises(ConfigError, match="nixl is not installed"):
        build_app(arguments(tiny_qwen_dir, transfer={"backend": "nixl"}))
    found = deployments_of(build_app(arguments(tiny_qwen_dir, transfer={"backend": "auto"})))
    builder = found["all"].init_args[1]
    assert isinstance(builder, WorkerBuilder)
    assert builder.backend == "by_reference"
