"""Implements vLLM's generative scoring: probabilities of given tokens after a prompt, among these or all tokens.

Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pd_cluster.errors import RequestError
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.pooling.pooled_prompts import PoolingInput, numbers_of, pooled_generation
from pd_cluster.service.preprocessing.request_limits import check_priority
from pd_cluster.service.prompts.prompt_encoder import PromptEncoder
from pd_cluster.types import PooledOutput, Pooling

ITEMS_A_TURN = 16  # items to prepare before other tasks run


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelInput(PoolingInput):
    """A query and items, texts or token ids, and the tokens to score after each.

    `is_among_all`: probabilities are over the whole vocabulary. `special`: the tokenizer adds its special tokens to
    the query.
    """

    query: str | list[int]
    items: Sequence[str | list[int]]
    token_ids: tuple[int, ...]
    is_among_all: bool = False
    item_first: bool = False
    special: bool = True


class LabelScorer:
    def __init__(self, encoder: PromptEncoder, has_priorities: bool, vocab_size: int) -> None:
        self._encoder, self._has_priorities, self._vocab_size = encoder, has_priorities, vocab_size

    async def generations(self, ask: LabelInput) -> list[Generation]:
        """Prepares a prompt for each item; a prompt that exceeds the context loses its last tokens. Raises
        RequestError.
        """
        check_priority(ask.priority, self._has_priorities)
        pooling = Pooling(kind="logits", token_ids=ask.token_ids, tells_total=ask.is_among_all)
        query = await self._tokens(ask, ask.query, ask.special, "query")
        most, found = self._encoder.limit() - 1, []
        for at, item in enumerate(ask.items):
            own = await self._tokens(ask, item, False, f"items[{at}]")
            prompt = (own + query if ask.item_first else query + own)[:most]
            if not prompt:
                raise RequestError(f"items[{at}]: no tokens, and none in the query", param="items")
            found.append(pooled_generation(ask, prompt, pooling))
            if at % ITEMS_A_TURN == ITEMS_A_TURN - 1:
                await asyncio.sleep(0)
        return found

    async def _tokens(self, ask: LabelInput, given: str | list[int], special: bool, place: str) -> list[int]:
        """Returns a text's token ids, or given ids. Raises RequestError."""
        param = place.partition("[")[0]
        if isinstance(given, str):
            (found,) = await self._encoder.encode([given], special, True, param, ask.caller)
            return found
        if min(given, default=0) < 0 or max(given, default=0) >= self._vocab_size:
            raise RequestError(f"{place}: token ids must be in 0 to {self._vocab_size - 1}", param=param)
        return given

    def probabilities(self, ask: LabelInput, vectors: Sequence[PooledOutput]) -> list[list[float]]:
        """Returns the labels' probabilities after each item. Raises GenerationError."""
        number = len(ask.token_ids) + ask.is_among_all
        found = []
        for each in vectors:
            logits = numbers_of(each.vector, number)
            total = logits.pop() if ask.is_among_all else _log_sum(logits)
            found.append([math.exp(logit - total) for logit in logits])
        return found


def _log_sum(logits: Sequence[float]) -> float:
    """Returns the logarithm of the sum of exp(logit)."""
    best = max(logits)
    return best + math.log(sum(math.exp(logit - best) for logit in logits))
