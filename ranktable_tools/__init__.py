"""Rank tables, the JSON files that assign devices to the instances of a cluster.

`generate` and `merge` write them, `load_global`, `load_local` and `locate` read them, `check` finds their faults. Needs
only the standard library (and for keys also pyzmq or `openssl`), but no module of pd_cluster.
"""

from ranktable_tools.check import check, permission_warnings
from ranktable_tools.gen import Generated, generate, write
from ranktable_tools.merge import merge
from ranktable_tools.ports import parse_node_ports
from ranktable_tools.schema import (
    Device,
    Fault,
    LocalRankTable,
    RankTable,
    RankTableError,
    Role,
    Server,
    ServerGroup,
    load_global,
    load_local,
    locate,
    read_bytes,
)

__all__ = [
    "Device",
    "Fault",
    "Generated",
    "LocalRankTable",
    "RankTable",
    "RankTableError",
    "Role",
    "Server",
    "ServerGroup",
    "check",
    "generate",
    "load_global",
    "load_local",
    "locate",
    "merge",
    "parse_node_ports",
    "permission_warnings",
    "read_bytes",
    "write",
]
