"""Files between `benchmarks router` and its children: one JSON file each way, written at the end.

Knows nothing of goals or figures; imports no torch.
"""

from __future__ import annotations

import msgspec

from pd_cluster.settings.config import Credentials
from pd_cluster.types import Role

STEP_S = 0.02  # per made-up decode step
PREFILL_STEP_S = 0.002  # a made-up prompt takes one of these
TEXT = (
    "The harbour was quiet in the early morning, and the fishing boats lay side by side along the wall. A man in a "
    "blue coat counted the crates on the quay, wrote a number into his book, and counted them again. "
)


class MadeUpWorker(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: Role
    port: int  # for HTTP
    device_ids: list[str]


class WorkersSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Workers in one process; they end when their standard input does, and then write `times_file`.

    `times_file`: a JSON object, a request's seed -> [when its prompt was read, when its first token was sent].
    """

    workers: list[MadeUpWorker]
    times_file: str
    step_s: float
    token_ids: list[int]  # their output, repeated
    text: str  # the same as text
    model_path: str
    credentials: Credentials = Credentials(b"")
    model_identity: str = ""
    max_model_len: int = 0
    prefill_tokens_per_s: float = 1e6  # reported, and kept to by paced ones
    max_num_seqs: int = 0  # for paced ones
    prefill_step_s: float = PREFILL_STEP_S


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`num_requests` streamed chats of `num_tokens` output tokens.

    Without a rate, `num_open` run at a time, each followed by another; with one, they arrive at random times at that
    rate per second. With `hold` all `num_open` stay open until each has its first token, and are then abandoned.
    """

    name: str
    num_requests: int
    num_tokens: int
    num_open: int
    rate_per_s: float = 0.0
    hold: bool = False

    @property
    def all_tokens(self) -> int:
        return self.num_requests * self.num_tokens


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`pid`: the router's process, whose CPU time and memory, with its children's, are read around the load.

    `others`: ports and processes of further schedulers; connections take turns, and CPU times are added.
    """

    port: int
    pid: int
    others: list[tuple[int, int]] = []
    model: str
    workload: Workload
    first_seed: int
    deadline_s: float


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """`times_s`: a request's seed -> [when it was sent, when the first event came], by the monotonic clock."""

    took_s: float
    cpu_s: float  # the router's
    own_cpu_s: float  # the load generator's
    num_done: int
    num_events: int
    errors: list[str]
    times_s: dict[int, tuple[float, float]]
    gaps_s: list[float]  # between arrivals of one stream, for a sample of streams
    waited_s: float  # time that the router was ready to run but had no core
    rss_before_nbytes: int
    rss_after_nbytes: int  # with all streams open, if they are held


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """CPU time by place, in microseconds."""

    num_samples: int
    layers: dict[str, int]
    functions: dict[str, int]
