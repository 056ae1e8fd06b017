"""Configuration: a typo or an impossible topology must stop the start, by name, not show up as a hanging request."""

from __future__ import annotations

import pytest

from epd.config import EngineConfig, formable_modes, parse_config
from epd.errors import ConfigError
from epd.types import Mode, Stage

E, P, D = Stage.ENCODE, Stage.PREFILL, Stage.DECODE
POOLS = {
    "encode": {"roles": ["encode"]},
    "prefill": {"roles": ["encode", "prefill"]},
    "decode": {"roles": ["encode", "prefill", "decode"]},
}


def test_the_smallest_configuration_is_one_pool():
    config = parse_config({"pools": {"all": {"roles": ["encode", "prefill", "decode"]}}})
    assert config.modes == (Mode.AGGREGATED,)
    assert config.model.served_name == "demo"


@pytest.mark.parametrize(
    ("args", "path", "words"),
    [
        ({}, "args.pools", "required"),
        ({"pools": POOLS, "routr": {}}, "args.routr", "unknown key"),
        ({"pools": {"a": {"roles": ["encode"], "replicas": 2}}}, "args.pools.a.replicas", "unknown key"),
        ({"pools": {"a": {"roles": ["decoder"]}}}, "args.pools.a.roles.0", "encode"),
        ({"pools": POOLS, "engine": {"block_size": 0}}, "args.engine.block_size", "greater than 0"),
        ({"pools": POOLS, "engine": {"max_num_seqs": 99999}}, "args.engine", "max_num_batched_tokens"),
        ({"pools": {"a": {"roles": ["encode", "prefill"]}}}, "args", "no pool has the role decode"),
        ({"pools": {**POOLS, "x": {"roles": ["decode"], "engine": {"bock": 1}}}}, "args", "pools.x.engine"),
        ({"pools": {**POOLS, "x": {"roles": ["decode"], "engine": {"block_size": 8}}}}, "args", "same in all pools"),
        ({"pools": {"a": {"roles": ["encode", "encode"]}}}, "args.pools.a", "repeat"),
        (
            {"pools": {"a": {"roles": ["encode"], "num_replicas": 1, "autoscaling_config": {}}}},
            "args.pools.a",
            "not both",
        ),
        (
            {"pools": {"all": {"roles": ["encode", "prefill", "decode"]}}, "router": {"mode": "epd"}},
            "args",
            "cannot form epd",
        ),
        ({"pools": POOLS, "transfer": {"backend": "carrier-pigeon"}}, "args.transfer.backend", "nixl"),
        ({"pools": POOLS, "model": {"dtype": "int3"}}, "args.model.dtype", "float32"),
        ({"pools": POOLS, "engine": {"device": "tpu"}}, "args.engine.device", "say cpu, cuda or cuda:N"),
        ({"pools": POOLS, "engine": {"tensor_parallel_size": 2}}, "args.engine.tensor_parallel_size", "num_replicas"),
        ({"pools": {**POOLS, "x": {"roles": ["decode"], "engine": {"tensor_parallel_size": 4}}}}, "args", "4 GPUs"),
        (
            {
                "pools": POOLS,
                "model": {"dtype": "bfloat16"},
                "engine": {"device": "cuda", "block_size": 16},
            },
            "args",
            "engine.block_size is 16",
        ),
    ],
)
def test_a_bad_value_is_named_by_its_path(args, path, words):
    with pytest.raises(ConfigError) as raised:
        parse_config(args)
    assert raised.value.path == path
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("pools", "modes"),
    [
        ({"all": {E, P, D}}, [Mode.AGGREGATED]),
        ({"e": {E}, "pd": {P, D}}, [Mode.E_PD]),
        ({"e": {E}, "p": {P}, "d": {D}}, [Mode.EPD]),
        ({"p": {E, P}, "d": {D}}, [Mode.EP_D]),
        ({"e": {E}, "p": {E, P}, "d": {E, P, D}}, [Mode.AGGREGATED, Mode.E_PD, Mode.EP_D, Mode.EPD]),
        ({"e": {E}, "all": {E, P, D}}, [Mode.AGGREGATED, Mode.E_PD]),
        ({"p": {P}, "d": {D}}, []),
    ],
)
def test_modes_follow_from_the_roles_of_the_pools(pools, modes):
    assert list(formable_modes({name: frozenset(roles) for name, roles in pools.items()})) == modes


def test_a_pool_may_override_single_engine_fields():
    config = parse_config({"pools": {**POOLS, "x": {"roles": ["decode"], "engine": {"max_num_seqs": 3}}}})
    assert config.engine_of("x").max_num_seqs == 3
    assert config.engine_of("x").block_size == config.engine_of("decode").block_size == 16
    assert config.engine_of("encode").max_num_seqs == config.engine.max_num_seqs


@pytest.mark.parametrize(
    ("engines", "block_size"),
    [
        ({}, 16),
        ({"decode": "cuda"}, 256),
        ({"prefill": "cuda:1", "decode": "cuda"}, 256),
        ({"encode": "cuda"}, 16),
    ],
)
def test_without_a_block_size_all_pools_get_the_one_that_suits_the_devices_with_kv_blocks(engines, block_size):
    pools = {name: {**pool, "engine": {"device": engines.get(name, "cpu")}} for name, pool in POOLS.items()}
    config = parse_config({"pools": pools, "model": {"dtype": "bfloat16"}})
    assert {config.engine_of(name).block_size for name in POOLS} == {block_size}


def test_any_block_size_goes_on_cuda_in_float32_and_a_multiple_of_256_in_half_precision():
    small = {"pools": POOLS, "engine": {"device": "cuda", "block_size": 16}}
    assert parse_config(small).engine_of("decode").kv_block_size == 16
    large = {"pools": POOLS, "model": {"dtype": "float16"}, "engine": {"device": "cuda", "block_size": 512}}
    assert parse_config(large).engine_of("decode").kv_block_size == 512


def test_a_cpu_encodes_an_image_at_a_time_and_a_gpu_many():
    assert EngineConfig().encode_batch_patches == 1024
    assert EngineConfig(device="cuda").encode_batch_patches == 16384
    assert EngineConfig(max_encode_batch_patches=77).encode_batch_patches == 77
