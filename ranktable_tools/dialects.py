"""Refuses other programs' rank tables, with errors that name the program and a remedy. A table's layout identifies the
program, because programs use the same file names.

Sources: Ascend HCCL cluster information (`server_list`, and `group_list` before it), vllm-ascend's
`prefill_device_list`, omni-infer's merged tables (integer counts, one group per prefill instance), MindIE's
(coordinator, controller, servers).
"""

from __future__ import annotations

from typing import Final

from ranktable_tools.errors import RankTableError
from ranktable_tools.json_object import JsonObject

GLOBAL: Final = "a global rank table: three groups, scheduler, prefill, decode"
LOCAL: Final = "a local rank table: one instance"
GEN: Final = "write one with `pd-ranktable gen --prefill-server-list … --decode-server-list … --api-server`"
NO_PREFILL_DEVICE: Final = "in a MindIE table group 1 is the controller; " + GEN
_USE_GLOBAL: Final = "GLOBAL_RANK_TABLE_FILE_PATH takes global_ranktable_*.json, RANK_TABLE_FILE_PATH a local one"


def refuse_foreign_global(top: JsonObject) -> None:
    """Raises RankTableError if `top` is another program's table, or a local table."""
    keys = top.members
    if "server_group_list" not in keys:
        if "group_id" in keys and "server_list" in keys:
            raise _named(top, "server_list", "a local rank table", GLOBAL, _USE_GLOBAL)
        _refuse_flat(top, GLOBAL)
    groups = keys.get("server_group_list")
    if not isinstance(groups, list):
        return
    for index, group in enumerate(groups):
        count = group.get("server_count") if isinstance(group, dict) else None
        if type(count) is int:
            field = f"server_group_list[{index}].server_count"
            raise _named(top, field, count, "a count written as a string (omni-infer writes integers)", GEN)
    if len(groups) > 3 and not any(map(_has_devices, groups[:2])):
        name = "a MindIE table (group 0 coordinator, 1 controller, 2 and up servers)"
        raise _named(top, "server_group_list", name, GLOBAL, GEN)


def refuse_foreign_local(top: JsonObject) -> None:
    """Raises RankTableError if `top` is another program's table, or a global table."""
    if "server_group_list" in top.members:
        raise _named(top, "server_group_list", "a global rank table", LOCAL, _USE_GLOBAL)
    if "group_id" not in top.members:
        _refuse_flat(top, LOCAL)


def _refuse_flat(top: JsonObject, wanted: str) -> None:
    keys = top.members
    for key in ("prefill_device_list", "decode_device_list"):
        if key in keys:
            raise _named(top, key, "a vllm-ascend table with flat device lists", wanted, GEN)
    if "super_pod_list" in keys:
        raise _named(top, "super_pod_list", "an HCCL table of one job, version 1.2", wanted, GEN)
    if "group_list" in keys:
        raise _named(top, "group_list", "an HCCL table of the old group_list form", wanted, GEN)
    if "server_list" in keys:
        raise _named(top, "server_list", "an HCCL table of one job", wanted, GEN)


def _has_devices(group: object) -> bool:
    servers = group.get("server_list") if isinstance(group, dict) else None
    return isinstance(servers, list) and any(isinstance(one, dict) and "device" in one for one in servers)


def _named(top: JsonObject, field: str, value: object, wanted: str, way_out: str) -> RankTableError:
    return RankTableError(top.file, field, value, wanted, way_out)
