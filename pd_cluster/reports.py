"""What processes say to each other outside of the mailbox, as JSON.

A worker of itself over HTTP, its rank process to its parent, and the scheduler and its API processes to each other.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pd_cluster.numerics import Numerics
from pd_cluster.types import Role
from pd_cluster.wire import LayoutInfo, PublicKey


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a worker. Ports only: hosts always come from the rank table.

    Everybody may read it, so nothing here follows from the cluster's secret; `public_key` is believed once the worker
    has proven itself over a connection to it.
    """

    name: str
    role: Role
    state: Literal["loading", "ready", "failed", "draining"]
    server_ip: str
    device_ids: list[str]
    epoch: int
    pid: int
    rank_pids: list[int] = []  # in the order of the ranks, as far as they are started
    control_port: int = 0
    public_key: PublicKey = b""
    model_identity: str = ""
    numerics: Numerics = Numerics()
    max_model_len: int = 0
    layout: LayoutInfo | None = None
    num_blocks: int = 0
    tp_size: int = 1
    error: str = ""


class RankReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a rank process tells its parent, one JSON line each."""

    state: Literal["ready", "failed"]
    error: str = ""
    lost: str = ""  # which other rank was lost, when that is why it ends
    control_port: int = 0
    public_key: PublicKey = b""
    model_identity: str = ""
    numerics: Numerics = Numerics()
    max_model_len: int = 0
    layout: LayoutInfo | None = None
    num_blocks: int = 0


class InstanceView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An instance as the scheduler knows it, for its API processes."""

    name: str
    role: Role
    host: str
    port: int
    device_ids: list[str]
    state: Literal["unreachable", "loading", "connecting", "ready", "failed", "misplaced"]
    reason: str = ""
    service: Literal["in", "out", "leaving"] = "in"
    next_role: Role | None = None
    info: InstanceInfo | None = None


class Instances(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: all instances, in the order of the table; whenever one has changed."""

    views: list[InstanceView]


class OthersTokens(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: tokens of work that the other API processes have sent, by instance."""

    tokens: dict[str, int]


class Buckets(msgspec.Struct, frozen=True, array_like=True):
    """A histogram: how many values fell into each bucket, and their sum in millionths.

    Whole numbers, so that a total of several processes never shrinks by a rounding, in whatever order it is added up.
    """

    counts: list[int]
    total_e6: int


class Stats(msgspec.Struct, frozen=True):
    """What a process has counted since it began, by the names of cluster/stats.py."""

    counters: dict[str, int] = {}
    histograms: dict[str, Buckets] = {}


class Busy(msgspec.Struct, frozen=True, array_like=True):
    """What a process serves right now."""

    num_requests: int = 0  # over HTTP, from first byte to last
    num_streams: int = 0  # that have been routed


class AllStats(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: what all API processes have counted, those that have ended included."""

    stats: Stats
    others: Busy  # all but the receiver
    num_api_processes: int


class MoveOn(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: what runs on this instance goes on elsewhere."""

    name: str
    why: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: drain, and stay until it is said again; then end at once."""


ToApi = Instances | OthersTokens | AllStats | MoveOn | Stop


class Outstanding(msgspec.Struct, frozen=True, array_like=True):
    num_legs: int
    num_tokens: int


class ApiReport(msgspec.Struct, frozen=True):
    """API process to scheduler: what it has sent and not seen finished, by instance.

    `is_idle`: it was told to stop, and serves nothing any more. `stats` None: as last reported.
    """

    outstanding: dict[str, Outstanding]
    is_idle: bool = False
    busy: Busy = Busy()
    stats: Stats | None = None
