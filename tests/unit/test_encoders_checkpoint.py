"""Finding checkpoints and reading parts of them.

If these fail, a replica of one stage loads the weights of all, a wrong model source gives a traceback instead of a
sentence, or caches mix up the embeddings of two models.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import encoders
from encoders import checkpoint_dir, resolve_family, supported_model_types
from encoders.checkpoint import load_parts
from epd.config import ModelConfig
from epd.errors import ConfigError
from tests.tiny_checkpoints import make_tiny_qwen2_5_vl


@pytest.fixture
def directory(tiny_qwen_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    return shutil.copytree(tiny_qwen_dir, tmp_path / "model")


def rewrite(directory: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor] | None]) -> None:
    """Rename, replace or drop tensors of a checkpoint."""
    file = directory / "model.safetensors"
    changed = [change(name, tensor) for name, tensor in load_file(file).items()]
    save_file(dict(pair for pair in changed if pair is not None), file, metadata={"format": "pt"})


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def family_of(directory: Path, **fields: Any) -> Any:
    return resolve_family(ModelConfig(source=str(directory), **fields))


def parameters(part: Any) -> list[torch.Tensor]:
    module = getattr(part, "_tower", None) or part._model
    return [*module.parameters(), *module.buffers()]


# --- finding ----------------------------------------------------------------------------------------------------------


def test_families_are_found_by_the_type_in_config_json(tiny_qwen_dir: Path) -> None:
    assert family_of(tiny_qwen_dir).name == "qwen2_5_vl"
    assert "qwen2_5_vl" in supported_model_types()


def test_a_family_joins_by_being_a_module_of_the_package(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "MODEL_TYPES = ('pixel_poet',)\ndef build_family(model, directory): return (model.served_name, directory)\n"
    )
    (tmp_path / "pixel_poet_for_this_test.py").write_text(source)
    monkeypatch.setattr(encoders, "__path__", [*encoders.__path__, str(tmp_path)])
    edit_config(directory, model_type="pixel_poet")
    assert resolve_family(ModelConfig(source=str(directory), name="poet")) == ("poet", directory)
    edit_config(directory, model_type="word_smith")
    with pytest.raises(ConfigError, match="'word_smith' is not supported; supported are: pixel_poet, qwen2_5_vl"):
        family_of(directory)


@pytest.mark.parametrize("source", ["/no/such/directory", "./nowhere", "~/nowhere", "a/b/c"])
def test_a_missing_directory_is_named(source: str) -> None:
    with pytest.raises(ConfigError, match=r"args\.model\.source: there is no directory"):
        checkpoint_dir(ModelConfig(source=source))


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        checkpoint_dir(ModelConfig(source=str(tmp_path)))


@pytest.mark.parametrize("source", ["nobody/nothing-of-this-name", "not a hub id!"])
def test_a_hub_model_that_cannot_be_had_is_a_sentence(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="neither 'demo', nor a local directory, nor could it be downloaded"):
        checkpoint_dir(ModelConfig(source=source))


def test_broken_json_is_named(directory: Path) -> None:
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        family_of(directory)


def test_resolving_a_family_loads_neither_torch_nor_transformers(tiny_qwen_dir: Path) -> None:
    code = (
        "import sys; from encoders import resolve_family; from epd.config import ModelConfig\n"
        f"resolve_family(ModelConfig(source={str(tiny_qwen_dir)!r})).image_layout(100, 100)\n"
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- length -----------------------------------------------------------------------------------------------------------


def test_the_context_length_is_the_models_or_less(tiny_qwen_dir: Path) -> None:
    assert family_of(tiny_qwen_dir).max_model_len == 2048
    assert family_of(tiny_qwen_dir, max_model_len=512).max_model_len == 512
    with pytest.raises(ConfigError, match=r"args\.model\.max_model_len"):
        family_of(tiny_qwen_dir, max_model_len=4096)


# --- identity ---------------------------------------------------------------------------------------------------------


def test_a_copy_of_a_checkpoint_has_the_same_fingerprint(tiny_qwen_dir: Path, directory: Path) -> None:
    assert family_of(directory).fingerprint == family_of(tiny_qwen_dir).fingerprint


@pytest.mark.parametrize("whole_hash_bytes", [2**25, 0])
def test_whatever_changes_an_embedding_changes_the_fingerprint(
    directory: Path, monkeypatch: pytest.MonkeyPatch, whole_hash_bytes: int
) -> None:
    monkeypatch.setattr("encoders.checkpoint._WHOLE_HASH_BYTES", whole_hash_bytes)
    seen = {family_of(directory).fingerprint}
    seen.add(family_of(directory, revision="abc").fingerprint)
    seen.add(family_of(directory, dtype="bfloat16").fingerprint)
    rewrite(directory, lambda name, tensor: (name, tensor * 1.01))
    seen.add(family_of(directory).fingerprint)
    processor = json.loads((directory / "preprocessor_config.json").read_text())
    (directory / "preprocessor_config.json").write_text(json.dumps({**processor, "image_mean": [0.5, 0.5, 0.5]}))
    seen.add(family_of(directory).fingerprint)
    edit_config(directory, tie_word_embeddings=False)
    seen.add(family_of(directory).fingerprint)
    assert len(seen) == 6


# --- parts ------------------------------------------------------------------------------------------------------------


def test_an_encoder_needs_no_tensor_of_the_language_model(directory: Path) -> None:
    complete = family_of(directory).load_encoder(dtype="float32")
    rewrite(directory, lambda name, tensor: (name, tensor) if "visual" in name else None)
    alone = family_of(directory).load_encoder(dtype="float32")
    assert all(map(torch.equal, parameters(complete), parameters(alone)))
    with pytest.raises(ConfigError, match="lacks 38 tensors"):
        family_of(directory).load_language_model(dtype="float32")


def test_a_language_model_needs_no_tensor_of_the_vision_tower(directory: Path) -> None:
    rewrite(directory, lambda name, tensor: None if "visual" in name else (name, tensor))
    family_of(directory).load_language_model(dtype="float32")
    with pytest.raises(ConfigError, match=r"lacks 30 tensors: blocks\.0\.attn\.proj\.bias, .*\.\.\."):
        family_of(directory).load_encoder(dtype="float32")


def test_each_part_reads_its_own_tensors_only(tiny_qwen_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._opened = safe_open(*args, **kwargs)

        def __enter__(self) -> Any:
            self._opened.__enter__()
            return self

        def __exit__(self, *exc_info: Any) -> None:
            self._opened.__exit__(*exc_info)

        def keys(self) -> Any:
            return self._opened.keys()

        def get_slice(self, name: str) -> Any:
            return self._opened.get_slice(name)

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self._opened.get_tensor(name)

    monkeypatch.setattr("safetensors.safe_open", Spy)
    encoder = family_of(tiny_qwen_dir).load_encoder(dtype="float32")
    assert read
    assert all("visual" in name for name in read)
    num_read = sum(
        tensor.nbytes for name, tensor in load_file(tiny_qwen_dir / "model.safetensors").items() if name in read
    )
    assert encoder.weight_bytes == num_read
    read.clear()
    family_of(tiny_qwen_dir).load_language_model(dtype="float32")
    assert read
    assert not any("visual" in name for name in read)


NAMINGS: dict[str, Callable[[str], str]] = {
    "older": lambda name: name.replace("model.visual.", "visual.").replace("model.language_model.", "model."),
    "newer": lambda name: (
        name
        if name.startswith(("lm_head", "model.visual.", "model.language_model."))
        else "model." + name
        if name.startswith("visual.")
        else name.replace("model.", "model.language_model.", 1)
    ),
}


@pytest.mark.parametrize("naming", sorted(NAMINGS))
def test_both_naming_schemes_load_alike(tiny_qwen_dir: Path, directory: Path, naming: str) -> None:
    rewrite(directory, lambda name, tensor: (NAMINGS[naming](name), tensor))
    names = load_file(directory / "model.safetensors").keys()
    assert ("visual.patch_embed.proj.weight" in names) == (naming == "older")
    for load in ("load_encoder", "load_language_model"):
        expected = getattr(family_of(tiny_qwen_dir), load)(dtype="float32")
        assert all(
            map(torch.equal, parameters(expected), parameters(getattr(family_of(directory), load)(dtype="float32")))
        )


def test_a_sharded_checkpoint_loads_like_a_single_file(tiny_qwen_dir: Path, tmp_path: Path) -> None:
    directory = make_tiny_qwen2_5_vl(tmp_path, max_shard_size="200KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    for load in ("load_encoder", "load_language_model"):
        expected = getattr(family_of(tiny_qwen_dir), load)(dtype="float32")
        assert all(
            map(torch.equal, parameters(expected), parameters(getattr(family_of(directory), load)(dtype="float32")))
        )
    for shard in directory.glob("*.safetensors"):
        shard.unlink()
        break
    with pytest.raises(ConfigError, match=r"cannot read .*\.safetensors"):
        family_of(directory)


def test_a_tensor_of_another_shape_is_named(directory: Path) -> None:
    rewrite(
        directory, lambda name, tensor: (name, tensor[:-1].clone() if name.endswith("merger.mlp.2.bias") else tensor)
    )
    with pytest.raises(ConfigError, match=r"merger\.mlp\.2\.bias has shape \(63,\), config\.json asks for \(64,\)"):
        family_of(directory).load_encoder(dtype="float32")


def test_a_truncated_file_is_named(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        family_of(directory)


def test_a_checkpoint_without_weights_is_named(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        family_of(directory)


def test_rotary_frequencies_are_computed_though_no_checkpoint_holds_them(tiny_qwen_dir: Path) -> None:
    from transformers import Qwen2_5_VLModel

    reference = Qwen2_5_VLModel.from_pretrained(tiny_qwen_dir, dtype="bfloat16")
    family = family_of(tiny_qwen_dir)
    for part, module in (
        (family.load_encoder(dtype="bfloat16"), reference.visual),
        (family.load_language_model(dtype="bfloat16"), reference.language_model),
    ):
        own = dict((getattr(part, "_tower", None) or part._model).named_buffers())
        expected = dict(module.named_buffers())
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], expected[name]) and own[name].dtype == torch.float32 for name in own)


def test_weights_do_not_stay_mapped_to_the_file(directory: Path) -> None:
    encoder = family_of(directory).load_encoder(dtype="float32")
    before = [parameter.clone() for parameter in parameters(encoder)]
    file = directory / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\0" * file.stat().st_size)
    assert all(map(torch.equal, before, parameters(encoder)))


def test_the_longest_prefix_decides(tmp_path: Path) -> None:
    save_file({"a.b.weight": torch.ones(2, 3), "a.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = torch.nn.Linear(3, 2, bias=False)
    load_parts(module, tmp_path, {"a.": "other.", "a.b.": ""}, dtype=torch.float32, device="cpu")
    assert torch.equal(module.weight, torch.ones(2, 3))
