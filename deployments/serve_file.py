"""Reading a ``serve run`` file outside of Serve: the application's arguments and where it will listen.

Knows nothing of Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from epd.config import AppConfig, parse_config
from epd.errors import ConfigError

IMPORT_PATH = "deployments.app:build_app"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A parsed file: ``document`` as written, ``config`` of its application."""

    document: Mapping[str, Any]
    config: AppConfig
    host: str
    port: int

    @property
    def url(self) -> str:
        """Where a client on this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def listening_on(self, port: int) -> ServeFile:
        """Return the same file with another port."""
        options = {**self.document.get("http_options", {}), "host": self.host, "port": port}
        return ServeFile({**self.document, "http_options": options}, self.config, self.host, port)


def read_serve_file(path: Path) -> ServeFile:
    """Parse and validate a file. Raises ``ConfigError`` naming the YAML path.

    A ``RayService`` manifest is read too: the file is its ``spec.serveConfigV2``.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(str(path), f"cannot be read as YAML: {error}") from error
    if isinstance(document, dict) and document.get("kind") == "RayService":
        document = yaml.safe_load(document["spec"]["serveConfigV2"])
    if not isinstance(document, dict) or not isinstance(document.get("applications"), list):
        raise ConfigError("applications", "the file must have a list of applications")
    found = [each for each in document["applications"] if each.get("import_path") == IMPORT_PATH]
    if len(found) != 1:
        raise ConfigError("applications", f"exactly one application must have import_path: {IMPORT_PATH}")
    http = document.get("http_options") or {}
    config = parse_config(found[0].get("args") or {})
    return ServeFile(document, config, http.get("host", DEFAULT_HOST), int(http.get("port", DEFAULT_PORT)))
