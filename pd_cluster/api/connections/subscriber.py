"""Maps an address to its subscriber. Connections, and clients without a key, are counted by subscriber."""

from __future__ import annotations

import ipaddress

IPV6_PREFIX_LENGTH = 64  # a subscriber owns all addresses under one such prefix


def subscriber_of(host: str) -> str:
    """Returns an IPv4 address (even if mapped to IPv6), an IPv6 address's prefix, or any other name unchanged."""
    if ":" not in host:
        return host
    try:
        found = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, IPV6_PREFIX_LENGTH), strict=False))
