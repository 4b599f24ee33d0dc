"""What `bench router` tells its children and hears from them: one JSON file each way, an exit at the end.

Knows nothing of goals or figures; imports no torch.
"""

from __future__ import annotations

import msgspec

from pd_cluster.config import Credentials
from pd_cluster.types import Role

STEP_S = 0.02  # of a made-up decode step
PREFILL_STEP_S = 0.002  # a made-up prompt is computed within one of these
TEXT = (
    "The harbour was quiet in the early morning, and the fishing boats lay side by side along the wall. A man in a "
    "blue coat counted the crates on the quay, wrote a number into his book, and counted them again. "
)


class MadeUpWorker(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: Role
    port: int  # of its HTTP
    device_ids: list[str]


class WorkersSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are one process together; they end when their standard input does, and write `times_file` then.

    `times_file`: a JSON object, a request's seed -> [when its prompt was read, when its first token was sent].
    """

    workers: list[MadeUpWorker]
    times_file: str
    step_s: float
    token_ids: list[int]  # what they say, over and over
    text: str  # the same
    model_path: str
    credentials: Credentials = Credentials(b"")
    model_identity: str = ""
    max_model_len: int = 0


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """`num_requests` streamed chats of `num_tokens` output tokens.

    Without a rate `num_open` at a time, a new one as soon as one ends; with one, at random times, so many a second.
    With `hold` all of `num_open` stay open until each has its first token, and are left then.
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
    """`pid`: the router's process, whose CPU time and memory are read around the load, its children's included."""

    port: int
    pid: int
    model: str
    workload: Workload
    first_seed: int
    deadline_s: float


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """`times_s`: a request's seed -> [when it was sent, when the first event came], by the monotonic clock."""

    took_s: float
    cpu_s: float  # of the router
    own_cpu_s: float  # of the process that made the load
    num_done: int
    num_events: int
    errors: list[str]
    times_s: dict[int, tuple[float, float]]
    gaps_s: list[float]  # between arrivals of one stream, of a sample of them
    waited_s: float  # the router, ready to run, for one of the cores
    rss_before_nbytes: int
    rss_after_nbytes: int  # with all streams open, when they are held
