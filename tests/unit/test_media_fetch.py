"""If this fails, a media URL can reach inside the operator's network, or a hostile server can exhaust this one."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from epd.config import MediaConfig
from epd.errors import MediaError, MediaFetchError
from epd.media.addresses import is_allowed_address, is_allowed_port, is_host_name, matches_domain
from epd.media.fetch import Fetcher

PARAM = "messages[0].content[1]"
LOCAL = MediaConfig(allow_private_ips=True, max_bytes=100_000)
PUBLIC = MediaConfig()


# --------------------------------------------------------------------------------------------------------------------
# A server and a resolver to test against
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A web server on the loopback address that answers from a table and remembers what it was asked."""

    port: int = 0
    answers: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    num_connections: int = 0

    def url(self, path: str, host: str = "media.test", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"


def answer(body: bytes = b"pixels", status: int = 200, **headers: str) -> bytes:
    fields = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in fields.items() if value)]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def serving(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]] | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> AsyncIterator[Server]:
    server = Server()
    open_writers: set[asyncio.StreamWriter] = set()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_writers.add(writer)
        server.num_connections += 1
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            server.requests.append(request)
            if handler is not None:
                await handler(reader, writer)
            else:
                writer.write(server.answers.get(request.split(" ")[1], answer(status=404)))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(respond, "127.0.0.1", 0, ssl=ssl_context)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for writer in open_writers:
            writer.transport.abort()


