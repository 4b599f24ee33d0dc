"""Defines the schema of pooling requests: embeddings, scores, reranking.

Fields are OpenAI's and vLLM's. Limits that need the model are in service/pooling/pooled_prompts.py.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.completion_protocol import FAIL_FAST, MAX_SALT_NUM_CHARS, REQUEST_ID, TokenIds
from pd_cluster.service.schema.json_body import decoded
from pd_cluster.service.schema.request_parsing import checked
from pd_cluster.types import INT32_MAX

MAX_INPUTS = 2048  # as in OpenAI's API
MAX_PAIRS = 1024

Texts = Annotated[list[str], FAIL_FAST]


class PoolingRequest(BaseModel):
    """The fields that these requests share. `REFUSED`: field -> the values without effect, and the rest of the error
    for other values.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "mm_processor_kwargs": (({},), "is for images, which this server does not take"),
        "chat_template": ((), "is not supported here; send the rendered text"),
        "chat_template_kwargs": (({},), "is not supported here; send the rendered text"),
        "messages": ((), "is not supported here; send texts or token ids"),
        "padding": (("do_not_pad",), "is not supported; prompts are not padded"),
    }

    model: str | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT32_MAX)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_NUM_CHARS)
    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX)
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)
    use_activation: bool | None = None
    user: str | None = None


OF_PAIRS: dict[str, tuple[tuple[Any, ...], str]] = {
    **PoolingRequest.REFUSED,
    "truncation_side": ((), "is not supported; a document loses its last tokens"),
}


class PairsRequest(PoolingRequest):
    """The fields of scores and reranking. Each limit truncates texts to this many tokens; 0: no limit."""

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = OF_PAIRS

    max_tokens_per_query: int | None = Field(default=None, ge=0, le=INT32_MAX)
    max_tokens_per_doc: int | None = Field(default=None, ge=0, le=INT32_MAX)
    instruction: str | None = None


class InputRequest(PoolingRequest):
    """Texts, or lists of token ids, each computed separately."""

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **PoolingRequest.REFUSED,
        "embed_dtype": (("float32",), 'is not supported; "float32" is'),
        "endianness": (("native", "little"), 'is not supported; "little" is'),
    }

    input: str | TokenIds | Texts | Annotated[list[TokenIds], FAIL_FAST]
    add_special_tokens: bool | None = None
    truncation_side: Literal["left", "right"] | None = None

    def inputs(self) -> list[str | list[int]]:
        """Returns the inputs. Raises RequestError if there are none or too many."""
        given = self.input
        if not given:
            raise RequestError("input: empty; give a text, a list of token ids, or a list of either", param="input")
        several: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        if len(several) > MAX_INPUTS:
            raise RequestError(
                f"input: {len(several)} are more than the {MAX_INPUTS} that a request may have; send fewer",
                param="input",
            )
        return several


class EmbeddingRequest(InputRequest):
    """OpenAI's embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, le=INT32_MAX)
    normalize: bool | None = None

    @property
    def normalizes(self) -> bool | None:
        """Returns whether vectors have the length 1; None: the server's default.

        Raises RequestError if the two names of the switch differ.
        """
        given = {each for each in (self.normalize, self.use_activation) if each is not None}
        if len(given) == 2:
            raise RequestError(
                f"use_activation: {self.use_activation}, but normalize is {self.normalize}; they mean the same for "
                f"vectors; give one of them",
                param="use_activation",
            )
        return given.pop() if given else None


class TaskRequest(EmbeddingRequest):
    """vLLM's /pooling: vectors or classes, depending on the model."""

    REFUSED: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        **EmbeddingRequest.REFUSED,
        "task": (("embed", "classify"), 'is not supported; give "embed" or "classify"'),
        "data": ((), "is for plugins, which are not loaded; give input"),
    }

    task: Literal["embed", "classify"] | None = None


class ClassifyRequest(InputRequest):
    """vLLM's /classify. `use_activation` false returns logits instead of probabilities."""


class ScoreRequest(PairsRequest):
    """vLLM's scores of one text against several, or of pairs of texts. Any of four pairs of field names may be used."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None

    def pairs(self) -> tuple[list[tuple[str, str]], tuple[str, str]]:
        """Returns (query, document) of each pair, and the names of the two fields. Raises RequestError."""
        second = "documents" if self.items is None else "items"
        names = [("text_1", "text_2"), ("queries", second), ("data_1", "data_2")]
        if self.items is not None and self.documents is not None:
            raise RequestError(
                "items: another name for documents, which are also given; give one of them", param="items"
            )
        given = [pair for pair in names if any(getattr(self, name) is not None for name in pair)]
        if len(given) != 1:
            which = " and ".join(f"{one}, {two}" for one, two in given) or "none"
            raise RequestError(f"queries: {which} given; give queries and documents", param="queries")
        (one, two) = fields = given[0]
        for name in fields:
            if getattr(self, name) in (None, []):
                raise RequestError(f"{name}: empty; give a text, or a list of texts", param=name)
        queries, documents = (_listed(getattr(self, name)) for name in fields)
        if len(queries) == 1:
            queries *= len(documents)
        if len(queries) != len(documents):
            raise RequestError(
                f"{one}: {len(queries)} texts, but {two} has {len(documents)}; give one, or as many", param=one
            )
        _check_pairs(len(documents), two)
        return list(zip(queries, documents, strict=True)), fields


class RerankRequest(PairsRequest):
    """Cohere's and Jina's reranking: sorts documents by how well they answer the query."""

    query: str
    documents: Texts
    top_n: int | None = Field(default=None, ge=0, le=INT32_MAX)
    return_documents: bool | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Returns (query, document) of each pair. Raises RequestError."""
        if not self.documents:
            raise RequestError("documents: empty; give a list of texts", param="documents")
        _check_pairs(len(self.documents), "documents")
        return [(self.query, document) for document in self.documents]


PoolingT = TypeVar("PoolingT", bound=PoolingRequest)


def parse_pooling(body: bytes, kind: type[PoolingT]) -> PoolingT:
    """Parses a body. Raises RequestError that names the field."""
    data = decoded(body)
    for name, (neutral, why) in kind.REFUSED.items() if isinstance(data, dict) else ():
        if (value := data.get(name)) is not None and value not in neutral:
            raise RequestError(f"{name}: {reprlib.repr(value)} {why}", param=name)
    return checked(data, kind)


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _check_pairs(num_pairs: int, name: str) -> None:
    if num_pairs > MAX_PAIRS:
        raise RequestError(
            f"{name}: {num_pairs} are more than the {MAX_PAIRS} that a request may have; send several requests",
            param=name,
        )
