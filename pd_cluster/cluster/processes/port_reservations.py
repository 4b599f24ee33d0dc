"""Chooses ports for servers that are about to start on this host.

The ports are below the kernel's range for outgoing connections, so that no client occupies one before its server does.
The name of an abstract Unix socket reserves a chosen port against all other processes that choose ports by this module.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

from pd_cluster.errors import ConfigError

FIRST, LAST = 10_000, 65_535
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
LEAST_ROOM = 1000  # if fewer ports are left below that range, any port may be chosen


class Reservations:
    """Ports that were chosen and are reserved until `close`, which may be called again."""

    def __init__(self) -> None:
        self._claims: list[socket.socket] = []

    def __len__(self) -> int:
        return len(self._claims)

    def take(self, port: int) -> bool:
        """Reserves a port if it is free now. Returns whether it was."""
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
        self._claims.append(claim)
        return True

    def close(self) -> None:
        while self._claims:
            self._claims.pop().close()


FOR_LIFE = Reservations()  # until this process ends


def free_ports(count: int, reservations: Reservations | None = None) -> list[int]:
    """Returns ports that are free now; no other call in any process returns them while they are reserved.

    `reservations` None: reserved until this process ends. Raises ConfigError if there are too few.
    """
    ports: list[int] = []
    for port in candidate_ports():
        if len(ports) == count:
            break
        if (FOR_LIFE if reservations is None else reservations).take(port):
            ports.append(port)
    if len(ports) < count:
        raise ConfigError(f"this machine has no {count} free ports")
    return ports


def free_port_pair() -> int:
    """Returns a free port whose successor, for the admin address, is free too. Raises ConfigError."""
    return free_port_row(2)


def free_port_row(count: int) -> int:
    """Returns the first of `count` consecutive free ports. Raises ConfigError."""
    for port in candidate_ports():
        if port + count - 1 <= LAST and all(FOR_LIFE.take(each) for each in range(port, port + count)):
            return port
    raise ConfigError(f"this machine has no {count} consecutive free ports")


def candidate_ports() -> Iterator[int]:
    """Yields all ports that may be chosen, in any order."""
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
