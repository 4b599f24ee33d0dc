"""Messages of streams that resume: between schedulers and the instance that keeps a stream's record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from pd_cluster.types import PromptOutput, RequestSpec, TokenOutput
from pd_cluster.wire.message_base import Message, Owner

DIGEST_NBYTES = 32
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_NBYTES, max_length=DIGEST_NBYTES)]
PROMPT_TOKEN_NBYTES, TOKEN_NBYTES, LOGPROB_NBYTES = 40, 160, 112  # approximate bytes of memory


class Keep(msgspec.Struct, frozen=True):
    """Asks the decoding instance to keep a record of a stream.

    `prompt` and `tokens`: results of the request's earlier attempts.
    """

    digest: Digest  # the hash of the stream's token and its API key's tenant
    window_s: float  # how long the record stays without a reader
    capacity_nbytes: int  # the limit for all records of that instance
    recipe: bytes  # the data, in addition to the request spec, that a scheduler needs to write the same answer
    prompt: PromptOutput | None = None
    tokens: list[TokenOutput] = []
    owner: Owner = b""  # the tenant's pseudonym; tenants share the capacity

    def __repr__(self) -> str:
        return "Keep(…)"


class Release(Message, frozen=True):
    """The sender no longer reads a kept stream. `then`: its leg goes on, stops, or is forgotten with its record."""

    request_id: str
    attempt: int
    then: Literal["go on", "stop", "forget"]


class Find(Message, frozen=True):
    digest: Digest


class Found(Message, frozen=True):
    """Answers `Find`.

    `order` None: the sender has no such record. `num_tokens`: the number of the record's output tokens.
    """

    digest: Digest
    request_id: str = ""
    attempt: int = 0
    order: RequestSpec | None = None
    recipe: bytes = b""
    num_tokens: int = 0

    def __repr__(self) -> str:
        return "Found(…)"


class Attach(Message, frozen=True):
    """From now on the sender reads the stream, beginning with its first token. An earlier reader's stream ends."""

    digest: Digest
    request_id: str
    attempt: int


def nbytes_of(tokens: Iterable[TokenOutput]) -> int:
    """Estimates the memory of kept tokens, each as a separate output."""
    return sum(
        TOKEN_NBYTES
        + (TOKEN_NBYTES + LOGPROB_NBYTES * len(token.logprobs.top) if token.logprobs is not None else 0)
        + (TOKEN_NBYTES * (1 + len(token.drafts.steps)) if token.drafts is not None else 0)
        for token in tokens
    )
