"""The documentation against the code. If these fail, a user configures a key that does not exist, follows a dead link,
types a command that was renamed, or watches a metric that nothing writes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from deployments.errors import _TABLE, to_http
from deployments.first_steps import first_steps
from deployments.metrics import IngressMetrics, render
from deployments.protocol import EpdOptions, SloOptions
from deployments.serve_file import read_serve_file
from deployments.trace import TIMINGS
from epd.config import AppConfig
from epd.types import Mode

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found is not None, f"the README has no section {title!r}"
    return found[1]


def first_cells(text: str) -> list[str]:
    """Return the names in code spans of the first column of each table row."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def documented_defaults() -> dict[str, str]:
    return dict(re.findall(r"^\| `([\w.<>]+)` \| `?([^|`]*?)`? \|", section("Configuration"), re.MULTILINE))


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key of a section with its default as YAML, sections within sections opened."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if inspect.isclass(kind)]
        nested = next((kind for kind in inner if issubclass(kind, BaseModel)), None)
        if nested is not None:
            is_by_name = field.annotation is not nested
            yield from keys_of(nested, f"{path}.<name>." if is_by_name else f"{path}.")
        else:
            default = field.get_default(call_default_factory=True)
            yield path, "required" if default is PydanticUndefined else as_yaml(default)


def as_yaml(value: Any) -> str:
    plain = value.value if isinstance(value, Mode) else value
    return yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()


def test_the_configuration_table_has_every_key_with_its_default():
    assert documented_defaults() == dict(keys_of(AppConfig))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path):
    text = page.read_text()
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith(("https://", "http://")):
            assert (page.parent / target).exists(), target


def test_every_configuration_is_described_and_none_that_is_missing():
    assert set(re.findall(r"configs/([\w-]+\.yaml)", README)) == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_valid_and_begins_with_how_to_run_it(name: str):
    assert read_serve_file(ROOT / "configs" / name).config.modes
    assert f"configs/{name}" in (ROOT / "configs" / name).read_text()


def test_the_quickstart_forms_every_mode_and_the_readme_describes_each():
    assert {*read_serve_file(ROOT / "configs" / "quickstart.yaml").config.modes, Mode.AUTO} == set(Mode)
    table = section("Modes, and when each wins").strip().split("\n\n")[0]
    assert first_cells(table) == [mode.value for mode in Mode if mode is not Mode.AUTO] + ["auto"]


def test_the_readme_shows_what_serve_prints():
    printed = first_steps("http://127.0.0.1:8000", read_serve_file(ROOT / "configs" / "quickstart.yaml").config)
    blocks = re.findall(r"^```\w+\n(.*?)^```", section("Sixty seconds on a laptop"), re.MULTILINE | re.DOTALL)
    shown = [block for block in blocks if "127.0.0.1" in block]
    assert len(shown) == 2
    assert all(block.strip() in printed for block in shown)


def test_make_targets_named_in_the_readme_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([\w-]+)", README, re.MULTILINE))
    assert {"serve", "test", "install", "lint"} <= named <= targets


def test_every_example_is_named():
    for path in sorted((ROOT / "examples").glob("*.py")):
        if "__main__" in path.read_text():
            assert f"examples/{path.name}" in README


def test_metrics_in_the_readme_are_those_that_are_written():
    page = render([IngressMetrics("x").families()], []).decode()
    written = {name for name in re.findall(r"^# TYPE (\w+)", page, re.MULTILINE) if not name.endswith("_created")}
    assert set(re.findall(r"`(epd_\w+)`", section("HTTP API"))) == written


def test_error_statuses_in_the_readme_are_those_that_are_sent():
    sent = {status for _, status, _, _ in _TABLE} | {to_http(RuntimeError(), "x").status}
    assert {int(status) for status in re.findall(r"^\| (\d{3}) \|", section("HTTP API"), re.MULTILINE)} == sent


def test_the_placement_field_and_the_trace_are_described_field_by_field():
    text = section("HTTP API")
    options = {f"epd.{name}" for name in EpdOptions.model_fields if name != "slo"}
    options |= {f"epd.slo.{name}" for name in SloOptions.model_fields}
    assert set(re.findall(r"`(epd\.[\w.]+)`", text)) == options
    assert all(f"`{name}`" in text for name in TIMINGS)
