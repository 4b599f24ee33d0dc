"""Keeps lengths and prefixes of recently served requests, for a trace of the cluster's own traffic.

A prompt is kept as hashes of its blocks, chained and keyed with a secret: they show which prompts share a prefix, and
nothing else. The number of requests and their age are limited. Knows nothing of HTTP or of a trace's format.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pd_cluster.cluster.streams.request_stream import RequestStream
from pd_cluster.cluster.streams.stream_table import StreamEnd, StreamTable
from pd_cluster.kv.prefix_index import chain_hashes, root_hash
from pd_cluster.types import RequestSpec

BLOCK_TOKENS = 128  # a quarter of a block of Mooncake's traces
MAX_AGE_S = 24 * 3600.0
MAX_ALL_KEYS = 4_000_000  # 32 MB; beyond that the oldest requests are dropped


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """`keys`: a number per block of the prompt; the last block may be shorter. Times are by this process's clock."""

    received_s: float
    num_prompt_tokens: int
    num_output_tokens: int  # over all its sequences
    keys: array[int]


class ServedRequests:
    """Listens to `streams`. `max_requests` 0: disabled, at no cost."""

    def __init__(
        self, streams: StreamTable, max_requests: int, secret: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_requests = max_requests
        self._secret, self._clock = secret, clock
        self._kept: deque[ServedRequest] = deque()
        self._num_keys = 0
        if max_requests:
            streams.on_ended.append(self._on_ended)

    def last(self) -> list[ServedRequest]:
        """Returns the kept requests, in order of arrival."""
        self._drop()
        return sorted(self._kept, key=lambda each: each.received_s)

    def _on_ended(self, stream: RequestStream, end: StreamEnd) -> None:
        """Keeps a request that has tokens; one that failed before its first token has no output length."""
        num_output_tokens = sum(len(sequence.token_ids) for sequence in stream.sequences)
        if not num_output_tokens:
            return
        keys = keys_of_prompt(stream.order, self._secret)
        num_prompt_tokens = len(stream.order.prompt_token_ids)
        self._kept.append(ServedRequest(stream.received_s, num_prompt_tokens, num_output_tokens, keys))
        self._num_keys += len(keys)
        self._drop()

    def _drop(self) -> None:
        oldest_s = self._clock() - MAX_AGE_S
        while self._kept and (
            len(self._kept) > self.max_requests or self._num_keys > MAX_ALL_KEYS or self._kept[0].received_s < oldest_s
        ):
            self._num_keys -= len(self._kept.popleft().keys)


def keys_of_prompt(order: RequestSpec, secret: bytes) -> array[int]:
    """Returns the keys of a prompt's blocks. Prompts of different variants or salts share no keys, as in the prefix
    caches.
    """
    token_ids = order.prompt_token_ids
    root = root_hash(secret.hex(), order.cache_salt, order.variant)
    num_full = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    hashes = chain_hashes(root, token_ids[:num_full], BLOCK_TOKENS, 0, order.spans, order.rope_positions)
    if rest := len(token_ids) - num_full:
        parent = hashes[-1] if hashes else root
        hashes += chain_hashes(parent, token_ids[num_full:], rest, num_full, order.spans, order.rope_positions)
    return array("Q", [int.from_bytes(each[:8], "little") for each in hashes])