class FakeResolver:
    """Answers from a table; a list of lists answers differently each time."""

    def __init__(self, **names: Any) -> None:
        self.names = {name.replace("_", "."): value for name, value in names.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        found = self.names.get(host)
        if found is None:
            raise OSError("Name or service not known")
        if found and isinstance(found[0], list):
            return found.pop(0) if len(found) > 1 else found[0]
        return found


def local_resolver() -> FakeResolver:
    return FakeResolver(media_test=["127.0.0.1"], other_test=["127.0.0.1"])


async def fetch(url: str, config: MediaConfig = LOCAL, **kwargs: Any) -> bytes:
    kwargs.setdefault("resolver", local_resolver())
    async with Fetcher(config, **kwargs) as fetcher:
        return await fetcher.fetch(url, param=PARAM)


async def refused(url: str, reason: str, config: MediaConfig = LOCAL, **kwargs: Any) -> None:
    with pytest.raises(MediaError, match=reason) as error:
        await fetch(url, config, **kwargs)
    assert error.value.param == PARAM


async def failed(url: str, reason: str, config: MediaConfig = LOCAL, **kwargs: Any) -> None:
    with pytest.raises(MediaFetchError, match=reason) as error:
        await fetch(url, config, **kwargs)
    assert error.value.param == PARAM
    assert error.value.retry_after_s > 0


# --------------------------------------------------------------------------------------------------------------------
# Addresses, ports, names
# --------------------------------------------------------------------------------------------------------------------

PRIVATE = ["10.0.0.1", "127.0.0.1", "127.255.0.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1"]
PRIVATE_V6 = ["::1", "fc00::1", "fd12:3456::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::10.0.0.1"]
NEVER = ["0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.0.1", "224.0.0.1", "239.1.2.3", "240.0.0.1"]
NEVER += ["255.255.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.51.100.1", "203.0.113.1"]
NEVER += ["100.100.100.200", "168.63.129.16"]
NEVER_V6 = [
    "::",
    "fe80::1",
    "febf::1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "fd00:ec2::254",
    "2001:db8::1",
    "2001::1",
    "100::1",
]
NEVER_V6 += ["2002:7f00:1::", "2002:808:808::", "::127.0.0.1", "::8.8.8.8", "::ffff:169.254.169.254", "4000::1"]
NEVER_V6 += ["64:ff9b::169.254.169.254", "64:ff9b:1::8.8.8.8", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "5f00::1"]


@pytest.mark.parametrize("address", PRIVATE + PRIVATE_V6)
def test_private_addresses_need_the_operators_leave(address: str) -> None:
    assert not is_allowed_address(ip_address(address), allow_private=False)
    assert is_allowed_address(ip_address(address), allow_private=True)


@pytest.mark.parametrize("address", NEVER + NEVER_V6)
def test_some_addresses_are_never_connected_to(address: str) -> None:
    assert not is_allowed_address(ip_address(address), allow_private=False)
    assert not is_allowed_address(ip_address(address), allow_private=True)


@pytest.mark.parametrize("address", ["8.8.8.8", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_allowed_address(ip_address(address), allow_private=False)


def test_only_the_webs_ports_and_unprivileged_ones_are_allowed() -> None:
    assert [port for port in (0, 22, 25, 80, 443, 445, 1023, 1024, 8080, 65535, 65536) if is_allowed_port(port)] == [
        *(80, 443, 1024, 8080, 65535)
    ]


@pytest.mark.parametrize(
    "host", ["127.1", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "a b", "a%2e", "", "-a.com"]
)
def test_odd_spellings_of_addresses_are_no_host_names(host: str) -> None:
    assert not is_host_name(host)


def test_a_domain_stands_for_itself_and_what_is_below_it() -> None:
    for host in ("example.com", "EXAMPLE.com.", "cdn.example.com"):
        assert matches_domain(host, ["example.com"])
        assert matches_domain(host, ["*.Example.com"])
    for host in ("badexample.com", "example.com.evil.org", "com"):
        assert not matches_domain(host, ["example.com"])
    assert matches_domain("xn--bcher-kva.example", ["bücher.example"])


# --------------------------------------------------------------------------------------------------------------------
# The policy, over a listening server that proves who was connected to
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "must start with"),
        ("ftp://media.test/a.png", "must start with"),
        ("gopher://media.test/", "must start with"),
        ("//media.test/a.png", "must start with"),
        ("/etc/passwd", "must start with"),
        ("", "must start with"),
        ("unix:/var/run/docker.sock", "must start with"),
        ("http://user@media.test:{port}/", "user name or password"),
        ("http://user:secret@media.test:{port}/", "user name or password"),
        ("http://media.test\\@127.0.0.1:{port}/", "malformed"),
        ("http://127.0.0.1:{port}\\@media.test/", "malformed"),
        ("http://[::1", "malformed"),
        ("http://media.test:{port}/\x00", "malformed"),
        ("http://media.test:{port}/" + "a" * 9000, "longer than"),
        ("http:///path", "no valid host"),
        ("http://127.1:{port}/", "no valid host"),
        ("http://2130706433:{port}/", "no valid host"),
        ("http://0x7f000001:{port}/", "no valid host"),
        ("http://0177.0.0.1:{port}/", "malformed"),
        ("http://0x7f.0.0.1:{port}/", "no valid host"),
        ("http://[fe80::1%25eth0]:{port}/", "no valid host|public internet"),
        ("http://media.test:22/", "port 22"),
        ("http://media.test:0/", "port 0"),
        ("http://media.test:99999/", "port 99999"),
        ("http://127.0.0.1:{port}/", "public internet"),
        ("http://127。0。0。1:{port}/", "public internet"),
        ("http://[::1]:{port}/", "public internet"),
        ("http://[::ffff:127.0.0.1]:{port}/", "public internet"),
        ("http://[::ffff:7f00:1]:{port}/", "public internet"),
        ("http://[64:ff9b::7f00:1]:{port}/", "public internet"),
        ("http://[2002:7f00:1::]:{port}/", "public internet"),
        ("http://0.0.0.0:{port}/", "public internet"),
        ("http://[::]:{port}/", "public internet"),
        ("http://169.254.169.254/latest/meta-data/", "public internet"),
        ("http://media.test:{port}/", "public internet"),
        ("http://MEDIA.TEST.:{port}/", "public internet"),
        ("http://mixed.test:{port}/", "public internet"),
        ("https://mapped.test:{port}/", "public internet"),
    ],
)
async def test_what_policy_refuses_is_never_connected_to(url: str, reason: str) -> None:
    resolver = FakeResolver(
        media_test=["127.0.0.1"], mixed_test=["93.184.216.34", "127.0.0.1"], mapped_test=["::ffff:127.0.0.1"]
    )
    async with serving() as server:
        await refused(url.replace("{port}", str(server.port)), reason, PUBLIC, resolver=resolver)
        assert server.num_connections == 0


async def test_link_local_and_metadata_stay_closed_with_private_addresses_allowed() -> None:
    for url in (
        "http://169.254.169.254/",
        "http://[fd00:ec2::254]/",
        "http://0.0.0.0:8080/",
        "http://100.100.100.200/",
    ):
        await refused(url, "public internet")


async def test_the_address_connected_to_is_the_one_checked_even_if_dns_changes_its_mind() -> None:
    async with serving() as server:
        server.answers["/a"] = answer(b"pixels")
        resolver = FakeResolver(media_test=[["127.0.0.1"], ["169.254.169.254"]])
        assert await fetch(server.url("/a"), resolver=resolver) == b"pixels"
        assert resolver.asked == ["media.test"]


