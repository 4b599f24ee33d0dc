"""Exports recently served requests as a trace in Mooncake's format. Each trace numbers its blocks from 0.

The format is that of pd_cluster/bench/trace_files.py.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any

from pd_cluster.cluster.routing.served_requests import BLOCK_TOKENS, ServedRequest
from pd_cluster.errors import RequestError

MOONCAKE_BLOCK_TOKENS = 512
MOST_BLOCK_TOKENS = 1 << 16


def described(requests: Sequence[ServedRequest]) -> list[dict[str, Any]]:
    """Returns JSON that another process of this scheduler reads."""
    return [
        {
            "received_s": each.received_s,
            "num_prompt_tokens": each.num_prompt_tokens,
            "num_output_tokens": each.num_output_tokens,
            "keys": each.keys.tolist(),
        }
        for each in requests
    ]


def trace_lines(requests: Sequence[dict[str, Any]], block_tokens: int) -> Iterator[str]:
    """Yields a line for each request in order of arrival; the first arrives at 0.

    A block's key covers all tokens up to the block's end, so the last key of several blocks identifies them as one long
    block.
    """
    ordered = sorted(requests, key=lambda each: each["received_s"])
    ids: dict[int, int] = {}
    step = block_tokens // BLOCK_TOKENS
    for each in ordered:
        keys = each["keys"]
        ends = [min(end, len(keys)) - 1 for end in range(step, len(keys) + step, step)]
        line = {
            "timestamp": round(1e3 * (each["received_s"] - ordered[0]["received_s"])),
            "input_length": each["num_prompt_tokens"],
            "output_length": each["num_output_tokens"],
            "hash_ids": [ids.setdefault(keys[end], len(ids)) for end in ends],
        }
        if block_tokens != MOONCAKE_BLOCK_TOKENS:
            line["block_tokens"] = block_tokens
        yield json.dumps(line, separators=(",", ":")) + "\n"


def parsed_block_tokens(text: str) -> int:
    """Parses the size of a trace's blocks. Raises RequestError."""
    is_number = text.isascii() and text.isdigit() and len(text) < 7
    if not (is_number and 0 < int(text) <= MOST_BLOCK_TOKENS and int(text) % BLOCK_TOKENS == 0):
        raise RequestError(
            f"block_tokens: {reprlib.repr(text)}; give a multiple of {BLOCK_TOKENS}", param="block_tokens"
        )
    return int(text)
