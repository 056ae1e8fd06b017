"""Who may call: API keys, where they come from, and without any, callers on this machine. Knows no HTTP framework.

Keys are kept as digests and compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from epd.config import IngressConfig
from epd.errors import AuthenticationError, ConfigError, ForbiddenError


class ApiKeys:
    """Who may call ``/v1``: whoever has a key; without keys, callers on this machine, or everyone if so configured."""

    def __init__(self, keys: Iterable[str], *, allow_anonymous: bool = False) -> None:
        self._digests = [_digest(key) for key in keys]
        self._allow_anonymous = allow_anonymous

    def check(self, authorization: str | None, arrived_at: Sequence[object] | None) -> None:
        """Return if the ``Authorization`` header carries a known key, or none is needed.

        ``arrived_at`` is the server's end of the connection, as ASGI's ``scope["server"]`` has it. Raises
        ``AuthenticationError`` or ``ForbiddenError``.
        """
        if not self._digests:
            if self._allow_anonymous or is_local(arrived_at):
                return
            raise ForbiddenError(
                "without API keys this server answers its own machine only: configure ingress.api_keys_env or "
                "ingress.api_keys_file, or set ingress.allow_anonymous: true"
            )
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if not key or scheme.lower() != "bearer":
            if self._allow_anonymous:
                return
            raise AuthenticationError("an API key is needed: send the header 'Authorization: Bearer <key>'")
        digest = _digest(key)
        num_matches = sum(hmac.compare_digest(digest, known) for known in self._digests)
        if not num_matches:
            raise AuthenticationError("the API key is not known here")


def is_local(arrived_at: Sequence[object] | None) -> bool:
    """Whether a connection to this address can only come from this machine. An address that is not known cannot."""
    if not arrived_at:
        return False
    host = str(arrived_at[0])
    if host.startswith("/"):  # a Unix socket
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


def load_api_keys(config: IngressConfig, environ: Mapping[str, str] = os.environ) -> ApiKeys:
    """Read the keys that the configuration names: an environment variable (comma-separated), a file (one a line).

    Raises ``ConfigError`` when a source that is named cannot be read or holds no key: a server that was meant to be
    closed must not start open.
    """
    keys: list[str] = []
    if config.api_keys_env is not None:
        found = _split(environ.get(config.api_keys_env, "").replace(",", "\n"))
        if not found:
            raise ConfigError(
                "args.ingress.api_keys_env", f"the environment variable {config.api_keys_env} holds no key"
            )
        keys += found
    if config.api_keys_file is not None:
        path = "args.ingress.api_keys_file"
        try:
            found = _split(Path(config.api_keys_file).read_text())
        except OSError as error:
            raise ConfigError(path, f"{config.api_keys_file} cannot be read: {error.strerror}") from error
        if not found:
            raise ConfigError(path, f"{config.api_keys_file} holds no key")
        keys += found
    return ApiKeys(keys, allow_anonymous=config.allow_anonymous)


def _split(text: str) -> list[str]:
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
