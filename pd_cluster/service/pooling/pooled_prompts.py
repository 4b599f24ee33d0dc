"""Computes prompts without generating: makes parameters, checks limits, and gets vectors from the router.

Knows nothing of HTTP or of the meaning of vectors.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_cluster.cluster.routing.router import Router
from pd_cluster.errors import GenerationError, RequestError
from pd_cluster.service.callers.caller import NOBODY, Caller
from pd_cluster.service.generation.merged_streams import together
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.types import NO_SAMPLING, PooledOutput, Pooling, PromptOutput, RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInput:
    """The fields that pooling requests share.

    `received_s`: the arrival time, for the request's timeline. `client_id`: the request's id there. `variant`: the
    digest of an adapter.
    """

    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    variant: str = ""
    priority: int = 0
    session: str = ""
    client_id: str = ""
    received_s: float | None = None
    caller: Caller = field(default=NOBODY)


def pooled_generation(ask: PoolingInput, token_ids: list[int], pooling: Pooling) -> Generation:
    """Returns a generation for a prompt; it has no sequences, because nothing is generated."""
    caller = ask.caller
    order = RequestSpec(
        token_ids,
        NO_SAMPLING,
        caller.salt(ask.cache_salt),
        ask.variant,
        session=ask.session,
        priority=caller.priority(ask.priority),
        pooling=pooling,
    )
    return Generation(
        order,
        sequences=[],
        num_choices=0,
        client_id=ask.client_id,
        received_s=ask.received_s,
        owner=caller.owner,
        arrived=caller.arrived,
    )


async def pooled(router: Router, generations: Sequence[Generation]) -> list[PooledOutput]:
    """Returns the vectors of all prompts in their order. The first error ends all. Raises what `Router.pool` raises."""
    return await together([_pooled(router, generation) for generation in generations])


async def _pooled(router: Router, generation: Generation) -> PooledOutput:
    generation.arrived()
    found = await router.pool(generation.order, generation.routed, generation.origin)
    generation.prompted(PromptOutput(found.request_id, found.attempt, found.num_cached_tokens))
    return found


def numbers_of(vector: bytes, num_numbers: int | None) -> list[float]:
    """Returns the values of a PooledOutput. Raises GenerationError unless it is `num_numbers` float32 values."""
    found = array("f")
    if len(vector) % found.itemsize or not vector or num_numbers not in (None, len(vector) // found.itemsize):
        raise GenerationError(f"an instance sent {len(vector)} bytes instead of a vector")
    found.frombytes(vector)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tolist()


def kept_tokens(truncate_prompt_tokens: int, limit: int) -> int:
    """Returns the most tokens to keep of a prompt. Raises RequestError."""
    keep = limit if truncate_prompt_tokens == -1 else truncate_prompt_tokens
    if not 0 < keep <= limit:
        raise RequestError(
            f"truncate_prompt_tokens: {truncate_prompt_tokens}; must be -1 or in 1 to {limit}, this model's context",
            param="truncate_prompt_tokens",
        )
    return keep


def check_length(num_tokens: int, limit: int, place: str) -> None:
    """Raises RequestError for a prompt that is empty or longer than the context. `place`: the field."""
    param = place.partition("[")[0]
    if not num_tokens:
        raise RequestError(f"{place}: no tokens", param=param)
    if num_tokens > limit:
        raise RequestError(
            f"{place}: the prompt is too long: {num_tokens} tokens; this model's maximum context length is {limit} "
            f"tokens; send less, or truncate_prompt_tokens",
            param=param,
            code="context_length_exceeded",
        )
