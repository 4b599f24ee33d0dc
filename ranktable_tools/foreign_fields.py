"""Lists fields that other programs write into rank tables, and combines them when tables are merged.

`super_pod_list`, `host_nic_ip` and `deploy_server` are such fields. Knows nothing of their meaning, except that super
pods with the same id on several machines are one super pod.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from ranktable_tools.table_types import RankTable

_NAMED_BY: Final = {"super_pod_list": "super_pod_id"}  # a list of objects -> the key that identifies them


class _Differ(Exception):
    """Two values of one field cannot be combined."""


def foreign_fields(table: RankTable) -> Iterator[tuple[str, object]]:
    """Yields the path and value of each foreign field, beginning with the top level of the table."""
    yield from table.extra.items()
    for at, group in enumerate(table.server_group_list):
        place = f"server_group_list[{at}]"
        yield from _under(place, group.extra)
        for index, server in enumerate(group.server_list):
            where = f"{place}.server_list[{index}]"
            yield from _under(where, server.extra)
            for rank, device in enumerate(server.device):
                yield from _under(f"{where}.device[{rank}]", device.extra)


def together(extras: Sequence[tuple[str, Mapping[str, object]]], note: Callable[[str], None]) -> dict[str, object]:
    """Combines the fields of several tables: objects and arrays are joined, and equal values are written once.

    `extras`: (file's name, its fields). If two values differ, the first file's value is kept, and `note` gets a line.
    """
    found: dict[str, object] = {}
    sources: dict[str, str] = {}
    for file, extra in extras:
        for key, value in extra.items():
            if key not in found:
                found[key], sources[key] = value, file
                continue
            try:
                found[key] = _joined(key, found[key], value)
            except _Differ:
                note(f"{file}: {key}: differs from the value of {sources[key]}, which is kept")
    return found


def _under(place: str, extra: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in extra.items():
        yield f"{place}.{key}", value


def _joined(key: str, ours: object, theirs: object) -> object:
    """Joins both values. Raises _Differ if only one of them can be kept."""
    if ours == theirs:
        return ours
    if isinstance(ours, list) and isinstance(theirs, list):
        return _joined_lists(_NAMED_BY.get(key), ours, theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        both = {name: _joined(name, ours[name], theirs[name]) for name in ours if name in theirs}
        return {**ours, **theirs, **both}
    raise _Differ


def _joined_lists(name: str | None, ours: list[object], theirs: list[object]) -> list[object]:
    found = list(ours)
    for value in theirs:
        same = _with_id(found, name, value)
        try:
            if same is None:
                raise _Differ
            found[same] = _joined("", found[same], value)
        except _Differ:
            if value not in found:
                found.append(value)
    return found


def _with_id(values: Sequence[object], name: str | None, wanted: object) -> int | None:
    """Returns the index of the object with the same id as `wanted`, or None."""
    if name is None or not isinstance(wanted, dict) or name not in wanted:
        return None
    ids = [value.get(name) if isinstance(value, dict) else None for value in values]
    return ids.index(wanted[name]) if wanted[name] in ids else None
