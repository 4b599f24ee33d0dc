"""Converts prompts to vectors: encodes them, checks limits, and applies the checkpoint's kind of pooling. Knows nothing
of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pd_cluster.checkpoints.embedding_prompts import EmbeddingPrompts
from pd_cluster.checkpoints.pooling_config import pooling_kind_of
from pd_cluster.cluster.routing.router import Router
from pd_cluster.errors import ModelError, RequestError
from pd_cluster.service.generation.generation_watch import GenerationWatch
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.pooling.pooled_prompts import (
    PoolingInput,
    check_length,
    kept_tokens,
    numbers_of,
    pooled,
    pooled_generation,
)
from pd_cluster.service.preprocessing.request_limits import check_priority
from pd_cluster.service.prompts.prompt_encoder import PromptEncoder
from pd_cluster.settings.request_settings import PoolerConfig, PoolingType
from pd_cluster.types import INT32_MAX, PooledOutput, Pooling, PoolingKind

POOLING_KINDS: dict[PoolingType, PoolingKind] = {"LAST": "last", "MEAN": "mean"}
PROMPTS_A_TURN = 16  # prompts to prepare before other tasks run


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingInput(PoolingInput):
    """A prompt to pool: text or token ids.

    `dimensions`: the number of leading vector elements to keep; None: all. `truncate_prompt_tokens`: how many of the
    last tokens (of the first, if `keeps_first`) to keep; -1: as many as fit the context; None: a longer prompt is
    refused. `normalizes` None: the server's setting. `field`: the prompt's name in errors.
    """

    prompt: str | list[int]
    dimensions: int | None = None
    normalizes: bool | None = None
    keeps_first: bool = False
    special: bool = True  # the tokenizer adds its special tokens to a text
    field: str = "prompt"


class Embedding(NamedTuple):
    """`values`: float32 [dimensions]."""

    prompt_token_ids: list[int]
    values: list[float]
    num_cached_tokens: int


class EmbedderRules(NamedTuple):
    """`folder`: the checkpoint's. `settings` override the checkpoint."""

    vocab_size: int
    folder: Path
    has_priorities: bool
    settings: PoolerConfig = PoolerConfig()


class Embedder:
    def __init__(
        self, router: Router, encoder: PromptEncoder, rules: EmbedderRules, log: GenerationWatch | None = None
    ) -> None:
        self._router, self._encoder, self._rules, self._log = router, encoder, rules, log

    @cached_property
    def kind(self) -> PoolingKind:
        """The settings' kind of pooling, or the checkpoint's. Raises RequestError for an unsupported kind."""
        if self._rules.settings.kind is not None:
            return POOLING_KINDS[self._rules.settings.kind]
        try:
            return pooling_kind_of(self._rules.folder)
        except ModelError as error:
            raise RequestError(f"this model cannot embed: {error}") from error

    @cached_property
    def prompts(self) -> EmbeddingPrompts:
        """The checkpoint's prompts, which precede texts. Raises RequestError for a broken file."""
        try:
            return EmbeddingPrompts.read(self._rules.folder)
        except ModelError as error:
            raise RequestError(f"this model cannot embed: {error}") from error

    async def token_ids(self, ask: EmbeddingInput) -> list[int]:
        """Returns the prompt's tokens, truncated if requested. Raises RequestError."""
        limit, keep, prompt, place = self._encoder.limit(), ask.truncate_prompt_tokens, ask.prompt, ask.field
        if isinstance(prompt, str):
            param = place.partition("[")[0]
            (prompt,) = await self._encoder.encode([prompt], ask.special, keep is not None, param, ask.caller)
        if keep is not None:
            number = kept_tokens(keep, limit)
            prompt = prompt[:number] if ask.keeps_first else prompt[-number:]
        check_length(len(prompt), limit, place)
        if min(prompt) < 0 or max(prompt) >= self._rules.vocab_size:
            raise RequestError(
                f"{place}: token ids must be in 0 to {self._rules.vocab_size - 1}", param=place.partition("[")[0]
            )
        return prompt

    async def generation(self, ask: EmbeddingInput, kind: PoolingKind | None = None) -> Generation:
        """Prepares one prompt. `kind`: the kind of pooling; None: the model's own. Raises RequestError."""
        if ask.dimensions is not None and not 1 <= ask.dimensions <= INT32_MAX:
            raise RequestError(f"dimensions: {ask.dimensions}; must be in 1 to {INT32_MAX}", param="dimensions")
        check_priority(ask.priority, self._rules.has_priorities)
        normalizes = self._rules.settings.use_activation is not False if ask.normalizes is None else ask.normalizes
        pooling = Pooling(kind=kind or self.kind, dimensions=ask.dimensions, normalizes=normalizes)
        return pooled_generation(ask, await self.token_ids(ask), pooling)

    async def generations(self, asks: Sequence[EmbeddingInput], kind: PoolingKind | None = None) -> list[Generation]:
        """Prepares the prompts of a request, as `generation` does. Raises RequestError."""
        found = []
        for at, ask in enumerate(asks):
            found.append(await self.generation(ask, kind))
            if at % PROMPTS_A_TURN == PROMPTS_A_TURN - 1:
                await asyncio.sleep(0)
        return found

    async def vectors(self, generations: Sequence[Generation]) -> list[PooledOutput]:
        """Returns the vectors of prepared prompts, in their order. Raises what `Router.pool` raises."""
        if self._log is not None:
            self._log.begins(generations)
        return await pooled(self._router, generations)

    async def embed(self, ask: EmbeddingInput) -> Embedding:
        """Returns the vector of a prompt. Raises RequestError, and what `Router.pool` raises."""
        generation = await self.generation(ask)
        (found,) = await self.vectors([generation])
        values = numbers_of(found.vector, ask.dimensions)
        return Embedding(generation.prompt_token_ids, values, found.num_cached_tokens)
