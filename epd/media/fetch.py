"""Fetching media by URL for clients that nobody vouches for. Knows nothing of what the bytes are.

Every hop of a fetch goes through the same gate::

    URL -> scheme, credentials, port, domain -> DNS, once -> every address judged -> connect to one of *those*
     ^                                                                                       |
     +------------------------------- redirect, counted ------------------------------------+

The connection is made to the address, with the name in ``Host`` and in TLS's SNI (against which the certificate is
checked), so that a second DNS answer cannot lead somewhere else. Connections are not kept: one opened for a name must
not serve another name at the same address. No cookies, no proxies or credentials from the environment.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from types import TracebackType
from typing import Protocol, Self

import httpx

from epd.config import MediaConfig
from epd.errors import MediaError, MediaFetchError
from epd.media.addresses import (
    IPAddress,
    is_allowed_address,
    is_allowed_port,
    is_host_name,
    literal_address,
    matches_domain,
)

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 8192
_MAX_ADDRESSES_TRIED = 4
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TEMPORARY = frozenset({408, 425, 429})
_HEADERS = {
    "accept": "image/*,video/*;q=0.9,*/*;q=0.5",
    # Compression saves nothing on media, and refusing it leaves one way less to blow up.
    "accept-encoding": "identity",
    "connection": "close",
    "user-agent": "epd-media-fetcher",
}


class Resolver(Protocol):
    """DNS, as the fetcher needs it."""

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a host, preferred ones first. Raises ``OSError`` if there are none."""
        ...


async def resolve_host(host: str, port: int) -> list[str]:
    """Ask the system's resolver."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


@dataclass(frozen=True, slots=True)
class _Target:
    """One hop that passed the gate: where to connect, and what to ask for there."""

    url: httpx.URL
    host: str
    addresses: tuple[IPAddress, ...]


class Fetcher:
    """Fetches media over http and https, one bounded number of fetches at a time.

    Belongs to one event loop. ``resolver`` and ``ssl_context`` are for tests and for private certificate authorities.
    """

    def __init__(
        self,
        config: MediaConfig,
        *,
        resolver: Resolver = resolve_host,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config
        self._resolver = resolver
        self._slots = asyncio.Semaphore(config.max_concurrent_fetches)
        self._transport = httpx.AsyncHTTPTransport(
            verify=ssl_context or httpx.create_ssl_context(),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close what is open. The fetcher cannot be used afterwards."""
        await self._transport.aclose()

    async def fetch(self, url: str, *, param: str | None) -> bytes:
        """Return the body behind a URL; ``fetch_timeout_s`` covers all hops and the wait for a free slot.

        Raises:
            MediaError: the URL is refused by policy, the server answered 4xx, or the body is over ``max_bytes``.
            MediaFetchError: DNS, the connection or the server failed in a way that may pass.
        """
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s), self._slots:
                return await self._follow(url, param)
        except TimeoutError as error:
            message = f"the media URL did not answer in full within {self._config.fetch_timeout_s:g} seconds"
            raise MediaFetchError(message, param) from error

    async def _follow(self, url: str, param: str | None) -> bytes:
        current = parse_url(url, param)
        for _ in range(self._config.max_redirects + 1):
            target = await self._admit(current, param)
            async with self._get(target, param) as response:
                if response.status_code not in _REDIRECTS:
                    return await self._read(response, target.host, param)
                location = response.headers.get("location", "")
            if not location:
                raise MediaError(f"{target.host} answered with a redirect to nowhere", param)
            current = parse_url(location, param, base=current)
        raise MediaError(f"the media URL redirects more than {self._config.max_redirects} times", param)

    async def _admit(self, url: httpx.URL, param: str | None) -> _Target:
        """Pass one hop through the gate. Raises before anything is connected to."""
        host = check_url(url, self._config, param)
        literal = literal_address(host)
        port = url.port or _DEFAULT_PORTS[url.scheme]
        addresses = (literal,) if literal is not None else await self._resolve(host, port, param)
        allow_private = self._config.allow_private_ips
        if not all(is_allowed_address(address, allow_private=allow_private) for address in addresses):
            raise MediaError(f"{host} is not on the public internet, and this server fetches media only there", param)
        return _Target(url, host, tuple(addresses))

    async def _resolve(self, host: str, port: int, param: str | None) -> list[IPAddress]:
        try:
            answers = await self._resolver(host, port)
        except (OSError, UnicodeError) as error:
            raise MediaFetchError(f"the host {host} of the media URL could not be resolved", param) from error
        if not answers:
            raise MediaFetchError(f"the host {host} of the media URL has no address", param)
        return [ip_address(answer.split("%", 1)[0]) for answer in answers]

    @asynccontextmanager
    async def _get(self, target: _Target, param: str | None) -> AsyncIterator[httpx.Response]:
        """Send the request to the first address that answers."""
        try:
            response = await self._connect(target)
            try:
                yield response
            finally:
                await response.aclose()
        except httpx.TimeoutException as error:
            raise MediaFetchError(f"{target.host} did not answer in time", param) from error
        except httpx.TransportError as error:
            raise MediaFetchError(f"the connection to {target.host} failed", param) from error

    async def _connect(self, target: _Target) -> httpx.Response:
        timeout = httpx.Timeout(self._config.fetch_timeout_s, connect=self._config.connect_timeout_s)
        extensions: dict[str, object] = {"timeout": timeout.as_dict()}
        if literal_address(target.host) is None:
            extensions["sni_hostname"] = target.host
        headers = {"host": target.url.netloc.decode("ascii"), **_HEADERS}
        failure: httpx.TransportError | None = None
        for address in target.addresses[:_MAX_ADDRESSES_TRIED]:
            url = target.url.copy_with(host=str(address), fragment=None)
            try:
                request = httpx.Request("GET", url, headers=headers, extensions=extensions)
                return await self._transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        assert failure is not None
        raise failure

    async def _read(self, response: httpx.Response, host: str, param: str | None) -> bytes:
        status = response.status_code
        if status >= 500 or status in _TEMPORARY:
            raise MediaFetchError(f"{host} answered the request for the media with status {status}", param)
        if status != 200:
            raise MediaError(f"{host} answered the request for the media with status {status}", param)
        max_bytes = self._config.max_bytes
        too_large = MediaError(f"the media at {host} is larger than the limit of {max_bytes} bytes", param)
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise too_large
        body = bytearray()
        num_wire_bytes = 0
        inflate = _Inflater(response.headers.get("content-encoding", ""), host, param)
        async for chunk in response.aiter_raw():
            num_wire_bytes += len(chunk)
            body += inflate(chunk, max_bytes + 1 - len(body))
            if num_wire_bytes > max_bytes or len(body) > max_bytes:
                raise too_large
        inflate.finish()
        if not body:
            raise MediaError(f"{host} answered the request for the media with an empty body", param)
        return bytes(body)


