"""The shape of the code: if these fail, the core can no longer be used, tested or understood without Ray."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = [
    {"epd.types", "epd.errors"},
    {"epd.config", "epd.media", "epd.prompt", "epd.cache"},
    {"epd.transfer", "epd.engine", "epd.routing"},
    {"epd.stages"},
    {"encoders"},
    {"deployments"},
]
"""Lower layers first: a module imports from its own layer and those before it."""


def layer_of(module: str) -> int | None:
    for index, names in enumerate(LAYERS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return index
    return None


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in ("epd", "encoders", "deployments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_point_one_way(module, path):
    own = layer_of(module)
    for name in imports_of(path):
        other = layer_of(name)
        if own is not None and other is not None:
            assert other <= own, f"{module} imports {name}, which is a layer above it"


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_only_deployments_knows_ray(module, path):
    if not module.startswith("deployments"):
        assert not any(name == "ray" or name.startswith("ray.") for name in imports_of(path))


def test_bench_talks_http_only():
    for module, path in modules():
        if module.startswith("epd.bench"):
            below = {name for name in imports_of(path) if name.startswith(("epd.", "encoders", "deployments"))}
            allowed = ("epd.bench", "epd.types", "epd.errors", "epd.routing", "epd.__version__")
            assert all(name.startswith(allowed) for name in below), f"{module} imports {below}"


def test_importing_the_core_loads_neither_ray_nor_cuda():
    check = (
        "import sys, epd, epd.types, epd.config, epd.errors, epd.stages.life, epd.routing\n"
        "assert 'ray' not in sys.modules, 'ray was imported'\n"
        "assert 'torch' not in sys.modules or not sys.modules['torch'].cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=120)


def test_every_module_says_what_it_is_for():
    silent = [module for module, path in modules() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []
