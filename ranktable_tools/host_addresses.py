"""Checks and compares addresses in rank tables: IPv4, IPv6, host names, `localhost`. Resolves no names."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

HOST_EXPECTED: Final = (
    "the IPv4 or IPv6 address of one machine (not link-local IPv6, whose scope differs between hosts), a host name or "
    "'localhost'"
)

_SAFE: Final = re.compile(r"[0-9A-Za-z.:%_-]{1,253}")
_LABEL: Final = re.compile(r"[0-9A-Za-z_]([0-9A-Za-z_-]{0,61}[0-9A-Za-z_])?")


def is_ip(text: str) -> bool:
    """Returns whether this is one machine's address, and not `0.0.0.0`, a multicast or a reserved address."""
    if not _SAFE.fullmatch(text):  # an IPv6 scope, which becomes part of a file name, could contain a slash
        return False
    try:
        text.encode("idna")  # sockets do the same, and fail for a long scope; UnicodeError is a ValueError
        address = _address(text)
    except ValueError:
        return False
    if address.is_loopback:
        return True
    return not (address.is_unspecified or address.is_multicast or address.is_reserved or _is_this_network(address))


def is_host(text: str) -> bool:
    """Returns whether this is an address or a name. A name whose last label is a number counts as a mistyped
    address.
    """
    if is_ip(text):
        return True
    if not _SAFE.fullmatch(text):
        return False
    labels = text.split(".")
    return all(_LABEL.fullmatch(label) for label in labels) and not labels[-1].isdigit()


def is_shared_host(text: str) -> bool:
    """Returns whether this address or name means the same on every host, unlike link-local IPv6."""
    return is_host(text) and not (":" in text and is_link_local(text))


def is_link_local(text: str) -> bool:
    """Returns whether this is an address that is valid only on one link."""
    return is_ip(text) and _address(text).is_link_local


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    return is_ip(host) and _address(host).is_loopback


def bracketed(host: str) -> str:
    """Returns the host in the form that is written before a port, which puts an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def host_key(host: str) -> str:
    """Returns the same key for all spellings of one host.

    Examples: `localhost` and `127.0.0.1`, `FD00::1` and `fd00:0::1`, `::ffff:10.0.0.1` and `10.0.0.1`.
    """
    if host.lower() == "localhost":
        return "127.0.0.1"
    _, percent, scope = host.partition("%")
    return f"{_address(host)}{percent}{scope}" if is_ip(host) else host.lower()


def machine_key(host: str) -> str:
    """Returns the same key for addresses that certainly belong to one machine: spellings of one host, and loopback
    addresses.
    """
    return host_key("localhost" if is_loopback(host) else host)


def is_one_host(one: str, other: str) -> bool:
    """Returns whether two addresses certainly belong to one host."""
    return machine_key(one) == machine_key(other)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parses the address without its scope, which Python 3.8 does not support. Raises ValueError.

    An IPv4-mapped IPv6 address becomes the IPv4 address.
    """
    bare, percent, scope = text.partition("%")
    if percent and (not scope or "%" in scope):
        raise ValueError(text)
    address = ipaddress.IPv6Address(bare) if percent else ipaddress.ip_address(bare)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


def _is_this_network(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.version == 4 and int(address) >> 24 == 0  # 0.0.0.0/8 (RFC 1122)


def in_file_name(host: str) -> str:
    """Returns the `{ip}` of a file name. IPv6's colons would be read as separators by `scp` and `docker -v`."""
    return host.replace(":", "-").replace("%", "-")
