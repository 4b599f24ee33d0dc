"""Units of N consecutive entries of one role, whose expert layers are computed together. Tables have no field for them.

N is each process's --data-parallel-size, and may differ between prefill and decode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ranktable_tools.errors import Fault
from ranktable_tools.host_addresses import host_key
from ranktable_tools.table_rules import Entry, entries
from ranktable_tools.table_types import RankTable

OPTIONS = {role: f"--{role}-data-parallel-size" for role in ("prefill", "decode")}


class Unit(NamedTuple):
    """`members`: indices in the role's server_list, in the order of their ranks."""

    name: str
    members: range


def unit_at(role: str, position: int, size: int) -> Unit:
    """Returns the unit of `size` instances that contains the entry at this index of its role's server_list."""
    first = position - position % size
    return Unit(f"{role}-{first}..{first + size - 1}", range(first, first + size))


def unit_names(table: RankTable, sizes: Mapping[str, int]) -> list[str]:
    """Returns the name of each instance's unit, in the order of NODE_PORTS; "" for an instance without a unit.

    `sizes`: role -> instances per unit; a role that is missing or has 1 has no units.
    """
    return [
        unit_at(entry.role, entry.position, sizes[entry.role]).name if sizes.get(entry.role, 1) > 1 else ""
        for entry in entries(table)
        if entry.role != "scheduler"
    ]


def unit_faults(table: RankTable, sizes: Mapping[str, int]) -> Iterator[Fault]:
    """Checks that each role's entries form whole units, and that a unit's members have equal numbers of devices."""
    by_role = _by_role(entries(table), sizes)
    for role, found in by_role.items():
        if rest := len(found) % sizes[role]:
            field = found[0].field.rpartition(".")[0] + ".server_count"
            expected = f"a multiple of {sizes[role]}, the {OPTIONS[role]}"
            way_out = f"add {sizes[role] - rest} {role} instances, or remove {rest}"
            yield Fault(table.file, field, str(len(found)), expected, way_out)
    for found in by_role.values():
        for entry in found:
            unit = unit_at(entry.role, entry.position, sizes[entry.role])
            first = found[unit.members.start]
            if len(entry.server.device) != len(first.server.device):
                expected = f"{len(first.server.device)} as in {first.field}: both are in unit {unit.name}"
                yield Fault(table.file, f"{entry.field}.device", f"{len(entry.server.device)} devices", expected)


def open_units(table: RankTable, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yields a line for each role whose entries in one machine's table do not fill its units."""
    for role, found in _by_role(entries(table), sizes).items():
        if rest := len(found) % sizes[role]:
            yield (
                f"this machine's {len(found)} {role} instances do not fill units of {OPTIONS[role]} {sizes[role]}: "
                f"merge completes the last unit with the next {sizes[role] - rest} {role} instances of the following "
                "files"
            )


def split_units(all_entries: Sequence[Entry], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yields a line for each host whose entries are in more units than they would be if they were consecutive.

    A unit may span hosts, but two units that span the same two hosts could instead be one unit on each host.
    """
    for role, found in _by_role(all_entries, sizes).items():
        names: dict[str, list[str]] = defaultdict(list)  # host -> the unit of each of its entries
        for position, entry in enumerate(found):
            names[host_key(entry.server.server_ip)].append(unit_at(role, position, sizes[role]).name)
        for host, inside in names.items():
            needed = -(-len(inside) // sizes[role])
            if len(torn := list(dict.fromkeys(inside))) > needed:
                yield (
                    f"the order splits units: {host} has {len(inside)} {role} instances, enough for {needed} of "
                    f"{OPTIONS[role]} {sizes[role]}, but they are in {', '.join(torn)}; another order of the files "
                    "may keep them together"
                )


def _by_role(all_entries: Sequence[Entry], sizes: Mapping[str, int]) -> dict[str, list[Entry]]:
    """Returns role -> its entries, in order, for roles that have units."""
    found: dict[str, list[Entry]] = {}
    for entry in all_entries:
        if sizes.get(entry.role, 1) > 1:
            found.setdefault(entry.role, []).append(entry)
    return found
