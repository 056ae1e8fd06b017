"""The wheel in an environment of its own, away from the repository. If this fails, `pip install` gives people a package
that lacks the built-in model, or starts only where its source happens to lie.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, descendants, free_port

START_TIMEOUT_S = 300.0
PACKED = ("epd", "encoders", "deployments", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, so that nothing is left in the checkout and nothing stale in it is packed."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in PACKED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel installed, that sees the dependencies of this one and downloads nothing."""
    directory = tmp_path_factory.mktemp("venv")
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.check_output([str(python), "-c", code], text=True).strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip(sys.executable, "--python", str(python), "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel))
    return python


def pip(python: str, *arguments: str) -> None:
    ran = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", *arguments], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def outside(directory: Path) -> dict[str, str]:
    """Return an environment without any path into the repository."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, "HOME": str(directory)}


def test_the_wheel_has_the_code_the_model_and_the_licence_and_no_tests(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    model = {Path(name).name for name in sizes if name.startswith("encoders/demo_model/")}
    assert {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"} <= model
    assert any(name.startswith("chat_template") for name in model)
    assert sum(size for name, size in sizes.items() if name.startswith("encoders/demo_model/")) <= 16 << 20
    shipped = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("epd/**/*") if path.suffix in (".py", ".cpp", ".typed")
    }
    assert shipped <= set(sizes)
    assert any(name.endswith("licenses/LICENSE") for name in sizes)
    assert {name.split("/")[0] for name in sizes if ".dist-info/" not in name} == {"epd", "encoders", "deployments"}


def test_it_is_imported_from_the_fresh_environment(fresh_python: Path, tmp_path: Path):
    code = "import epd, encoders, deployments; print(epd.__file__, encoders.__file__, deployments.__file__)"
    ran = subprocess.run(
        [str(fresh_python), "-c", code],
        cwd=tmp_path,
        env=outside(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert all(path.startswith(str(fresh_python.parents[1])) for path in ran.stdout.split())


@pytest.fixture(scope="module")
def printed(fresh_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the quickstart with the installed command, from elsewhere; give what it prints when it is ready."""
    directory = tmp_path_factory.mktemp("elsewhere")
    shutil.copy(ROOT / "configs" / "quickstart.yaml", directory / "mine.yaml")
    output = directory / "output"
    command = [str(fresh_python.with_name("epd")), "serve", "mine.yaml", "--port", str(free_port())]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=directory, env=outside(directory), stdout=file, stderr=file, start_new_session=True
        )
    started: list[int] = []
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while "# Stop with Ctrl-C." not in (text := output.read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline_s, text
            time.sleep(0.25)
        yield text
        started = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(90.0) == 0
        assert [pid for pid in started if is_running(pid)] == []
    finally:
        for pid in {*started, *descendants(process.pid), process.pid}:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def is_running(pid: int) -> bool:
    """Whether a process is there and more than an entry that nobody has waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def test_the_installed_quickstart_answers_as_it_prints(printed: str, fresh_python: Path, tmp_path: Path):
    (curl,) = re.findall(r"^curl .*$", printed, re.MULTILINE)
    (snippet,) = re.findall(r"^# In Python:\n(.*)^# Stop", printed, re.MULTILINE | re.DOTALL)
    reply = subprocess.run(["bash", "-c", curl], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert '"content":"3 4 5 6 7 8 9 10 11 12"' in reply.stdout
    ran = subprocess.run(
        [str(fresh_python), "-c", snippet],
        cwd=tmp_path,
        env=outside(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.stdout.startswith("red\n"), ran.stderr
