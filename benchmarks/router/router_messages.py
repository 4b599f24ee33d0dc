"""Files between `router` or `overload` and their children: one JSON file each way. Imports no torch."""

from __future__ import annotations

import msgspec

from pd_cluster.settings.process_configs import Credentials
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
    """Workers in one process; they end when their standard input does."""

    workers: list[MadeUpWorker]
    step_s: float
    token_ids: list[int]  # their output, repeated
    credentials: Credentials
    model_identity: str
    max_model_len: int
    prefill_tokens_per_s: float = 1e6
    max_num_seqs: int = 1 << 20
    prefill_step_s: float = PREFILL_STEP_S


class RouterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """`num_requests` streamed chats of `num_tokens` output tokens.

    Without a rate, `num_open` run at a time, each followed by another; with one, they arrive at random times at that
    rate per second. If `is_held`, all `num_open` stay open until each has its first token, and are then abandoned.
    """

    name: str
    num_requests: int
    num_tokens: int
    num_open: int
    rate_per_s: float = 0.0
    is_held: bool = False


class LoadSpec(msgspec.Struct, frozen=True):
    """`pid`: the scheduler, whose CPU time and memory, with its children's, are read around the load."""

    port: int
    pid: int
    model: str
    load: RouterLoad
    first_seed: int
    deadline_s: float


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    took_s: float
    cpu_s: float  # the scheduler's
    own_cpu_s: float  # the load generator's
    num_done: int
    errors: list[str]
    gaps_s: list[float]  # between arrivals of one stream, for a sample of streams
    waited_s: float  # time that the scheduler was ready to run but had no core
    rss_before_nbytes: int
    rss_after_nbytes: int  # with all streams open, if they are held
