"""Shares steps among prompts: chunks shrink as attention to their contexts takes longer, and long prompts give way.

Pure arithmetic. Output does not depend on the sizes of chunks, so measured times may determine them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

from pd_cluster.costs.linear_costs import StepCost, num_pairs_of
from pd_cluster.types import Request

LONG_STEPS = 8  # a prompt that fills more steps than this is long
OTHERS_SHARE = 0.75  # the share of a step that shorter prompts may take
MOST_SHARE = 0.75  # the most time for prompts if one is long, as a share of the time of a full step without context
LEAST_CHUNK = 32  # tokens; with smaller chunks, a step's fixed cost would dominate


def long_prompt_from(max_num_batched_tokens: int) -> int:
    """Returns the number of tokens above which a prompt is long."""
    return LONG_STEPS * max_num_batched_tokens


class GivingWay(NamedTuple):
    """`later`: the requests whose chunks come after the others'.

    `num_tokens`: how much of the step the others may take. `priority`: the lowest priority of requests that may enter
    before `later`.
    """

    later: list[Request]
    num_tokens: int
    priority: int


class StepShare:
    """`cost` returns the measured cost of steps. Chunks do not shrink until the cost of attention is measured."""

    def __init__(self, max_num_batched_tokens: int, block_size: int, cost: Callable[[], StepCost]) -> None:
        self._most, self._block_size, self._cost = max_num_batched_tokens, block_size, cost
        self._long_from = long_prompt_from(max_num_batched_tokens)

    def giving_way(self, due: Sequence[Request], waiting: Request | None, least: int) -> GivingWay | None:
        """Returns which prompts give way to shorter ones in this step; None if none does.

        Shorter prompts get at most OTHERS_SHARE of the tokens that decodes leave in the step; a long prompt gets the
        rest. `due`: running requests, decodes first. `least`: the least share if one of the shorter prompts is pooled.
        """
        prompts = list(takewhile(lambda request: request.num_behind > 1, reversed(due)))
        long = [request for request in prompts if request.num_tokens > self._long_from]
        if not long:
            return None
        priority = min(request.priority for request in long)
        first = [each for each in prompts if each.num_tokens <= self._long_from and each.priority <= priority]
        if not first and (waiting is None or waiting.priority > priority):
            return None
        num_decodes = len(due) - len(prompts)
        share = int((self._most - num_decodes) * OTHERS_SHARE)
        if any(each.pooling is not None for each in [*first, waiting] if each is not None):
            share = max(share, least)
        later = [each for each in prompts[::-1] if each not in first]
        return GivingWay(later, min(num_decodes + share, self._most), priority)

    def limited(self, chunks: Sequence[tuple[Request, int]], request: Request, num_tokens: int) -> int:
        """Returns how many of `num_tokens` the step can add to its chunks without taking much longer than usual.

        Only long prompts are limited, and only after their first whole step.
        """
        num_before = request.num_computed_tokens
        if num_tokens <= LEAST_CHUNK or request.num_tokens <= self._long_from or num_before < self._most:
            return num_tokens
        cost = self._cost()
        token_s, pair_s = cost.prompt_token_s, cost.prompt_pair_s
        if not pair_s:
            return num_tokens
        left_s = MOST_SHARE * (token_s * self._most + pair_s * num_pairs_of(self._most, 0))
        for other, number in chunks:
            if number > 1:
                left_s -= token_s * number + pair_s * num_pairs_of(number, other.num_computed_tokens)
        # The time of n tokens: pair_s / 2 x n^2 + linear_s x n.
        linear_s = token_s + pair_s * (num_before + 0.5)
        most = (math.sqrt(linear_s**2 + 2 * pair_s * max(0.0, left_s)) - linear_s) / pair_s
        whole = int(most) // self._block_size * self._block_size
        return min(num_tokens, max(LEAST_CHUNK, whole))
