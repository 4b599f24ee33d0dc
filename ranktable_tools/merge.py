"""Merges the global tables of all machines into one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ranktable_tools.errors import RankTableError
from ranktable_tools.foreign_fields import together
from ranktable_tools.schema import load_global
from ranktable_tools.table_rules import (
    Entry,
    device_conflicts,
    entries,
    num_super_pods,
    super_pod_faults,
    unreachable_hosts,
)
from ranktable_tools.table_types import ROLES, RankTable, server_group
from ranktable_tools.unit_entries import split_units, unit_faults

MERGED_NAME = "global_ranktable_merge.json"


def merge(
    paths: Sequence[Path],
    note: Callable[[str], None] = lambda _: None,
    unit_sizes: Mapping[str, int] = MappingProxyType({}),
) -> RankTable:
    """Merges tables. Groups are in the order 0, 1, 2, and instances in the order of `paths`.

    Two files may describe one host unless a device is in both. `note` gets a line for each foreign field with different
    values in two files, and for each host whose units are split by this order (`unit_sizes`: role -> instances per
    unit). Raises RankTableError that names the file and the field.
    """
    if not paths:
        raise RankTableError("merge", "--global-ranktable-list", "no file", "at least one global table")
    _refuse_same_file(paths)
    tables = [load_global(path) for path in paths]
    found = [entry for table in tables for entry in entries(table)]
    _refuse_wrong_schedulers(found, paths)
    pods = sum(map(num_super_pods, tables))
    for fault in (*device_conflicts(found), *unreachable_hosts(found), *super_pod_faults(found, pods)):
        raise fault.error()
    groups = []
    for at, role in enumerate(ROLES):
        servers = tuple(entry.server for entry in found if entry.role == role)
        extra = together([(table.file, table.server_group_list[at].extra) for table in tables], note)
        groups.append(server_group(role, servers, extra))
    extra = together([(table.file, table.extra) for table in tables], note)
    merged = RankTable(max(table.version for table in tables), "completed", tuple(groups), extra=extra)
    for fault in unit_faults(merged, unit_sizes):
        raise replace(fault, file="merge").error()
    for line in split_units(found, unit_sizes):
        note(line)
    return merged


def _refuse_same_file(paths: Sequence[Path]) -> None:
    seen: set[str] = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise RankTableError(str(path), "(file)", "given twice", "each file once")
        seen.add(real)


def _refuse_wrong_schedulers(found: Sequence[Entry], paths: Sequence[Path]) -> None:
    schedulers = [entry for entry in found if entry.role == "scheduler"]
    if not schedulers:
        raise RankTableError(
            ", ".join(map(str, paths)),
            "server_group_list[0].server_list",
            "no scheduler",
            "exactly one scheduler in all the files together",
            "run gen with --api-server on one machine",
        )
    if len(schedulers) > 1:
        first, second = schedulers[:2]
        expected = f"one scheduler in all the files together ({first.file} {first.field} already has one)"
        way_out = "run gen with --api-server on one machine only"
        raise RankTableError(second.file, second.field, second.server.server_ip, expected, way_out)