async def test_the_server_sees_the_name_and_nothing_about_the_client() -> None:
    async with serving() as server:
        server.answers["/a%20b?q=1"] = answer(b"pixels", set_cookie="secret=1")
        async with Fetcher(LOCAL, resolver=local_resolver()) as fetcher:
            for _ in range(2):
                assert await fetcher.fetch(server.url("/a%20b?q=1#fragment"), param=PARAM) == b"pixels"
        for request in server.requests:
            assert f"host: media.test:{server.port}" in request.lower()
            assert "cookie" not in request.lower()
            assert "authorization" not in request.lower()
        assert server.num_connections == 2  # a kept connection could serve another name


async def test_proxies_from_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    async with serving() as server:
        server.answers["/a"] = answer()
        assert await fetch(server.url("/a")) == b"pixels"


async def test_domains_may_be_allowed_and_denied() -> None:
    async with serving() as server:
        server.answers["/a"] = answer()
        server.answers["/away"] = answer(status=302, location=server.url("/a", host="other.test"))
        allowed = LOCAL.model_copy(update={"allowed_domains": ["media.test"]})
        assert await fetch(server.url("/a"), allowed) == b"pixels"
        await refused(server.url("/a", host="other.test"), "does not fetch media from other.test", allowed)
        await refused(server.url("/away"), "does not fetch media from other.test", allowed)
        denied = LOCAL.model_copy(update={"denied_domains": ["test"]})
        await refused(server.url("/a"), "does not fetch media from media.test", denied)
        assert len(server.requests) == 2


# --------------------------------------------------------------------------------------------------------------------
# Redirects
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_are_followed(status: int) -> None:
    async with serving() as server:
        server.answers["/a"] = answer(status=status, location="/b")
        server.answers["/b"] = answer(status=status, location=server.url("/c", host="other.test"))
        server.answers["/c"] = answer(b"pixels")
        assert await fetch(server.url("/a")) == b"pixels"
        assert f"host: other.test:{server.port}" in server.requests[-1].lower()


async def test_redirects_are_counted() -> None:
    async with serving() as server:
        server.answers["/a"] = answer(status=302, location="/a")
        await refused(server.url("/a"), "redirects more than 3 times")
        assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("file:///etc/passwd", "must start with"),
        ("data:text/plain,hi", "must start with"),
        ("http://169.254.169.254/latest/", "public internet"),
        ("http://[::ffff:169.254.169.254]/", "public internet"),
        ("http://metadata.test/", "public internet"),
        ("//2852039166/", "no valid host"),
        ("http://user:pw@media.test/", "user name or password"),
        ("http://media.test:25/", "port 25"),
        ("http://[", "no valid host"),
        ("", "redirect to nowhere"),
    ],
)
async def test_each_redirect_is_checked_again(location: str, reason: str) -> None:
    resolver = FakeResolver(media_test=["127.0.0.1"], metadata_test=["169.254.169.254"])
    async with serving() as server:
        server.answers["/a"] = answer(status=302, location=location)
        await refused(server.url("/a"), reason, resolver=resolver)
        assert server.num_connections == 1


async def test_a_name_is_resolved_again_at_each_redirect() -> None:
    async with serving() as server:
        server.answers["/a"] = answer(status=302, location="/b")
        resolver = FakeResolver(media_test=[["127.0.0.1"], ["10.0.0.1", "169.254.169.254"]])
        await refused(server.url("/a"), "public internet", resolver=resolver)
        assert len(server.requests) == 1


# --------------------------------------------------------------------------------------------------------------------
# Sizes, statuses, failures
# --------------------------------------------------------------------------------------------------------------------


async def test_a_body_at_the_limit_passes_and_one_byte_more_does_not() -> None:
    async with serving() as server:
        server.answers["/a"] = answer(b"x" * 100_000)
        server.answers["/b"] = answer(b"x" * 100_001)
        assert len(await fetch(server.url("/a"))) == 100_000
        await refused(server.url("/b"), "larger than the limit of 100000 bytes")


