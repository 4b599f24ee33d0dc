"""Replaces the router by one whose answers a test chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec

from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.records.request_timeline import Timelines
from pd_cluster.types import FinishReason, Logprobs, PromptOutput, RequestSpec, Sampling, TokenOutput


class Playback:
    """A router that answers every request with these tokens, in each sequence; `told`, if any, is sent before them."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.membership = SimpleNamespace(instances=[])
        self.timelines = Timelines()
        self.stats = RequestStats()
        self.num_read = 0
        self.was_closed = False
        self.logprobs: dict[int, float] = {}  # sequence -> logprob of each token
        self.told: PromptOutput | None = None
        self.stopped: set[int] = set()
        self.num_dropped = 0  # tokens in the same message as an answer's last one, but after it
        self.failed: list[Exception] = []
        self.last_reason: FinishReason = "length"
        self.requests: list[Sampling] = []
        self.orders: list[RequestSpec] = []
        self.salts: list[str] = []
        self.gathered: list[bool] = []  # whether each request's reader gathers
        self.changes: dict[tuple[int, int], dict[str, Any]] = {}  # (sequence, position) -> changed fields of its token
        self.num_together = 1  # tokens per message after the first, for readers that gather
        self.drafts = False  # whether every reader gets `num_together`, as from steps with drafts

    def stop(self, index: int, num_dropped: int) -> None:
        self.stopped.add(index)
        self.num_dropped += num_dropped

    async def serve(self, order: RequestSpec, routed: Any, prompted: Any, *origin: Any) -> AsyncIterator[TokenOutput]:
        sampling = order.sampling
        self.requests.append(sampling)
        self.orders.append(order)
        self.salts.append(order.cache_salt)
        self.gathered.append(order.gathers)
        num_together = self.num_together if order.gathers or self.drafts else 1
        instances = [SimpleNamespace(name=name) for name in ("p", "d")]
        inbox = SimpleNamespace(put=self.failed.append)
        routed(SimpleNamespace(prefill=instances[0], decode=instances[1], stop=self.stop, inbox=inbox, weight_marks=[]))
        if self.told is not None:
            prompted(self.told)
        try:
            for at, token_id in enumerate(self.token_ids):
                last = self.last_reason if at + 1 == len(self.token_ids) else None
                if at % num_together and last is None:
                    continue
                earlier = tuple(self.token_ids[max(0, at - 1) // num_together * num_together + 1 : at])
                for index in set(range(sampling.n)) - self.stopped:
                    self.num_read += 1
                    known = Logprobs(self.logprobs[index], 1, []) if sampling.logprobs is not None else None
                    told = () if known is None else (known,) * len(earlier)
                    token = TokenOutput(
                        "r", 0, index, at, token_id, last, known, earlier=earlier, earlier_logprobs=told
                    )
                    changes = self.changes.get((index, at), {})
                    if "finish_reason" in changes:
                        self.stopped.add(index)
                    yield msgspec.structs.replace(token, **changes)
        finally:
            self.was_closed = True
