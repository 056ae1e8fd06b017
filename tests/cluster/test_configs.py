"""Every configuration that ships starts and answers; a broken one says why, by its YAML path, instead of hanging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import ROOT, configured, running
from tests.cluster.scenes import asking, picture

MODES = {
    "aggregated.yaml": {"aggregated"},
    "epd.yaml": {"epd"},
    "pd.yaml": {"ep_d"},
}


@pytest.mark.parametrize("name", MODES)
def test_a_shipped_configuration_starts_and_forms_the_modes_that_it_promises(name: str):
    with running(configured(name)) as server:
        question = {
            "model": "demo",
            "messages": asking("What color is the circle?", picture("red")),
            "max_tokens": 8,
            "temperature": 0,
        }
        reply = server.http.post("/v1/chat/completions", json=question)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-epd-mode"] in MODES[name]
        for mode in {"aggregated", "e_pd", "ep_d", "epd"} - MODES[name]:
            refused = server.http.post("/v1/chat/completions", json={**question, "epd": {"mode": mode}})
            if refused.status_code == 200:
                assert refused.headers["x-epd-mode"] == mode
                continue
            assert refused.status_code == 400
            assert f"cannot form {mode}" in refused.json()["error"]["message"]
        server.assert_nothing_is_held()


def test_a_bad_configuration_ends_with_an_error_that_names_the_path(tmp_path: Path):
    document = configured("quickstart.yaml", pools={"decode": {"roles": ["decode", "prefil"]}})
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(document))
    result = subprocess.run(
        [sys.executable, "-m", "deployments.cli", "serve", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode != 0
    assert "args.pools.decode.roles" in result.stdout + result.stderr
