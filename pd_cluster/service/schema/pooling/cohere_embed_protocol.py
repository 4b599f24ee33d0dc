"""Defines the schema of /v2/embed, Cohere's embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.completion_protocol import FAIL_FAST, MAX_SALT_NUM_CHARS
from pd_cluster.service.schema.pooling.pooling_protocol import MAX_INPUTS, Texts
from pd_cluster.types import INT32_MAX

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]


class CohereContent(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None


class CohereInput(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    content: Annotated[list[CohereContent], Field(min_length=1, fail_fast=True)]


class CohereEmbedRequest(BaseModel):
    """`input_type`: selects the model's prompt that precedes each text. `truncate`: the side of a text to cut off."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    input_type: str | None = Field(default=None, max_length=256)
    texts: Texts | None = None
    images: Annotated[list[Any], FAIL_FAST] | None = None
    inputs: Annotated[list[CohereInput], FAIL_FAST] | None = None
    output_dimension: int | None = Field(default=None, ge=1, le=INT32_MAX)
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1, fail_fast=True)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_NUM_CHARS)

    def given(self) -> tuple[str, list[str]]:
        """Returns the field with the texts, and the texts. Raises RequestError."""
        if self.images:
            raise RequestError("images: only texts can be embedded; send texts", param="images")
        given = [name for name in ("texts", "inputs") if getattr(self, name)]
        if len(given) != 1:
            raise RequestError(f"texts: {' and '.join(given) or 'none'} given; give texts or inputs", param="texts")
        texts = self.texts or [_text(at, each) for at, each in enumerate(self.inputs or [])]
        if len(texts) > MAX_INPUTS:
            raise RequestError(
                f"{given[0]}: {len(texts)} are more than the {MAX_INPUTS} that a request may have; send fewer",
                param=given[0],
            )
        return given[0], texts


def _text(at: int, given: CohereInput) -> str:
    """Returns an input's text. Raises RequestError for other content."""
    for part, each in enumerate(given.content):
        if each.type != "text" or each.text is None:
            raise RequestError(f"inputs[{at}].content[{part}]: only texts can be embedded; send texts", param="inputs")
    return "\n".join(each.text or "" for each in given.content)
