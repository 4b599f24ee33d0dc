"""Maps addresses to subscribers, by which connections and unnamed clients are counted."""

from __future__ import annotations

import ipaddress

IPV6_PREFIX_LENGTH = 64  # a subscriber owns all addresses under one such prefix


def subscriber_of(host: str) -> str:
    """Returns an IPv4 address as it is (even if IPv6 carries it), an IPv6 address's prefix, other names as they are."""
    if ":" not in host:
        return host
    try:
        found = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, IPV6_PREFIX_LENGTH), strict=False))
