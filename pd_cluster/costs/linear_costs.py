"""Seconds of a step, a handover, the host and a neighbour, as linear terms. Pure arithmetic.

`pd-cluster profile` fits them to real steps and writes them to a file; `pd-cluster simulate`, `plan` and roles by cost
read them.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class StepWork(NamedTuple):
    """The integers of a step that its time depends on."""

    num_rows: int = 0  # sequences that decode: one token each
    num_context_tokens: int = 0  # that these attend to, in all
    num_prompt_tokens: int = 0  # computed of prompts
    num_prompt_pairs: int = 0  # of a prompt's token with one before it: tokens x context, summed over chunks


def num_pairs_of(num_tokens: int, num_before: int) -> int:
    """Returns how many pairs so many tokens of a prompt have with themselves and with `num_before` tokens."""
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2


class StepCost(msgspec.Struct, frozen=True, array_like=True):
    """The time of a step: a + b x rows + c x context + d x prompt tokens + e x pairs.

    Rows are flat, then rising: the first `num_flat_rows` cost nothing more than the step itself.
    """

    step_s: Seconds = 0.0  # a
    row_s: Seconds = 0.0  # b
    context_token_s: Seconds = 0.0  # c
    prompt_token_s: Seconds = 0.0  # d
    prompt_pair_s: Seconds = 0.0  # e
    num_flat_rows: Annotated[int, msgspec.Meta(ge=0)] = 0

    def seconds(self, work: StepWork) -> float:
        """Returns 0 for no work."""
        if not work.num_rows and not work.num_prompt_tokens:
            return 0.0
        return (
            self.step_s
            + self.row_s * max(0, work.num_rows - self.num_flat_rows)
            + self.context_token_s * work.num_context_tokens
            + self.prompt_token_s * work.num_prompt_tokens
            + self.prompt_pair_s * work.num_prompt_pairs
        )


class HandoverCost(msgspec.Struct, frozen=True, array_like=True):
    """The time of a handover after its prompt's last step: a setup, and the bytes that are still to go."""

    setup_s: Seconds = 0.0
    byte_s: Seconds = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.setup_s + nbytes * self.byte_s


class HostCost(msgspec.Struct, frozen=True, array_like=True):
    """The host's time beside the device's: of an instance's step, of the scheduler's request and message."""

    step_s: Seconds = 0.0
    request_s: Seconds = 0.0
    message_s: Seconds = 0.0


Factor = Annotated[float, msgspec.Meta(ge=0.1, le=100.0)]


class NeighbourCost(msgspec.Struct, frozen=True, array_like=True):
    """By how much a step slows while an instance of the other role computes on the same host; 1: not at all.

    `num_cores`: of that host, 0 where it is not known. More instances than cores share them.
    """

    decode_beside_prefill: Factor = 1.0
    prefill_beside_decode: Factor = 1.0
    num_cores: Annotated[int, msgspec.Meta(ge=0)] = 0

    def factor(self, is_prefill: bool, num_computing: int) -> float:
        """Returns by how much a step of this role slows where so many instances compute, itself included.

        A neighbour of the same role counts as one of the other: it takes its cores back, too.
        """
        if num_computing < 2:
            return 1.0
        crowd = max(1.0, num_computing / max(2, self.num_cores)) if self.num_cores else 1.0
        return crowd * (self.prefill_beside_decode if is_prefill else self.decode_beside_prefill)


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The costs of one model on one kind of device. `source`: the command that measured it, or "computed"."""

    model: str
    device: str
    source: str
    step: StepCost
    handover: HandoverCost = HandoverCost()
    host: HostCost = HostCost()
    neighbour: NeighbourCost = NeighbourCost()
    kv_token_nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0  # of the KV cache, all layers, one device of an instance
    num_blocks: Annotated[int, msgspec.Meta(ge=1)] = 4096  # of an instance's pool
    block_size: Annotated[int, msgspec.Meta(ge=1)] = 16
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1)] = 256
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    error: dict[str, float] = {}  # of the fit, by what was fitted: the mean of |predicted - measured| / measured

    @property
    def is_measured(self) -> bool:
        return self.source != "computed"
