"""Which hosts, ports and addresses a media URL may lead to. Pure functions: no DNS, no sockets.

The rule for addresses is an allow-list in spirit: IPv4 outside every special-purpose block, IPv6 within the global
unicast block and outside its special ranges. Addresses that carry an IPv4 address inside (mapped, NAT64) are judged by
that one; transition mechanisms that nobody should need (6to4, Teredo, IPv4-compatible) are refused.

``allow_private`` opens loopback, private and shared (carrier-grade NAT) networks, for servers that fetch from their own
network. It never opens link-local and cloud metadata addresses, which hand out credentials.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

IPAddress = IPv4Address | IPv6Address

MIN_UNPRIVILEGED_PORT = 1024
WEB_PORTS = frozenset({80, 443})

_METADATA = frozenset(
    map(
        ip_address,
        (
            "100.100.100.200",  # Alibaba Cloud
            "168.63.129.16",  # Azure's wire server; a public address by its number
            "169.254.169.254",  # AWS, GCP, Azure, OpenStack, DigitalOcean
            "169.254.170.2",  # AWS ECS
            "192.0.0.192",  # Oracle Cloud
            "fd00:ec2::254",  # AWS
            "fd20:ce::254",  # GCP
            "fe80::a9fe:a9fe",  # OpenStack
        ),
    )
)
_PRIVATE_V4 = tuple(map(ip_network, ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
_PRIVATE_V6 = tuple(map(ip_network, ("::1/128", "fc00::/7")))
_REFUSED_V4 = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8",  # "this network"; Linux connects 0.0.0.0 to itself
            "169.254.0.0/16",  # link-local
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # 6to4 relays
            "198.18.0.0/15",  # benchmarking
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
_GLOBAL_V6 = ip_network("2000::/3")
_REFUSED_V6 = tuple(
    map(
        ip_network,
        (
            "2001::/23",  # protocol assignments, Teredo among them
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "3fff::/20",  # documentation
        ),
    )
)
_MAPPED_V6 = ip_network("::ffff:0:0/96")
_NAT64 = ip_network("64:ff9b::/96")
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


def is_allowed_address(address: IPAddress, *, allow_private: bool) -> bool:
    """Whether a media URL may connect to this address."""
    if isinstance(address, IPv6Address):
        if address in _MAPPED_V6 or address in _NAT64:
            return is_allowed_address(IPv4Address(int(address) & 0xFFFF_FFFF), allow_private=allow_private)
        private, refused = _PRIVATE_V6, _REFUSED_V6
    else:
        private, refused = _PRIVATE_V4, _REFUSED_V4
    if address in _METADATA:
        return False
    if any(address in network for network in private):
        return allow_private
    if isinstance(address, IPv6Address) and address not in _GLOBAL_V6:
        return False
    return not any(address in network for network in refused)


def is_allowed_port(port: int) -> bool:
    """Whether a media URL may name this port: the web's own two, or an unprivileged one.

    Media servers do run on 8080 or 9000; mail, shells and databases of the system run below 1024.
    """
    return port in WEB_PORTS or MIN_UNPRIVILEGED_PORT <= port <= 65535


def literal_address(host: str) -> IPAddress | None:
    """Return the address that a host is written as, in its one canonical form, or ``None`` for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def is_host_name(host: str) -> bool:
    """Whether a host is a plausible DNS name.

    False for what ends in a number (``127.1``, ``2130706433``, ``0x7f.0.0.1``): system resolvers read such names as
    addresses, each in its own way.
    """
    if len(host) > 253 or _HOST_NAME.fullmatch(host) is None:
        return False
    labels = host.split(".")
    if any(len(label) > 63 for label in labels):
        return False
    return re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]) is None


def matches_domain(host: str, domains: Sequence[str]) -> bool:
    """Whether a host is one of the domains or below one of them."""
    host = host.lower().rstrip(".")
    return any(host == domain or host.endswith(f".{domain}") for domain in map(_normalize_domain, domains))


def _normalize_domain(domain: str) -> str:
    domain = domain.strip().lower().removeprefix("*.").strip(".")
    return domain if domain.isascii() else domain.encode("idna").decode("ascii")
