"""Concurrent requests for a model's adapters, compared with models into which the adapters were merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests.support.cluster import LiveCluster, in_parallel
from tests.support.engines import assert_all_same

Ask = tuple[str, list[int]]  # an adapter's name ("" for the base model) and a prompt
T = TypeVar("T")


def naming(name: str) -> dict[str, Any]:
    """Returns the request fields that select this adapter."""
    return {"model": name} if name else {}


class AtOnce(Generic[T]):
    """Sends several requests at once through `answer`. `found` maps the indices of finished ones to answers."""

    def __init__(self, asks: Sequence[Ask], answer: Callable[[str, list[int]], T]) -> None:
        self.asks, self._answer = asks, answer
        self.found: dict[int, T] = {}

    @property
    def is_over(self) -> bool:
        return len(self.found) == len(self.asks)

    def run(self, *beside: Callable[[], None]) -> list[T]:
        """Sends every request on its own thread while other threads run `beside`. Returns the answers in order."""
        jobs = [*beside, *(self._job(at) for at in range(len(self.asks)))]
        errors = in_parallel(jobs, concurrency=len(jobs))
        assert not errors, errors[0]
        return [self.found[at] for at in range(len(self.asks))]

    def _job(self, at: int) -> Callable[[], None]:
        return lambda: self.found.update({at: self._answer(*self.asks[at])})


def completing(cluster: LiveCluster, asks: Sequence[Ask], num_tokens: int) -> AtOnce[list[int]]:
    return AtOnce(asks, lambda name, prompt: cluster.complete(prompt, num_tokens, **naming(name)))


def assert_own_tokens(
    models: Mapping[str, Path], asks: Sequence[Ask], outputs: Sequence[list[int]], num_tokens: int
) -> None:
    """Checks that each request got its own model's tokens. `models` maps adapter names to merged models' folders."""
    for name, folder in models.items():
        own = [at for at, (asked, _) in enumerate(asks) if asked == name]
        assert_all_same(folder, [asks[at][1] for at in own], [outputs[at] for at in own], num_tokens)
