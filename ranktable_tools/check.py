"""Finds every fault in a set of tables before a cluster starts, including ports, tensor-parallel sizes and units.

Reads only files; instances check at their start whether devices and ports exist.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from ranktable_tools.errors import Fault, RankTableError
from ranktable_tools.ports import GivenPorts, port_faults
from ranktable_tools.schema import load_local, locate, parse_global
from ranktable_tools.table_files import actual_path, is_private, read_json
from ranktable_tools.table_rules import device_conflicts, entries, gaps
from ranktable_tools.table_types import RankTable
from ranktable_tools.unit_entries import unit_faults

_NO_PORTS = GivenPorts()


def check(
    global_path: Path,
    local_paths: Sequence[Path] = (),
    node_ports: str | Sequence[int] | None = None,
    tensor_parallel_size: int | None = None,
    given: GivenPorts = _NO_PORTS,
    unit_sizes: Mapping[str, int] = MappingProxyType({}),
) -> list[Fault]:
    """Returns all faults, the global table's first; empty if there are none. Never raises RankTableError.

    `node_ports`: in the environment variable's form (`8088,8089`), or as numbers. `given`: the other ports.
    `unit_sizes`: role -> instances per unit.
    """
    try:
        table = parse_global(read_json(global_path), str(actual_path(global_path)))
    except RankTableError as error:  # prevents all other checks
        return [error.fault]
    faults = [*device_conflicts(entries(table)), *gaps(table)]
    faults += _local_faults(table, local_paths)
    faults += port_faults(table, node_ports, given)
    if tensor_parallel_size is not None:
        faults += _size_faults(table, tensor_parallel_size)
    return [*faults, *unit_faults(table, unit_sizes)]


def permission_warnings(paths: Sequence[Path]) -> list[str]:
    """Returns one line for each file that users other than its owner and group can access; `check` reports missing
    files.
    """
    return [
        f"{path}: mode {actual_path(path).stat().st_mode & 0o777:04o}: others can read or write it, and with "
        "--derive-secret the cluster's secret is derived from it; chmod 600, or 640 for its group"
        for path in paths
        if os.path.isfile(actual_path(path)) and not is_private(path)
    ]


def _local_faults(table: RankTable, local_paths: Sequence[Path]) -> Iterator[Fault]:
    """Checks that every local table is an entry of the global table, and that no two are the same entry."""
    taken: dict[tuple[str, int], Path] = {}  # (role, index) -> local table
    for path in local_paths:
        try:
            place = locate(table, load_local(path))
        except RankTableError as error:
            yield error.fault
            continue
        if place in taken:
            expected = f"an instance of its own ({taken[place]} has this one)"
            yield Fault(str(path), "server_list[0]", f"{place[0]} {place[1]}", expected)
        taken.setdefault(place, path)


def _size_faults(table: RankTable, tensor_parallel_size: int) -> Iterator[Fault]:
    for entry in entries(table):
        num_devices = len(entry.server.device)
        if entry.role != "scheduler" and num_devices != tensor_parallel_size:
            expected = f"{tensor_parallel_size}, the --tensor-parallel-size"
            yield Fault(table.file, f"{entry.field}.device", f"{num_devices} devices", expected)
