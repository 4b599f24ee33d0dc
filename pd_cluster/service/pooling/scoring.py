"""Scores pairs of a query and a document, with a reranking model (reranking.py) or by the cosine of two vectors.

A checkpoint with sentence-transformers' pooling file is an embedding model and compares vectors. Knows nothing of HTTP.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

from pd_cluster.checkpoints.pooling_config import POOLING_FILE
from pd_cluster.errors import RequestError
from pd_cluster.service.callers.caller import Caller
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.pooling.embedder import Embedder, EmbeddingInput
from pd_cluster.service.pooling.pooled_prompts import numbers_of
from pd_cluster.service.pooling.reranking import Reranker, ScoreInput
from pd_cluster.service.prompts.prompt_encoder import PromptEncoder
from pd_cluster.types import PooledOutput

NAMES = ("query", "documents")  # a pair's texts, in errors


class Scorer:
    """Scores pairs with either kind of model. `folder`: the checkpoint's."""

    def __init__(self, embedder: Embedder, reranker: Reranker, encoder: PromptEncoder, folder: Path) -> None:
        self.embedder, self._reranker, self._encoder, self._folder = embedder, reranker, encoder, folder

    @cached_property
    def judges(self) -> bool:
        """Whether scores are a reranking model's, not cosines."""
        return not (self._folder / POOLING_FILE).exists() and self._reranker.is_able

    async def generations(self, ask: ScoreInput) -> list[Generation]:
        """Prepares the prompts of all pairs. Raises RequestError."""
        if self.judges:
            return await self._reranker.generations(ask)
        if ask.instruction is not None:
            raise RequestError(
                "instruction: this model compares the vectors of texts; put it into the queries", param="instruction"
            )
        if not ask.is_probability:
            raise RequestError(
                "use_activation: false has no effect on the cosines that this model scores by; leave it out",
                param="use_activation",
            )
        query, document = ask.fields
        names = {text: name for pair in ask.pairs for text, name in zip(pair, (query, document), strict=True)}
        return await self.embedder.generations(
            [
                EmbeddingInput(
                    prompt=text,
                    field=names[text],
                    truncate_prompt_tokens=ask.truncate_prompt_tokens,
                    cache_salt=ask.cache_salt,
                    variant=ask.variant,
                    priority=ask.priority,
                    session=ask.session,
                    client_id=ask.client_id,
                    received_s=ask.received_s,
                    caller=ask.caller,
                )
                for text in _texts(ask)
            ]
        )

    async def shortened(
        self, pairs: list[tuple[str, str]], most_of_query: int, most_of_document: int, caller: Caller
    ) -> list[tuple[str, str]]:
        """Returns pairs of texts truncated to this many tokens; 0: not truncated."""
        if not most_of_query and not most_of_document:
            return pairs
        tokenizer = self._encoder.tokenizer
        for name, text in ((name, text) for pair in pairs for name, text in zip(NAMES, pair, strict=True)):
            self._encoder.check(len(text), True, name)

        def work() -> list[tuple[str, str]]:
            shorter = cache(tokenizer.beginning)
            return [(shorter(query, most_of_query), shorter(text, most_of_document)) for query, text in pairs]

        return await self._encoder.run(work, sum(len(text) for pair in pairs for text in pair), caller)

    def scores(self, ask: ScoreInput, vectors: Sequence[PooledOutput]) -> list[float]:
        """Returns a score for each pair. `vectors`: the vectors of the prepared prompts. Raises GenerationError."""
        if self.judges:
            return self._reranker.scores(ask, vectors)
        found = [numbers_of(each.vector, None) for each in vectors]
        by_text = dict(zip(_texts(ask), found, strict=True))
        return [cosine(by_text[query], by_text[document]) for query, document in ask.pairs]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the cosine of the angle between two vectors of length 1."""
    products: list[float] = list(map(operator.mul, one, other))
    return sum(products)


def _texts(ask: ScoreInput) -> list[str]:
    """Returns each text of the pairs once, in order."""
    return list(dict.fromkeys(text for pair in ask.pairs for text in pair))
