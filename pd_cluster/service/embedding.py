"""Prompts to vectors over the router: tokens, limits, and the checkpoint's way to pool. Knows nothing of HTTP."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pd_cluster.checkpoints.pooling import pooling_kind_of
from pd_cluster.cluster.routing.router import Router
from pd_cluster.errors import GenerationError, ModelError, RequestError
from pd_cluster.service.caller import NOBODY, Caller
from pd_cluster.service.generation import Generation
from pd_cluster.service.prompts.prompt_encoder import PromptEncoder
from pd_cluster.types import INT32_MAX, NO_SAMPLING, Order, Pooling, PoolingKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingAsk:
    """A prompt to be pooled: text or token ids.

    `dimensions`: how many of the first numbers are kept; None: all. `truncate_prompt_tokens`: how many of the last
    tokens are kept; -1: as many as the context has; None: a prompt that is too long is refused. `received_s`: the
    arrival time, for the request's timeline, and `client_id` its name there.
    """

    prompt: str | list[int]
    place: str = "prompt"  # where it stands in the request, for errors
    dimensions: int | None = None
    normalizes: bool = True
    truncate_prompt_tokens: int | None = None
    special: bool = True  # the tokenizer adds its special tokens to a text
    cache_salt: str | None = None
    priority: int = 0
    client_id: str = ""
    received_s: float | None = None
    caller: Caller = field(default=NOBODY)


class Embedding(NamedTuple):
    """`values`: [dimensions] float32 numbers."""

    prompt_token_ids: list[int]
    values: list[float]
    num_cached_tokens: int


class Embedder:
    """`limit` returns the current number of tokens in the context; `folder` is the checkpoint's."""

    def __init__(
        self, router: Router, encoder: PromptEncoder, limit: Callable[[], int], vocab_size: int, folder: Path
    ) -> None:
        self._router, self._encoder, self._limit = router, encoder, limit
        self._vocab_size, self._folder = vocab_size, folder

    @cached_property
    def kind(self) -> PoolingKind:
        """The checkpoint's kind of pooling. Raises RequestError for one that is not supported."""
        try:
            return pooling_kind_of(self._folder)
        except ModelError as error:
            raise RequestError(f"this model cannot embed: {error}") from error

    async def token_ids(self, ask: EmbeddingAsk) -> list[int]:
        """Returns the prompt's tokens, cut where that is asked for. Raises RequestError."""
        limit, keep, prompt = self._limit(), ask.truncate_prompt_tokens, ask.prompt
        if isinstance(prompt, str):
            (prompt,) = await self._encoder.encode([prompt], ask.special, keep is not None, ask.place, ask.caller)
        if keep is not None:
            keep = limit if keep == -1 else keep
            if not 0 < keep <= limit:
                raise RequestError(
                    f"truncate_prompt_tokens: {ask.truncate_prompt_tokens}; must be -1 or in 1 to {limit}, this "
                    f"model's context",
                    param="truncate_prompt_tokens",
                )
            prompt = prompt[-keep:]
        if not prompt:
            raise RequestError(f"{ask.place}: no tokens", param=ask.place)
        if len(prompt) > limit:
            raise RequestError(
                f"{ask.place}: the prompt is too long: {len(prompt)} tokens; this model's maximum context length is "
                f"{limit} tokens; send less, or truncate_prompt_tokens",
                param=ask.place,
                code="context_length_exceeded",
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise RequestError(f"{ask.place}: token ids must be in 0 to {self._vocab_size - 1}", param=ask.place)
        return prompt

    async def embed(self, ask: EmbeddingAsk) -> Embedding:
        """Returns the vector of a prompt. Raises RequestError, and what `Router.pool` raises."""
        return await self.pooled(await self.prepare(ask))

    async def prepare(self, ask: EmbeddingAsk) -> Generation:
        """Returns the request of a prompt, which no instance has yet. Raises RequestError."""
        if ask.dimensions is not None and not 1 <= ask.dimensions <= INT32_MAX:
            raise RequestError(f"dimensions: {ask.dimensions}; must be in 1 to {INT32_MAX}", param="dimensions")
        pooling = Pooling(kind=self.kind, dimensions=ask.dimensions, normalizes=ask.normalizes)
        token_ids = await self.token_ids(ask)
        caller = ask.caller
        return Generation(
            Order(token_ids, NO_SAMPLING, caller.salt(ask.cache_salt), priority=ask.priority, pooling=pooling),
            sequences=[],
            num_choices=0,
            is_prompt_only=True,
            client_id=ask.client_id,
            received_s=ask.received_s,
            visitor=caller.visitor,
            arrived=caller.arrived,
        )

    async def pooled(self, generation: Generation) -> Embedding:
        """Returns the vector. Raises what `Router.pool` raises."""
        order = generation.order
        assert order.pooling is not None
        generation.arrived()
        pooled = await self._router.pool(
            order,
            generation.routed,
            client_id=generation.client_id,
            received_s=generation.received_s,
            visitor=generation.visitor,
        )
        values = numbers_of(pooled.vector, order.pooling.dimensions)
        return Embedding(order.prompt_token_ids, values, pooled.num_cached_tokens)


def numbers_of(vector: bytes, dimensions: int | None) -> list[float]:
    """Returns the numbers of a PooledOutput. Raises GenerationError for bytes that are not so many float32."""
    found = array("f")
    if len(vector) % found.itemsize or not vector or dimensions not in (None, len(vector) // found.itemsize):
        raise GenerationError(f"an instance sent {len(vector)} bytes in place of a vector")
    found.frombytes(vector)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()
