"""Reading part of a checkpoint: its JSON files, the tensors that one module needs, and what identifies it.

A replica that runs one stage holds the weights of that stage only, so tensors are picked by name before any is read.
Knows names and files, nothing of what a model computes.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd.errors import ConfigError

if TYPE_CHECKING:
    import torch

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_WHOLE_HASH_BYTES = 32 * 2**20
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint, or ``{}`` if an optional one is absent.

    Raises ``ConfigError`` if it cannot be read.
    """
    if not required and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("args.model.source", f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError("args.model.source", f"{path} does not hold a JSON object")
    return content


def load_parts(
    module: torch.nn.Module, directory: Path, prefixes: Mapping[str, str], *, dtype: torch.dtype, device: str
) -> None:
    """Fill a module that was built on the meta device with the tensors of a checkpoint that belong to it.

    ``prefixes`` maps a prefix of tensor names in the checkpoint to the prefix that replaces it in the module; a name
    goes by the longest that fits, so that checkpoints of several naming schemes load alike. No other tensor is read.
    Buffers that checkpoints do not hold (``persistent=False``) must be real already: nothing may stay on meta.

    Raises ``ConfigError`` if the checkpoint lacks tensors, or holds them in other shapes.
    """
    from safetensors import SafetensorError, safe_open

    expected = module.state_dict()
    wanted: dict[Path, dict[str, str]] = defaultdict(dict)
    found: set[str] = set()
    for name, file in _tensor_files(directory).items():
        target = _target_name(name, prefixes)
        if target in expected and target not in found:
            wanted[file][name] = target
            found.add(target)
    if missing := sorted(expected.keys() - found):
        raise ConfigError("args.model.source", f"{directory} lacks {len(missing)} tensors: {_shorten(missing)}")

    state: dict[str, torch.Tensor] = {}
    for file, names in wanted.items():
        try:
            with safe_open(file, framework="pt") as opened:
                for name, target in names.items():
                    shape = tuple(opened.get_slice(name).get_shape())
                    if shape != tuple(expected[target].shape):
                        raise ConfigError(
                            "args.model.source",
                            f"{file}: {name} has shape {shape}, config.json asks for {tuple(expected[target].shape)}",
                        )
                    # A copy, because the file is mapped: its tensors are not aligned, and it may be replaced.
                    state[target] = opened.get_tensor(name).to(device=device, dtype=dtype, copy=True)
        except (OSError, SafetensorError) as error:
            raise ConfigError("args.model.source", f"cannot read {file}: {error}") from error
    module.load_state_dict(state, assign=True)
    module.to(device=device).requires_grad_(False).eval()


def weight_bytes(*modules: torch.nn.Module) -> int:
    """Return the memory of the parameters of modules, shared ones counted once."""
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())


def hash_checkpoint(directory: Path) -> str:
    """Return a hash of what a checkpoint computes: its configuration and weights, not names or times of files.

    Small weight files are hashed whole. Of large ones their header and evenly spaced samples are: training changes
    nearly every weight, and reading 100 GB to start a replica would take minutes.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted(set(_tensor_files(directory).values())):
        try:
            _hash_weights(digest, file)
        except OSError as error:
            raise ConfigError("args.model.source", f"cannot read {file}: {error}") from error
    return digest.hexdigest()


def _hash_weights(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"|{size}|".encode())
    with file.open("rb") as opened:
        if size <= _WHOLE_HASH_BYTES:
            digest.update(opened.read())
            return
        header_bytes = int.from_bytes(opened.read(8), "little")
        digest.update(opened.read(header_bytes))
        for sample in range(_NUM_SAMPLES):
            opened.seek(sample * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            digest.update(opened.read(_SAMPLE_BYTES))


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor, by the tensor's name. Reads headers only."""
    from safetensors import SafetensorError, safe_open

    if (directory / _INDEX_FILE).is_file():
        weight_map = read_json(directory / _INDEX_FILE).get("weight_map", {})
        return {name: directory / file for name, file in weight_map.items()}
    file = directory / _SINGLE_FILE
    try:
        with safe_open(file, framework="np") as opened:
            return dict.fromkeys(opened.keys(), file)
    except (OSError, SafetensorError) as error:
        message = f"cannot read {file}, and there is no {_INDEX_FILE}: {error}"
        raise ConfigError("args.model.source", message) from error


def _target_name(name: str, prefixes: Mapping[str, str]) -> str | None:
    prefix = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
    return None if prefix is None else prefixes[prefix] + name.removeprefix(prefix)


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
