"""Model families, found by name: which code serves which checkpoint, and where a checkpoint lies.

A family is a module (or package) of this package that states ``MODEL_TYPES``, the ``model_type`` values of
``config.json`` that it serves, and ``build_family(model, directory)``. Adding one touches no other file. Importing a
family module must stay cheap: torch and transformers are loaded when weights are. Knows nothing of any one family.
"""

from __future__ import annotations

import importlib
import importlib.resources
import pkgutil
from pathlib import Path
from types import ModuleType

from encoders.checkpoint import read_json
from epd.config import ModelConfig
from epd.errors import ConfigError
from epd.types import ModelFamily

__all__ = ["checkpoint_dir", "resolve_family", "supported_model_types"]

DEMO_SOURCE = "demo"
_DOWNLOADED_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]


def resolve_family(model: ModelConfig) -> ModelFamily:
    """Return the family that serves a checkpoint. Reads configuration files, not weights; may download the checkpoint.

    Raises ``ConfigError`` if there is no such checkpoint, or no family for its ``model_type``.
    """
    directory = checkpoint_dir(model)
    model_type = read_json(directory / "config.json").get("model_type")
    families = _families()
    if model_type not in families:
        supported = ", ".join(sorted(families))
        raise ConfigError(
            "args.model.source", f"model type {model_type!r} is not supported; supported are: {supported}"
        )
    family: ModelFamily = families[model_type].build_family(model, directory)
    return family


def supported_model_types() -> tuple[str, ...]:
    """Return the ``model_type`` values that the installed families serve, sorted."""
    return tuple(sorted(_families()))


def checkpoint_dir(model: ModelConfig) -> Path:
    """Return the directory of a checkpoint: of the built-in model, a local one, or one downloaded from the hub.

    Raises ``ConfigError`` if it cannot be found. Blocking, for as long as a download takes.
    """
    if model.source == DEMO_SOURCE:
        directory = Path(str(importlib.resources.files(__name__))) / "demo_model"
        if not (directory / "config.json").is_file():
            raise ConfigError("args.model.source", "this installation does not contain the built-in model")
        return directory
    local = Path(model.source).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ConfigError("args.model.source", f"{model.source} is not a checkpoint: it has no config.json")
        return local
    if local.is_absolute() or model.source.startswith(("~", ".")) or model.source.count("/") > 1:
        raise ConfigError("args.model.source", f"there is no directory {model.source}")
    return _download(model)


def _download(model: ModelConfig) -> Path:
    import httpx
    from huggingface_hub import snapshot_download

    try:
        directory = snapshot_download(model.source, revision=model.revision, allow_patterns=_DOWNLOADED_FILES)
    except (OSError, ValueError, httpx.HTTPError) as error:
        at = f" at revision {model.revision}" if model.revision else ""
        raise ConfigError(
            "args.model.source",
            f"cannot find {model.source!r}{at}: it is neither {DEMO_SOURCE!r}, nor a local directory, nor could it be "
            f"downloaded from the hub ({type(error).__name__})",
        ) from error
    if not (Path(directory) / "config.json").is_file():
        raise ConfigError(
            "args.model.source", f"{model.source!r} on the hub is not a checkpoint: it has no config.json"
        )
    return Path(directory)


def _families() -> dict[str, ModuleType]:
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return {model_type: module for module in modules for model_type in getattr(module, "MODEL_TYPES", ())}
