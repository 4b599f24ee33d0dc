"""Scores how well a document answers a query, as Qwen3-Reranker does: by the model's probability of "yes" against "no".
The prompt is the one on the model's card. Query, document and instruction are plain text: the text of a control token
in them remains text. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pd_cluster.errors import RequestError
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.pooling.pooled_prompts import (
    PoolingInput,
    check_length,
    kept_tokens,
    numbers_of,
    pooled_generation,
)
from pd_cluster.service.preprocessing.request_limits import check_priority
from pd_cluster.service.prompts.guarded_prompt import ControlTokenGuard
from pd_cluster.service.prompts.prompt_encoder import PromptEncoder
from pd_cluster.text.control_tokens import PromptText
from pd_cluster.types import PooledOutput, Pooling

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
WORDS = ("no", "yes")  # the answers; the score is the probability of the second
TURN_MARKS = ("<|im_start|>", "<|im_end|>")
PAIRS_A_TURN = 16  # pairs to prepare before other tasks run


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInput(PoolingInput):
    """Pairs of a query and a document.

    `truncate_prompt_tokens`: the most tokens of a prompt; longer documents lose their last tokens. -1: as many as fit
    the context; None: a pair that is too long is refused. `fields`: the names of queries and documents in errors.
    """

    pairs: Sequence[tuple[str, str]]
    instruction: str | None = None  # None: the model card's
    is_probability: bool = True  # otherwise the score is the difference of two logits
    fields: tuple[str, str] = ("query", "documents")


@dataclass(frozen=True, slots=True)
class _Frame:
    """The tokens around each pair, and the tokens of the two answers."""

    prefix: list[int]
    suffix: list[int]
    words: tuple[int, ...]


class Reranker:
    """Scores pairs. `guard` None: clients' texts may contain control tokens."""

    def __init__(self, encoder: PromptEncoder, guard: ControlTokenGuard | None, has_priorities: bool) -> None:
        self._encoder, self._guard, self._has_priorities = encoder, guard, has_priorities
        self._tokenizer = encoder.tokenizer

    @cached_property
    def is_able(self) -> bool:
        """Whether the tokenizer has the tokens of the prompt and of its answers."""
        encode = self._tokenizer.encode
        return self._tokenizer.has_text and all(len(encode(text, False)) == 1 for text in (*TURN_MARKS, *WORDS))

    async def generations(self, ask: ScoreInput) -> list[Generation]:
        """Prepares a prompt for each pair. Raises RequestError."""
        check_priority(ask.priority, self._has_priorities)
        frame, limit = self._frame, self._encoder.limit()
        keep = None if ask.truncate_prompt_tokens is None else kept_tokens(ask.truncate_prompt_tokens, limit)
        num_frame = len(frame.prefix) + len(frame.suffix)
        if keep is not None and keep <= num_frame:
            raise RequestError(
                f"truncate_prompt_tokens: {ask.truncate_prompt_tokens}; the prompt without the pair has {num_frame} "
                f"tokens; give more",
                param="truncate_prompt_tokens",
            )
        task = INSTRUCTION if ask.instruction is None else ask.instruction
        pooling = Pooling(kind="logits", token_ids=frame.words)
        found = []
        for at, (query, document) in enumerate(ask.pairs):
            place = f"{ask.fields[1]}[{at}]"
            text = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
            plain = PromptText(text) if self._guard is None else self._guard.plain(text)
            token_ids = await self._encoder.encode_prompt(plain, False, keep is not None, ask.fields[1], ask.caller)
            if keep is not None:
                token_ids = token_ids[: keep - num_frame]
            check_length(num_frame + len(token_ids), limit, place)
            found.append(pooled_generation(ask, [*frame.prefix, *token_ids, *frame.suffix], pooling))
            if at % PAIRS_A_TURN == PAIRS_A_TURN - 1:
                await asyncio.sleep(0)
        return found

    def scores(self, ask: ScoreInput, vectors: Sequence[PooledOutput]) -> list[float]:
        """Returns a score for each pair: P("yes") against "no", or the difference of the two logits.

        Raises GenerationError.
        """
        differences = [yes - no for no, yes in (numbers_of(each.vector, len(WORDS)) for each in vectors)]
        return [logistic(each) for each in differences] if ask.is_probability else differences

    @cached_property
    def _frame(self) -> _Frame:
        prefix, suffix = (self._tokenizer.encode(text, False) for text in (PREFIX, SUFFIX))
        return _Frame(prefix, suffix, tuple(self._tokenizer.encode(word, False)[0] for word in WORDS))


def logistic(number: float) -> float:
    """Returns 1 / (1 + exp(-number)), without overflow."""
    if number >= 0:
        return 1.0 / (1.0 + math.exp(-number))
    small = math.exp(number)
    return small / (1.0 + small)
