"""Members of a unit in threads of one process exchange rows over their real ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from pd_cluster.transport.meeting import Meeting

WAIT_S = 20.0


def connected(size: int, meet: Callable[[Any, int, int], Any], kind: Callable[..., Any]) -> list[Any]:
    """Returns ends that meet by `meet(store, rank, size)`; their keys are encoded as between processes."""
    meetings: list[Meeting] = []

    def post(rank: int, key: str, value: bytes) -> None:
        for other, meeting in enumerate(meetings):
            if other != rank:
                meeting.put(key, value)

    def ends(rank: int) -> Any:
        with meetings[rank].held():
            return meet(meetings[rank].store, rank, size)

    meetings += [Meeting(WAIT_S, partial(post, rank), size - 1) for rank in range(size)]
    return [kind(rank, size, partial(ends, rank), WAIT_S) for rank in range(size)]


def exchange_rows(groups: Sequence[Any], dtype: torch.dtype, on_device: bool = False) -> None:
    """Asserts that all members get all rows in the order of members, and sums in float32, rounded once.

    Covers all numbers of rows, also none. `on_device`: the ends load, and once do not know the numbers beforehand.
    """
    size = len(groups)
    rng, made = random.Random(size), torch.Generator().manual_seed(size)
    steps = [[rng.choice((0, 1, 5, 64)) for _ in range(size)] for _ in range(10)] + [[0] * size, [3] * size]
    rows = [[torch.randn(num, 24, generator=made).to(dtype) for num in step] for step in steps]
    parts = [(torch.randn(size, sum(step), 24, generator=made) * 1e3).to(dtype) for step in steps]
    barrier = threading.Barrier(size)

    def member(group: Any) -> None:
        barrier.wait(WAIT_S)
        group.form()
        if on_device:
            group.loaded()
        for step, xs, partials in zip(steps, rows, parts, strict=True):
            own = step[group.rank]
            told = group.agree(own)
            assert told == step
            group.rows = None if on_device and step == [3] * size else told
            chosen, weights = torch.full((own, 3), 200 + group.rank), torch.full((own, 3), group.rank + 0.1)
            found = group.gather(xs[group.rank], chosen, weights)
            of_all = torch.cat([torch.full((num, 3), rank) for rank, num in enumerate(step)])
            assert torch.equal(found[0], torch.cat(xs))
            assert torch.equal(found[1], 200 + of_all)
            assert torch.equal(found[2], of_all + 0.1)
            assert [each.dtype for each in found] == [dtype, torch.int64, torch.float32]
            assert all(each.is_contiguous() for each in found)
            start = sum(step[: group.rank])
            total = partials[0, start : start + own].float()
            for other in partials[1:]:
                total = total + other[start : start + own]
            assert torch.equal(group.combine(partials[group.rank]), total.to(dtype))

    with ThreadPoolExecutor(size) as threads:
        for each in [threads.submit(member, group) for group in groups]:
            each.result(2 * WAIT_S)
