"""The schema of requests whose prompts become vectors: OpenAI's, with vLLM's extra parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.protocol import FAIL_FAST, MAX_SALT_NUM_CHARS, REQUEST_ID, TokenIds
from pd_cluster.types import INT32_MAX

MAX_INPUTS = 2048  # as OpenAI's
MAX_TOP_N = MAX_INPUTS


class PoolingRequest(BaseModel):
    """Fields that all such requests share. None means the server's default."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    add_special_tokens: bool | None = None
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_NUM_CHARS)
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)


class EmbeddingRequest(PoolingRequest):
    """OpenAI's /v1/embeddings."""

    input: str | TokenIds | Annotated[list[str], FAIL_FAST] | Annotated[list[TokenIds], FAIL_FAST]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, le=INT32_MAX)
    normalize: bool | None = None

    def inputs(self) -> list[str | list[int]]:
        """Returns one or many. Raises RequestError for none, and for too many."""
        given = self.input
        if not given:
            raise RequestError("input: empty; give a text, a list of token ids, or a list of these", param="input")
        several: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        return checked_number(several, "input")


class ScoreRequest(PoolingRequest):
    """vLLM's /score: how near each text of one side is to its text of the other, or to the only one."""

    text_1: str | Annotated[list[str], FAIL_FAST]
    text_2: str | Annotated[list[str], FAIL_FAST]

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the texts to compare. Raises RequestError for sides of unequal length."""
        first, second = ([each] if isinstance(each, str) else each for each in (self.text_1, self.text_2))
        if not first or not second:
            name = "text_2" if first else "text_1"
            raise RequestError(f"{name}: empty; give a text, or a list of texts", param=name)
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1: {len(first)} texts, and text_2 has {len(second)}; give one, or as many", param="text_1"
            )
        checked_number(second, "text_2")
        return list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))


class RerankRequest(PoolingRequest):
    """Jina's and Cohere's /rerank, as vLLM has it."""

    query: str
    documents: Annotated[list[str], Field(min_length=1, fail_fast=True)]
    top_n: int | None = Field(default=None, ge=0, le=MAX_TOP_N)
    return_documents: bool | None = None

    def checked_documents(self) -> list[str]:
        """Raises RequestError for too many."""
        return checked_number(self.documents, "documents")


def checked_number(several: list[Any], field: str) -> list[Any]:
    if len(several) > MAX_INPUTS:
        raise RequestError(
            f"{field}: {len(several)} are more than the {MAX_INPUTS} that a request may have; send several", param=field
        )
    return several
