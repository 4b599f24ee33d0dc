"""Messages between processes that do not go through the mailbox, as JSON.

A worker describes itself over HTTP, a rank process reports to its parent, and the scheduler and its API processes
report to each other.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pd_cluster.numerics import Numerics
from pd_cluster.types import Role
from pd_cluster.wire import MAX_GROUPS, LayoutInfo, PublicKey, ShortText

InstanceState = Literal["unreachable", "loading", "forming", "connecting", "ready", "failed"]
Service = Literal["in", "out", "leaving"]
Layouts = Annotated[list[LayoutInfo], msgspec.Meta(max_length=MAX_GROUPS)]
Gate = Literal["open", "paused", "asleep"]  # new requests begin, wait or are refused


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a worker. It has ports, but no host: hosts always come from the rank table.

    Anyone may read it, so no field is derived from the cluster's secret. `public_key` is trusted once the worker has
    authenticated over a connection with that key.
    """

    name: str
    role: Role
    state: Literal["loading", "forming", "ready", "failed"]
    server_ip: str
    device_ids: list[str]
    epoch: int
    pid: int
    rank_pids: list[int] = []  # pids of the started ranks, by rank
    control_port: int = 0
    public_key: PublicKey = b""
    model_identity: str = ""
    numerics: Numerics = Numerics()
    max_model_len: int = 0
    layout: LayoutInfo | None = None  # of the first group of layers
    num_blocks: int = 0  # likewise
    further_layouts: Layouts = []  # of the other groups
    max_num_seqs: int = 0  # sequences in one step
    max_num_batched_tokens: int = 0  # tokens in one step; 0: unknown
    tp_size: int = 1
    unit: ShortText = ""  # the group of instances that compute experts together; "": none
    unit_rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    unit_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    error: str = ""

    @property
    def layouts(self) -> list[LayoutInfo]:
        """Returns the layouts of all groups of layers; empty before the worker has them."""
        return [] if self.layout is None else [self.layout, *self.further_layouts]


class RankReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank process's reports to its parent, one JSON line each."""

    state: Literal["forming", "ready", "failed"]
    error: str = ""  # with settings as errors.called marks them
    lost: str = ""  # the lost rank that made this rank end, if any
    control_port: int = 0
    public_key: PublicKey = b""
    model_identity: str = ""
    numerics: Numerics = Numerics()
    max_model_len: int = 0
    max_num_seqs: int = 0  # memory for recurrent states may allow fewer than the settings ask for
    max_num_batched_tokens: int = 0
    layout: LayoutInfo | None = None  # of the first group of layers
    num_blocks: int = 0  # likewise
    further_layouts: Layouts = []  # of the other groups


class InstanceView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The scheduler's view of an instance, which it sends to its API processes."""

    name: str
    role: Role
    host: str
    port: int
    device_ids: list[str]
    state: InstanceState
    reason: str = ""
    service: Service = "in"
    next_role: Role | None = None
    info: InstanceInfo | None = None


class Instances(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: all instances, in the order of the table; sent when one has changed."""

    views: list[InstanceView]


class OthersTokens(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: tokens of unfinished work that the other API processes have sent, by instance."""

    tokens: dict[str, int]


class Buckets(msgspec.Struct, frozen=True, array_like=True):
    """A histogram: how many values fell into each bucket, and their sum in millionths.

    All are integers, so that rounding never makes a total of several processes shrink, in whatever order they are
    added.
    """

    counts: list[int]
    total_e6: int


class Stats(msgspec.Struct, frozen=True):
    """All counts of a process since its start, by the names of cluster/records/request_stats.py."""

    counters: dict[str, int] = {}
    histograms: dict[str, Buckets] = {}


class Busy(msgspec.Struct, frozen=True, array_like=True):
    """The current work of a process."""

    num_requests: int = 0  # over HTTP, from the first byte to the last
    num_streams: int = 0  # routed requests
    num_waiting: int = 0  # requests that wait to be routed
    num_waiting_tokens: int = 0  # tokens of waiting prompts and their expected answers
    num_batch_lines: int = 0  # lines of batches that are being answered


class AdapterUse(msgspec.Struct, frozen=True, array_like=True):
    """Digests of the adapters of requests that have their first token, and of requests that wait for it."""

    running: list[str] = []
    waiting: list[str] = []


class AllStats(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: the counts of all API processes, including those that have ended."""

    stats: Stats
    others: Busy  # all except the receiver
    num_api_processes: int
    adapters: AdapterUse = AdapterUse()  # the other processes' adapters


class OthersBusy(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: the other processes' current work, which replaces the work in the last AllStats."""

    busy: Busy


class MoveOn(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: requests on this instance continue elsewhere."""

    name: str
    why: str


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key of --api-key-file. `digest`: HMAC-SHA256 of the key under the file's salt, in hexadecimal.

    `models` None: all served models. Limits are integers per minute; 0: no limit. `expires_s` is Unix time.
    """

    id: str
    digest: str
    tenant: str
    models: tuple[str, ...] | None = None
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    expires_s: float | None = None

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)


class Keys(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: all keys of --api-key-file from now on.

    `slots`: each key's record in the shared memory of limits. `tenants`: the tenants that metrics show by name.
    """

    salt: str
    keys: list[ApiKey]
    slots: list[int]
    tenants: list[str]


class AdapterNames(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: the adapters that requests may name, with their digests; `version` grows."""

    names: dict[str, str]
    version: int


class PauseUpdate(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: what happens to new requests, and which requests to end now; `version` grows.

    `aborts`: client-visible names of requests to end; empty: all; None: none. `keeps`: running requests leave their
    instances until the gate is open.
    """

    gate: Gate = "open"
    version: int = 0
    aborts: list[str] | None = None
    keeps: bool = False


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Scheduler to API process: drain, but keep running; a second Stop ends the process at once."""


ToApi = Instances | OthersTokens | AllStats | OthersBusy | MoveOn | Keys | AdapterNames | PauseUpdate | Stop


class Outstanding(msgspec.Struct, frozen=True, array_like=True):
    num_legs: int
    num_tokens: int


class ApiReport(msgspec.Struct, frozen=True):
    """API process to scheduler: unfinished work that it has sent, by instance.

    `is_idle`: the process has received Stop and serves no request. `stats` None: unchanged since the last report.
    """

    outstanding: dict[str, Outstanding]
    is_idle: bool = False
    busy: Busy = Busy()
    stats: Stats | None = None
    adapters: AdapterUse = AdapterUse()
    adapters_version: int = 0  # the version of the last AdapterNames
    pause_version: int = 0  # the version of the last PauseUpdate


# ---- scheduler -> the process that receives a trainer's tensors


class JoinTrainer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Joins the torch.distributed group of `world_size` ranks whose rank 0 sends weights."""

    backend: Literal["gloo", "nccl", "hccl"]
    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float


class SentTensor(msgspec.Struct, frozen=True, array_like=True):
    """`dtype`: torch's name for it."""

    name: str
    dtype: str
    shape: list[int]


class ReceiveTensors(msgspec.Struct, frozen=True, tag=True):
    """Receives these tensors in this order, and writes them to a safetensors file."""

    tensors: list[SentTensor]
    path: str


ToReceiver = JoinTrainer | ReceiveTensors


class Received(msgspec.Struct, frozen=True):
    """The answer to JoinTrainer and to ReceiveTensors. `problem`: "" if there was none."""

    problem: str
