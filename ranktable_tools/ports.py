"""Checks the ports at which a cluster listens: NODE_PORTS, the scheduler's, and --kv-port-range. Opens no port."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ranktable_tools.errors import Fault, RankTableError
from ranktable_tools.host_addresses import host_key
from ranktable_tools.table_types import RankTable

NODE_PORTS: Final = "NODE_PORTS"
_LAST: Final = 65535
_A_PORT: Final = "a port from 1 to 65535"
KERNEL: Final = Path("/proc/sys/net/ipv4")
_OUTGOING: Final = "ip_local_port_range"


class GivenPorts(NamedTuple):
    """The ports besides NODE_PORTS. `scheduler`, `worker`: flag -> a process's own port. `kv_range`: the ends of
    --kv-port-range.
    """

    scheduler: Mapping[str, int] = {}
    worker: Mapping[str, int] = {}
    kv_range: tuple[int, int] | None = None


def scheduler_ports(port: int | None, admin_port: int | None = None, join_port: int | None = None) -> dict[str, int]:
    """Returns flag -> port for the known ports at which a scheduler listens."""
    if admin_port is None and port is not None:
        admin_port = port + 1
    found = {"--port": port, "--admin-port": admin_port, "--join-port": join_port}
    return {flag: number for flag, number in found.items() if number is not None}


def parse_node_ports(text: str) -> list[int]:
    """Parses `8088,8089` to [8088, 8089]. Raises RankTableError whose file is NODE_PORTS."""
    ports = []
    for index, part in enumerate(text.split(",")):
        if not re.fullmatch(r"\s*[0-9]{1,5}\s*", part, flags=re.ASCII) or not 1 <= int(part) <= _LAST:
            raise RankTableError(NODE_PORTS, f"[{index}]", part, _A_PORT, "write it as NODE_PORTS=8088,8089")
        ports.append(int(part))
    return ports


def port_faults(table: RankTable, node_ports: str | Sequence[int] | None, given: GivenPorts) -> Iterator[Fault]:
    """Checks that each instance has one port, prefill first, and that no two processes of a host have the same port."""
    yield from _scheduler_faults(given.scheduler)
    ports: list[int] = []
    if node_ports is not None:
        try:
            text = node_ports if isinstance(node_ports, str) else ",".join(map(str, node_ports))
            ports = parse_node_ports(text)
        except RankTableError as error:
            yield error.fault
            return
        yield from _node_faults(table, ports, given.scheduler)
    if given.kv_range is not None:
        yield from _range_faults(table, ports, given)


def _scheduler_faults(ports: Mapping[str, int]) -> Iterator[Fault]:
    owners: dict[int, str] = {}
    for flag, port in ports.items():
        if not 1 <= port <= _LAST:
            yield Fault("scheduler", flag, port, _A_PORT, "give --admin-port: the default is --port + 1")
        elif owners.setdefault(port, flag) != flag:
            yield Fault("scheduler", flag, port, f"another port than {owners[port]}")


def _node_faults(table: RankTable, ports: Sequence[int], scheduler: Mapping[str, int]) -> Iterator[Fault]:
    if len(ports) != len(table.instances):
        expected = (
            f"{len(table.instances)} ports: {table.file} has {len(table.prefill)} prefill, "
            f"{len(table.decode)} decode instances"
        )
        yield Fault(NODE_PORTS, "count", f"{len(ports)} ports", expected)
    home = host_key(table.scheduler.server_ip) if table.scheduler is not None else ""
    flags = {port: flag for flag, port in scheduler.items()}
    owners: dict[tuple[str, int], int] = {}  # (host, port) -> index in NODE_PORTS
    for index, (server, port) in enumerate(zip(table.instances, ports)):
        owner = owners.setdefault((host_key(server.server_ip), port), index)
        if owner != index:
            expected = f"a port that no other instance of {server.server_ip} uses ([{owner}] does)"
            yield Fault(NODE_PORTS, f"[{index}]", port, expected)
        elif port in flags and host_key(server.server_ip) == home:
            expected = f"a port that the scheduler of {server.server_ip} does not use ({flags[port]} {port} does)"
            yield Fault(NODE_PORTS, f"[{index}]", port, expected)


def _range_faults(table: RankTable, ports: Sequence[int], given: GivenPorts) -> Iterator[Fault]:
    """Checks that the range has a port for each instance, and contains no other process's port."""
    assert given.kv_range is not None
    first, last = given.kv_range
    value = f"{first}-{last}"
    hosts = Counter(host_key(server.server_ip) for server in table.instances)
    for host, num_instances in hosts.items():
        if num_instances > last - first + 1:
            expected = f"at least {num_instances} ports, one for each instance of {host}"
            yield Fault("--kv-port-range", "count", value, expected)
    named = {f"{NODE_PORTS} [{index}]": port for index, port in enumerate(ports[: len(table.instances)])}
    if table.scheduler is not None and host_key(table.scheduler.server_ip) in hosts:
        named.update(given.scheduler)
    named.update(given.worker)
    for name, port in named.items():
        if first <= port <= last:
            yield Fault(
                "--kv-port-range", "ports", value, f"ports at which no other process listens ({name} is {port})"
            )


def outgoing_warnings(ports: Mapping[str, int]) -> list[str]:
    """Returns one line for each of these ports that this host's kernel may use for outgoing connections.

    An outgoing connection may already use such a port when its server starts.
    """
    try:
        first, last = map(int, (KERNEL / _OUTGOING).read_text().split())
        kept = (KERNEL / "ip_local_reserved_ports").read_text().strip()
    except (OSError, ValueError):
        return []
    reserved = [tuple(map(int, (part.split("-") * 2)[:2])) for part in kept.split(",") if part]
    return [
        f"{name}: found {port}, which an outgoing connection may hold when its server starts: this host uses {first} "
        f"to {last} for these ({KERNEL / _OUTGOING}); choose a port below {first}"
        for name, port in ports.items()
        if first <= port <= last and not any(low <= port <= high for low, high in reserved)
    ]
