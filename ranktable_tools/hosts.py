"""Addresses as rank tables write them: IPv4, IPv6, host names, `localhost`. Resolves nothing."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

HOST_EXPECTED: Final = "an IPv4 or IPv6 address, a host name or 'localhost'"

_SAFE: Final = re.compile(r"[0-9A-Za-z.:%_-]{1,253}")
_LABEL: Final = re.compile(r"[0-9A-Za-z_]([0-9A-Za-z_-]{0,61}[0-9A-Za-z_])?")


def is_ip(text: str) -> bool:
    """An address of one machine: not `0.0.0.0`, not a multicast group."""
    if not _SAFE.fullmatch(text):  # an IPv6 scope could otherwise hold a slash, and it becomes a file name
        return False
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_multicast)


def is_host(text: str) -> bool:
    """An address, or a name. A name whose last label is a number would be a mistyped address."""
    if is_ip(text):
        return True
    if not _SAFE.fullmatch(text):
        return False
    labels = text.split(".")
    return all(_LABEL.fullmatch(label) for label in labels) and not labels[-1].isdigit()


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    return is_ip(host) and ipaddress.ip_address(host).is_loopback


def host_key(host: str) -> str:
    """Equal for two spellings of one host: `localhost` and `127.0.0.1`, `FE80::1` and `fe80:0::1`."""
    if host.lower() == "localhost":
        return "127.0.0.1"
    return str(ipaddress.ip_address(host)) if is_ip(host) else host.lower()


def in_file_name(host: str) -> str:
    """The `{ip}` of a file name. IPv6's colons would be read as separators by `scp` and `docker -v`."""
    return host.replace(":", "-").replace("%", "-")
