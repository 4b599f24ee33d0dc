"""JSON files between `router` or `overload` and their child processes, one in each direction. Imports no torch."""

from __future__ import annotations

import msgspec

from pd_cluster.settings.process_configs import Credentials
from pd_cluster.types import Role

STEP_S = 0.02  # duration of a simulated decode step
PREFILL_STEP_S = 0.002  # duration of a simulated prompt's only step
TEXT = (
    "The harbour was quiet in the early morning, and the fishing boats lay side by side along the wall. A man in a "
    "blue coat counted the crates on the quay, wrote a number into his book, and counted them again. "
)


class MadeUpWorker(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: Role
    port: int  # the HTTP port
    device_ids: list[str]


class WorkersSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Workers in one process, which ends when its standard input ends."""

    workers: list[MadeUpWorker]
    step_s: float
    token_ids: list[int]  # the workers' output, which is repeated
    credentials: Credentials
    model_identity: str
    max_model_len: int
    prefill_tokens_per_s: float = 1e6
    max_num_seqs: int = 1 << 20
    prefill_step_s: float = PREFILL_STEP_S


class RouterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`num_requests` streamed chats of `num_tokens` output tokens.

    Without a rate, `num_open` run at a time, and another one starts when one ends. With a rate per second, they arrive
    at random times. If `is_held`, `num_open` requests stay open until each has its first token, and are then abandoned.
    """

    name: str
    num_requests: int
    num_tokens: int
    num_open: int
    rate_per_s: float = 0.0
    is_held: bool = False


class LoadSpec(msgspec.Struct, frozen=True):
    """`pid`: the scheduler. Its CPU time and memory, and its child processes', are read before and after the load."""

    port: int
    pid: int
    model: str
    load: RouterLoad
    first_seed: int
    deadline_s: float


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    took_s: float
    cpu_s: float  # CPU seconds of the scheduler
    own_cpu_s: float  # CPU seconds of the load generator
    num_done: int
    errors: list[str]
    gaps_s: list[float]  # times between arrivals of one stream, for a sample of streams
    waited_s: float  # time that the scheduler was ready to run but had no core
    rss_before_nbytes: int
    rss_after_nbytes: int  # memory while all streams are open, if they are held
