"""Ports for servers that are about to start on this machine.

They come from below the range that the kernel takes for outgoing connections, so no client gets one before its server
does; and who has chosen one keeps it, as the name of an abstract Unix socket, from everybody else who chooses here.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

from pd_cluster.errors import ConfigError

FIRST, LAST = 10_000, 65_535
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST_ROOM = 1000  # ports; where the kernel leaves fewer, any will do

_chosen: list[socket.socket] = []  # as long as this process lives


def free_ports(count: int) -> list[int]:
    """Ports that are free now and that no other call, in any process, gets while this process lives.

    Raises ConfigError when there are not so many.
    """
    ports: list[int] = []
    for port in _candidates():
        if len(ports) == count:
            break
        if _take(port):
            ports.append(port)
    if len(ports) < count:
        raise ConfigError(f"this machine has no {count} free ports")
    return ports


def free_port_pair() -> int:
    """A free port whose successor, for the admin address, is free too. Raises ConfigError."""
    for port in _candidates():
        if port < LAST and _take(port) and _take(port + 1):
            return port
    raise ConfigError("this machine has no two neighbouring free ports")


def _candidates() -> Iterator[int]:
    """All ports that may be chosen, in any order."""
    ports = list(range(FIRST, _first_outgoing()))
    if len(ports) < LEAST_ROOM:
        ports = list(range(FIRST, LAST + 1))
    random.shuffle(ports)
    return iter(ports)


def _first_outgoing() -> int:
    try:
        return int(OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return LAST + 1


def _take(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0pd-cluster-port-{port}")
        except OSError:
            claim.close()
            return False
    _chosen.append(claim)
    return True
