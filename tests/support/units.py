"""Starts clusters whose instances share experts, and checks how a unit's members end and restart."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.cluster import LiveCluster, together
from tests.support.engines import random_prompt

KILLED_S = 4.0  # time in which all members must report a killed one


class UnitShape(NamedTuple):
    """The number of a unit's members, and of ranks in each."""

    size: int
    tp_size: int = 1

    def __str__(self) -> str:
        return f"dp{self.size}tp{self.tp_size}"


def members_of(role: str, shape: UnitShape) -> list[str]:
    return [f"{role}-{rank}" for rank in range(shape.size)]


def unit_settings(
    prefill: UnitShape, decode: UnitShape, own: Callable[[str], Sequence[str]] = lambda _: ()
) -> dict[str, Any]:
    """Returns LiveCluster's settings for one unit of each role. `own`: member name -> its further flags."""
    shapes = {
        name: shape for role, shape in (("prefill", prefill), ("decode", decode)) for name in members_of(role, shape)
    }
    return {
        "member_arguments": {
            name: [f"--data-parallel-size={shape.size}", *own(name)] for name, shape in shapes.items()
        },
        "tp_sizes": {name: shape.tp_size for name, shape in shapes.items()},
    }


def unit_cluster(
    folder: Path, model: Path, prefill: UnitShape, decode: UnitShape, arguments: Sequence[str], **settings: Any
) -> LiveCluster:
    own = unit_settings(prefill, decode, **settings)
    return LiveCluster(folder, model, prefill.size, decode.size, arguments, **own)


def log_of(cluster: LiveCluster, name: str, start: int = 0) -> str:
    """Returns a process's log from byte `start` on."""
    return cluster.log_file(name).read_bytes()[start:].decode(errors="replace")


class Watched:
    """A unit's members at the time of a fault; checks how they end, and restarts them."""

    def __init__(self, cluster: LiveCluster, names: Sequence[str]) -> None:
        self._cluster, self._names = cluster, names
        self._starts = {name: cluster.log_file(name).stat().st_size for name in names}
        self._since_s = time.monotonic()

    def log(self, name: str) -> str:
        """Returns what a member has logged since the fault."""
        return log_of(self._cluster, name, self._starts[name])

    def assert_lost(self, victim: str, within_s: float, but: Sequence[str] = ()) -> None:
        """Asserts that each member except those in `but` reports `victim` within `within_s` and ends."""
        others = [name for name in self._names if name not in but]
        rank, size = self._names.index(victim), len(self._names)
        # A lost connection reports the instance; a failed exchange, which may be noticed first, reports the rank.
        said = re.compile(rf"({victim}, )?member {rank} of {size} of this unit,? is lost: |{victim}: ")

        def named() -> bool:
            return all(said.search(self.log(name)) for name in others)

        left_s = within_s - self.age_s
        self._cluster.wait_until(f"all members of {victim}'s unit name it", named, max(left_s, 0.0))
        for name in others:
            assert self._cluster.await_exit(name) != 0

    @property
    def age_s(self) -> float:
        """Returns the seconds since the fault."""
        return time.monotonic() - self._since_s

    def start_again(self) -> None:
        """Restarts all members once they have ended."""
        for name in self._names:
            self._cluster.await_exit(name)
        for name in self._names:
            self._cluster.start_member(name)


def at_random_times(
    cluster: LiveCluster, rng: random.Random, prompts: Sequence[list[int]], limits: Sequence[int], mean_s: float
) -> list[list[int]]:
    """Returns the answers to requests of a Poisson process, with times when members have nothing to compute."""
    at_s, now_s = [], time.monotonic()
    for _ in prompts:
        now_s += rng.expovariate(1 / mean_s)
        at_s.append(now_s)

    def later(when_s: float, prompt: list[int], limit: int) -> list[int]:
        time.sleep(max(0.0, when_s - time.monotonic()))
        return cluster.complete(prompt, limit)

    return together([partial(later, *ask) for ask in zip(at_s, prompts, limits, strict=True)])


def numbers(cluster: LiveCluster, prompt: list[int], num_tokens: int) -> Any:
    """Returns an answer's tokens and logprobs as in its JSON, where a float's text determines its bits."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "logprobs": 4, "ignore_eos": True}
    (choice,) = cluster.ask("/v1/completions", body | {"return_token_ids": True})["choices"]
    assert len(choice["token_ids"]) == num_tokens
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]


def prompts_of(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, length) for length in lengths]
