"""Requests of a load before they are sent: arrival times, lengths, and shared prefixes."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

HASH_BLOCK_TOKENS = 512  # the block size of Mooncake's traces


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a trace. `hash_ids` identify its prompt's blocks of `block_tokens`; equal prefixes have equal ids.

    The last block may be shorter. Prompts without ids share no prefixes.
    """

    at_s: Annotated[float, msgspec.Meta(ge=0.0)]
    num_prompt_tokens: Annotated[int, msgspec.Meta(ge=1)]
    num_output_tokens: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = HASH_BLOCK_TOKENS
    session: str = ""


def prompt_of(arrival: Arrival, number: int, num_token_ids: int) -> list[int]:
    """Returns token ids below `num_token_ids`, equal for equal block ids. `number` replaces missing ids."""
    ids = arrival.hash_ids or tuple(
        -1 - number * (1 << 20) - at for at in range(-(-arrival.num_prompt_tokens // arrival.block_tokens))
    )
    found: list[int] = []
    for hash_id in ids:
        num = min(arrival.block_tokens, arrival.num_prompt_tokens - len(found))
        drawn = hashlib.shake_128(f"{hash_id}".encode()).digest(4 * num)
        found += [int.from_bytes(drawn[at : at + 4], "little") % num_token_ids for at in range(0, 4 * num, 4)]
    return found