async def test_an_endless_body_is_stopped_at_the_limit() -> None:
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
            await writer.drain()
            sent += 10_000

    async with serving(endless) as server:
        await refused(server.url("/a"), "larger than the limit")
    assert sent < 20_000_000


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("deflate", raw_deflate)]
)
async def test_compressed_bodies_are_counted_after_decompression(
    encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    async with serving() as server:
        server.answers["/a"] = answer(compress(b"pixels" * 1000), content_encoding=encoding)
        server.answers["/b"] = answer(compress(b"\0" * 50_000_000), content_encoding=encoding)
        server.answers["/c"] = answer(compress(b"pixels" * 1000)[:-8], content_encoding=encoding)
        assert await fetch(server.url("/a")) == b"pixels" * 1000
        await refused(server.url("/b"), "larger than the limit")
        await refused(server.url("/c"), "damaged compressed body")


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "deflate, gzip"])
async def test_other_content_encodings_are_refused(encoding: str) -> None:
    async with serving() as server:
        server.answers["/a"] = answer(gzip.compress(b"pixels"), content_encoding=encoding)
        await refused(server.url("/a"), "unsupported content encoding")


@pytest.mark.parametrize("status", [204, 304, 400, 401, 403, 404, 410, 416])
async def test_a_refusal_of_the_server_is_an_error_of_the_client(status: int) -> None:
    async with serving() as server:
        server.answers["/a"] = answer(b"", status=status)
        await refused(server.url("/a"), f"status {status}")


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
async def test_a_failure_of_the_server_is_temporary(status: int) -> None:
    async with serving() as server:
        server.answers["/a"] = answer(b"", status=status)
        await failed(server.url("/a"), f"status {status}")


async def test_an_empty_body_is_refused() -> None:
    async with serving() as server:
        server.answers["/a"] = answer(b"")
        await refused(server.url("/a"), "empty body")


async def test_a_name_that_does_not_resolve_is_a_temporary_failure() -> None:
    await failed("http://nowhere.test/", "nowhere.test of the media URL could not be resolved")
    await failed("http://empty.test/", "has no address", resolver=FakeResolver(empty_test=[]))


async def test_a_closed_port_and_a_broken_answer_are_temporary_failures() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf")

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    for handler in (hang_up, babble):
        async with serving(handler) as server:
            await failed(server.url("/a"), "the connection to media.test failed")
    await failed(server.url("/a"), "the connection to media.test failed")


async def test_the_next_address_is_tried_when_one_does_not_answer() -> None:
    async with serving() as server:
        server.answers["/a"] = answer()
        resolver = FakeResolver(media_test=["127.0.0.2", "127.0.0.1"])
        assert await fetch(server.url("/a"), resolver=resolver) == b"pixels"


async def test_a_server_that_never_finishes_is_given_up() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nx")
        await writer.drain()
        await reader.read()

    hasty = LOCAL.model_copy(update={"fetch_timeout_s": 0.05})
    async with serving(drip) as server:
        await failed(server.url("/a"), "within 0.05 seconds|in time", hasty)


async def test_a_resolver_that_never_answers_is_given_up() -> None:
    async def silent(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        raise AssertionError

    hasty = LOCAL.model_copy(update={"fetch_timeout_s": 0.05})
    await failed("http://media.test/", "within 0.05 seconds", hasty, resolver=silent)


async def test_only_so_many_fetches_run_at_once() -> None:
    running, most = 0, 0
    release = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 2:
            release.set()
        await release.wait()
        running -= 1
        writer.write(answer())
        await writer.drain()

    narrow = LOCAL.model_copy(update={"max_concurrent_fetches": 2})
    async with serving(slow) as server, Fetcher(narrow, resolver=local_resolver()) as fetcher:
        urls = [server.url(f"/{index}") for index in range(8)]
        assert await asyncio.gather(*(fetcher.fetch(url, param=PARAM) for url in urls)) == [b"pixels"] * 8
    assert most == 2


async def test_https_checks_the_certificate_against_the_name_though_connecting_by_address(tmp_path: Path) -> None:
    server_context, client_context = _tls(tmp_path, "media.test")
    async with serving(ssl_context=server_context) as server:
        server.answers["/a"] = answer()
        assert await fetch(server.url("/a", scheme="https"), ssl_context=client_context) == b"pixels"
        await failed(
            server.url("/a", host="other.test", scheme="https"), "connection to other.test", ssl_context=client_context
        )
        await failed(server.url("/a", scheme="https"), "connection to media.test failed")  # an unknown authority
        assert len(server.requests) == 1


def _tls(directory: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Make a certificate for a name; return contexts of a server that shows it and of a client that trusts only it."""
    x509 = pytest.importorskip("cryptography.x509")
    import datetime

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    start = datetime.datetime(2020, 1, 1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=36_500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = directory / "server.pem"
    path.write_bytes(private + pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cadata=pem.decode())
