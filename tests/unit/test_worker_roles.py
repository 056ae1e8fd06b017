"""A replica holds what its roles need and nothing else: or an encoder pool pays for a language model it never runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from encoders import resolve_family
from epd.config import EngineConfig, MediaConfig, ModelConfig, TransferConfig
from epd.stages.worker import StageWorker
from epd.transfer.in_process import InProcessPeers
from epd.types import ModelFamily, Stage

ROOT = Path(__file__).parents[2]


class Recording:
    """A model family that notes which parts are loaded."""

    def __init__(self, family: ModelFamily) -> None:
        self._family = family
        self.loaded: list[str] = []

    def __getattr__(self, name: str):
        return getattr(self._family, name)

    def load_encoder(self, **options: str):
        self.loaded.append("encoder")
        return self._family.load_encoder(**options)

    def load_language_model(self, **options: str):
        self.loaded.append("language model")
        return self._family.load_language_model(**options)


@pytest.mark.parametrize(
    ("roles", "parts"),
    [
        ({Stage.ENCODE}, ["encoder"]),
        ({Stage.PREFILL}, ["language model"]),
        ({Stage.DECODE}, ["language model"]),
        ({Stage.ENCODE, Stage.PREFILL}, ["encoder", "language model"]),
    ],
)
async def test_a_replica_loads_the_parts_that_its_roles_need(tiny_qwen_dir, roles, parts):
    model = ModelConfig(source=str(tiny_qwen_dir))
    family = Recording(resolve_family(model))
    worker = StageWorker(
        replica_id="r",
        pool="p",
        roles=frozenset(roles),
        family=family,  # type: ignore[arg-type]
        model=model,
        engine=EngineConfig(kv_cache_bytes=2**20, num_threads=1),
        transfer=TransferConfig(),
        media=MediaConfig(),
        peers=InProcessPeers(),
        backend="by_reference",
    )
    assert family.loaded == parts
    assert (worker.load().num_blocks > 0) == ("language model" in parts)
    await worker.close()


MEASURE = """
import sys
from pathlib import Path
from encoders import resolve_family
from epd.config import ModelConfig
import torch, transformers.models.qwen2_5_vl.modeling_qwen2_5_vl

def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096

family = resolve_family(ModelConfig(source=sys.argv[1]))
before = resident_bytes()
part = getattr(family, sys.argv[2])(dtype="float32")
print(resident_bytes() - before, part.weight_bytes)
"""


def test_the_memory_of_an_encoder_is_that_of_the_vision_tower(tmp_path):
    """Measured from outside, on a checkpoint whose language model is 20 times the tower."""
    from tests.tiny_checkpoints import make_tiny_qwen2_5_vl

    path = make_tiny_qwen2_5_vl(
        tmp_path / "large", text_config={"intermediate_size": 65536, "num_hidden_layers": 4}, max_shard_size="1GB"
    )
    measured = {}
    for part in ("load_encoder", "load_language_model"):
        result = subprocess.run(
            [sys.executable, "-c", MEASURE, str(path), part],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        measured[part] = [int(number) for number in result.stdout.split()]
    grown_bytes, tower_bytes = measured["load_encoder"]
    model_bytes = measured["load_language_model"][1]
    assert model_bytes > 20 * tower_bytes
    assert grown_bytes < tower_bytes + model_bytes / 4
