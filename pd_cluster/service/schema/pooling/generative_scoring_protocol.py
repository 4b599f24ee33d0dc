"""Defines the schema of /generative_scoring: the probabilities of given tokens after a query and each item."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.completion_protocol import (
    FAIL_FAST,
    MAX_SALT_NUM_CHARS,
    REQUEST_ID,
    Id,
    TokenIds,
    outside_of_vocabulary,
)
from pd_cluster.service.schema.pooling.pooling_protocol import MAX_PAIRS, Texts
from pd_cluster.types import INT32_MAX, MAX_POOLED_TOKEN_IDS

Labels = Annotated[list[Id], Field(min_length=1, max_length=MAX_POOLED_TOKEN_IDS, fail_fast=True)]


class GenerativeScoringRequest(BaseModel):
    """vLLM's schema. An item's score is the probability of the first label; see `apply_softmax`."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    query: str | TokenIds
    items: Texts | Annotated[list[TokenIds], FAIL_FAST]
    label_token_ids: Labels
    apply_softmax: bool = Field(
        default=True, description="Probabilities among the labels only; false: among all tokens."
    )
    item_first: bool = False
    add_special_tokens: bool = True
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_NUM_CHARS)
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)

    def check(self, vocab_size: int) -> None:
        """Checks the number of items and the label token ids. Raises RequestError."""
        if not self.items:
            raise RequestError("items: empty; give a list of texts, or of lists of token ids", param="items")
        if len(self.items) > MAX_PAIRS:
            raise RequestError(
                f"items: {len(self.items)} are more than the {MAX_PAIRS} that a request may have; send fewer",
                param="items",
            )
        if outside := [str(token_id) for token_id in self.label_token_ids if token_id >= vocab_size]:
            name = "label_token_ids"
            raise RequestError(f"{name}: {outside_of_vocabulary(outside, vocab_size)}", param=name)

    @property
    def labels(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.label_token_ids))
