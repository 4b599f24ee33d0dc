"""Messages, as JSON lines, between `pd-cluster profile` and the engine processes that it measures."""

from __future__ import annotations

import msgspec

from pd_cluster.costs.linear_costs import StepWork


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Steps to run: `num_rows` decoding sequences with `num_context` tokens of context each, and prompts one by one.

    The steps end after `num_steps` or `seconds`, but a prompt that has begun is completed.
    """

    num_rows: int = 0
    num_context: int = 0
    num_prompt_tokens: int = 0  # length of each prompt
    num_steps: int = 1
    seconds: float = 60.0


class TimedStep(msgspec.Struct, frozen=True, array_like=True):
    """`began_s`: the time by the monotonic clock, which all processes of a host share."""

    began_s: float
    took_s: float
    work: StepWork


class EngineReady(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's actual sizes. `error`: why there is no engine."""

    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    num_blocks: int = 0
    block_size: int = 1
    kv_token_nbytes: int = 0
    device: str = ""  # the kind of device
    error: str = ""