class _Inflater:
    """Undoes a content encoding that the server used although it was asked for none, never past a given size."""

    def __init__(self, encoding: str, host: str, param: str | None) -> None:
        self._host = host
        self._param = param
        self._is_first = True
        encoding = encoding.strip().lower()
        if encoding in ("", "identity"):
            self._inflate = None
        elif encoding in ("gzip", "x-gzip", "deflate"):
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
        else:
            raise MediaError(f"{host} sent the media in the unsupported content encoding {encoding[:40]!r}", param)

    def __call__(self, chunk: bytes, max_length: int) -> bytes:
        if self._inflate is None:
            return chunk
        try:
            if self._is_first and chunk:
                self._is_first = False
                try:
                    return self._inflate.decompress(chunk, max_length)
                except zlib.error:  # "deflate" without the zlib header, as some servers send it
                    self._inflate = zlib.decompressobj(-zlib.MAX_WBITS)
            return self._inflate.decompress(chunk, max_length)
        except zlib.error as error:
            raise MediaError(f"{self._host} sent a damaged compressed body", self._param) from error

    def finish(self) -> None:
        if self._inflate is not None and not self._inflate.eof:
            raise MediaError(f"{self._host} sent a damaged compressed body", self._param)


def parse_url(url: str, param: str | None, *, base: httpx.URL | None = None) -> httpx.URL:
    """Parse a media URL, or a redirect's location against ``base``. Raises ``MediaError``."""
    text = url.strip()
    if len(text) > _MAX_URL_CHARS:
        raise MediaError(f"the media URL is longer than {_MAX_URL_CHARS} characters", param)
    # A backslash splits hosts differently in different parsers, which is all it is used for in a URL.
    if "\\" in text:
        raise MediaError("the media URL is malformed", param)
    try:
        return httpx.URL(text) if base is None else base.join(text)
    except (httpx.InvalidURL, ValueError) as error:
        raise MediaError("the media URL is malformed", param) from error


def check_url(url: httpx.URL, config: MediaConfig, param: str | None) -> str:
    """Apply the part of the policy that needs no DNS, and return the host. Raises ``MediaError``."""
    if url.scheme not in _DEFAULT_PORTS:
        raise MediaError("media URLs must start with https:, http: or data:", param)
    if url.userinfo:
        raise MediaError("media URLs must not contain a user name or password", param)
    host = url.raw_host.decode("ascii").rstrip(".")
    if literal_address(host) is None and not is_host_name(host):
        raise MediaError("the media URL has no valid host name", param)
    if url.port is not None and not is_allowed_port(url.port):
        raise MediaError(f"media is not fetched from port {url.port}", param)
    if matches_domain(host, config.denied_domains):
        raise MediaError(f"this server does not fetch media from {host}", param)
    if config.allowed_domains is not None and not matches_domain(host, config.allowed_domains):
        raise MediaError(f"this server does not fetch media from {host}", param)
    return host
