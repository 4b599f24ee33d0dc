"""Classifies prompts: applies a classifier's head to the instances' vectors. Knows nothing of HTTP."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from pd_cluster.checkpoints.classification_head import ClassificationHead, head_of
from pd_cluster.errors import GenerationError, ModelError, RequestError
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.pooling.embedder import Embedder, EmbeddingInput
from pd_cluster.service.pooling.pooled_prompts import numbers_of
from pd_cluster.types import PooledOutput

NO_HEAD = (
    "this model is not a classifier (its config.json names no architecture …ForSequenceClassification); "
    "/generative_scoring gives the probabilities of a generating model's tokens"
)


FEW_PRODUCTS = 1 << 16  # multiplications; more take noticeably long


class Classifier:
    """`folder` is the checkpoint's."""

    def __init__(self, embedder: Embedder, folder: Path) -> None:
        self._embedder, self._folder = embedder, folder

    @cached_property
    def _head(self) -> ClassificationHead | None:
        """The checkpoint's head, or None. Raises ModelError."""
        return head_of(self._folder)

    @property
    def is_able(self) -> bool:
        """Whether the model is a classifier, even if its head cannot be read."""
        try:
            return self._head is not None
        except ModelError:
            return True

    @property
    def head(self) -> ClassificationHead:
        """The head. Raises RequestError for a model without one."""
        try:
            head = self._head
        except ModelError as error:
            raise RequestError(f"this model cannot classify: {error}") from error
        if head is None:
            raise RequestError(NO_HEAD, code="unsupported_value")
        return head

    def takes_long(self, num_inputs: int) -> bool:
        """Whether computing the head takes noticeably long."""
        return num_inputs * len(self.head.weight) * len(self.head.weight[0]) > FEW_PRODUCTS

    async def generations(self, asks: Sequence[EmbeddingInput]) -> list[Generation]:
        """Prepares the prompts of a request. Raises RequestError."""
        _ = self.head
        return await self._embedder.generations(
            [replace(ask, normalizes=False, dimensions=None) for ask in asks], kind="last"
        )

    def numbers(self, vector: PooledOutput, is_probability: bool) -> list[float]:
        """Returns a value for each label, as transformers computes them. Raises GenerationError."""
        head, values = self.head, numbers_of(vector.vector, None)
        if len(values) != len(head.weight[0]):
            raise GenerationError(f"a vector of {len(values)} numbers; the head takes {len(head.weight[0])}")
        logits = [sum(map(operator.mul, row, values)) + bias for row, bias in zip(head.weight, head.bias, strict=True)]
        if not is_probability:
            return logits
        if head.is_multi_label:
            return [1.0 / (1.0 + math.exp(-logit)) if logit > -700 else 0.0 for logit in logits]
        best = max(logits)
        shares = [math.exp(logit - best) for logit in logits]
        return [share / sum(shares) for share in shares]
