"""Linear costs of steps, handovers, the host and neighbours, in seconds. Pure arithmetic.

`pd-cluster profile` fits these costs to real steps and writes them to a file. `pd-cluster simulate`, `plan` and
cost-based roles read them.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class StepWork(NamedTuple):
    """The work of a step, which determines its time."""

    num_rows: int = 0  # decoding sequences; each computes one token
    num_context_tokens: int = 0  # the number of tokens to which these attend, in total
    num_prompt_tokens: int = 0  # prompt tokens that are computed
    num_prompt_pairs: int = 0  # pairs of a prompt token and a token it attends to, summed over chunks

    def num_rows_beyond(self, num_flat_rows: int) -> int:
        return max(0, self.num_rows - num_flat_rows)

    def num_prompt_tokens_beyond(self, num_flat_rows: int) -> int:
        """Counts the prompt tokens that are not free. Those in place of rows missing from `num_flat_rows` are free."""
        return max(0, self.num_prompt_tokens - max(0, num_flat_rows - self.num_rows))


def num_pairs_of(num_tokens: int, num_before: int) -> int:
    """Returns the number of pairs of a chunk's tokens with each other and with `num_before` earlier tokens."""
    return num_tokens * num_before + num_tokens * (num_tokens + 1) // 2


class StepCost(msgspec.Struct, frozen=True, array_like=True):
    """The time of a step: a + b * rows + c * context + d * prompt tokens + e * pairs.

    The first `num_flat_rows` rows cost nothing beyond the step itself, which reads the weights for any number of them.
    If there are fewer rows, prompt tokens in the place of the missing rows cost nothing, too.
    """

    step_s: Seconds = 0.0  # a
    row_s: Seconds = 0.0  # b
    context_token_s: Seconds = 0.0  # c
    prompt_token_s: Seconds = 0.0  # d
    prompt_pair_s: Seconds = 0.0  # e
    num_flat_rows: Annotated[int, msgspec.Meta(ge=0)] = 0

    def seconds(self, work: StepWork) -> float:
        """Returns the time of a step; 0 if it has no work."""
        if not work.num_rows and not work.num_prompt_tokens:
            return 0.0
        return (
            self.step_s
            + self.row_s * work.num_rows_beyond(self.num_flat_rows)
            + self.context_token_s * work.num_context_tokens
            + self.prompt_token_s * work.num_prompt_tokens_beyond(self.num_flat_rows)
            + self.prompt_pair_s * work.num_prompt_pairs
        )


class HandoverCost(msgspec.Struct, frozen=True, array_like=True):
    """The time of a handover after its prompt's last step: a setup, and the bytes that remain to be sent."""

    setup_s: Seconds = 0.0
    byte_s: Seconds = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.setup_s + nbytes * self.byte_s


class HostCost(msgspec.Struct, frozen=True, array_like=True):
    """The host's own time: per step of an instance, and per request and per message of the scheduler."""

    step_s: Seconds = 0.0
    request_s: Seconds = 0.0
    message_s: Seconds = 0.0


Factor = Annotated[float, msgspec.Meta(ge=0.1, le=100.0)]


class NeighbourCost(msgspec.Struct, frozen=True, array_like=True):
    """The factors by which a step takes longer while an instance of the other role computes on the host; 1: no effect.

    `num_cores`: the cores of the host; 0: unknown. If more instances compute than that, they share the cores.
    """

    decode_beside_prefill: Factor = 1.0
    prefill_beside_decode: Factor = 1.0
    num_cores: Annotated[int, msgspec.Meta(ge=0)] = 0

    def factor(self, is_prefill: bool, num_computing: int) -> float:
        """Returns the factor by which a step of this role takes longer while this many instances compute.

        `num_computing` includes the step's own instance.

        A neighbour of the same role counts like one of the other role, because it, too, stops lending its cores.
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
    kv_token_nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0  # bytes of a token in all layers, on one device
    num_blocks: Annotated[int, msgspec.Meta(ge=1)] = 4096  # blocks of an instance's pool
    block_size: Annotated[int, msgspec.Meta(ge=1)] = 16
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1)] = 256
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1)] = 2048
    error: dict[str, float] = {}  # fit -> the mean of |predicted - measured| / measured

    @property
    def is_measured(self) -> bool:
        return self.source != "computed"
