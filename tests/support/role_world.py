"""Simulates a cluster of instances with fixed speeds under a seeded load, second by second, to test roles by cost.

Instances, membership and commands are production code; steps are replaced by durations. A prefill instance computes one
prompt at a time; a decode instance adds one token to each of its sequences per step.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.roles.auto_role import Flip
from pd_cluster.costs.linear_costs import StepCost, StepWork
from pd_cluster.process_messages import Busy, Stats
from pd_cluster.wire import Load
from tests.support.elastic_world import ElasticWorld
from tests.support.router_world import info_of

Observe = Callable[[float, list[Instance]], Flip | None]


class Phase(NamedTuple):
    """A period of steady Poisson load with log-normal lengths of these means; sigma 0: equal lengths."""

    duration_s: float
    rate_per_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    sigma: float = 0.0


class Pace(NamedTuple):
    """The speed of every instance."""

    prompt_tokens_per_s: float = 2000.0
    step_s: float = 0.05
    num_seqs: int = 32


@dataclass(slots=True)
class Asked:
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    first_s: float = 0.0
    last_s: float = 0.0

    def meets(self, ttft_s: float, tpot_s: float) -> bool:
        tpot = (self.last_s - self.first_s) / max(1, self.num_output_tokens - 1)
        return self.last_s > 0 and self.first_s - self.at_s <= ttft_s and tpot <= tpot_s


def arrivals_of(phases: list[Phase], seed: int) -> Iterator[Asked]:
    random_, begun_s = random.Random(seed), 0.0
    for phase in phases:
        at_s = begun_s
        while phase.rate_per_s and (at_s := at_s + random_.expovariate(phase.rate_per_s)) < begun_s + phase.duration_s:
            prompt, output = (
                max(2, round(mean * random_.lognormvariate(-(phase.sigma**2) / 2, phase.sigma)))
                for mean in (phase.num_prompt_tokens, phase.num_output_tokens)
            )
            yield Asked(at_s, prompt, output)
        begun_s += phase.duration_s


@dataclass(slots=True)
class Engine:
    """An instance's work. `made`: steps so far, by which each sequence's progress is measured."""

    instance: Instance
    prompts: deque[Asked] = field(default_factory=deque)
    free_s: float = 0.0  # when its first prompt will be computed
    seats: list[tuple[float, int, Asked]] = field(default_factory=list)  # (`made` at its end, number, request)
    queue: deque[Asked] = field(default_factory=deque)
    made: float = 0.0
    at_s: float = 0.0


class RoleWorld:
    """`flips`: time and result of each change of roles."""

    def __init__(self, num_prefill: int, num_decode: int, pace: Pace, drain_timeout_s: float = 60.0) -> None:
        self.cluster = ElasticWorld(num_prefill, num_decode)
        self.pace, self.drain_timeout_s = pace, drain_timeout_s
        self.engines = {each.name: Engine(each) for each in self.cluster.membership.instances}
        self.flips: list[tuple[float, str]] = []
        self.done: list[Asked] = []
        self._counts = dict.fromkeys(
            (
                *("arrived_requests", "arrived_prompt_tokens", "arrived_prompt_pairs", "arrived_answers"),
                *("arrived_max_tokens", "prompt_tokens_computed", "generation_tokens", "finished_length"),
            ),
            0,
        )
        self._number, self._num_generated = 0, 0.0
        for each in self.cluster.membership.instances:
            each.info = info_of(each.name, each.role, max_num_seqs=pace.num_seqs)
            each.load = Load(step_cost=StepCost(step_s=pace.step_s, prompt_token_s=1 / pace.prompt_tokens_per_s))

    def figures(self) -> tuple[Stats, Busy]:
        self._counts["generation_tokens"] = int(self._num_generated)
        return Stats(self._counts), Busy()

    @property
    def split(self) -> tuple[int, int]:
        roles = [each.role for each in self.cluster.membership.instances]
        return roles.count("prefill"), roles.count("decode")

    def run(self, phases: list[Phase], seed: int, observe: Observe | None = None) -> list[Asked]:
        """Returns all arrived requests in order when the last phase ends; requests unfinished by then have no end."""
        arrivals = arrivals_of(phases, seed)
        found: list[Asked] = []
        following = next(arrivals, None)
        for second in range(1, round(sum(phase.duration_s for phase in phases)) + 1):
            while following is not None and following.at_s < second:
                found.append(following)
                self._arrive(following)
                following = next(arrivals, None)
            self._advance(float(second))
            if observe is not None:
                self._look(float(second), observe)
        return found

    def _look(self, now_s: float, observe: Observe) -> None:
        instances = self.cluster.membership.instances
        self.cluster.now_s = now_s
        self.cluster.elastic.tick()
        for engine in self.engines.values():
            self._report(engine)
        if (flip := observe(now_s, instances)) is not None:
            self.flips.append((now_s, flip.role))
            self.cluster.elastic.change_role(flip.name, flip.role, timeout_s=self.drain_timeout_s)

    def _report(self, engine: Engine) -> None:
        instance, num_prompts, num_seats = engine.instance, len(engine.prompts), len(engine.seats)
        num_tokens = sum(each.num_prompt_tokens for each in engine.prompts)
        instance.num_outstanding = num_prompts + num_seats + len(engine.queue)
        instance.outstanding_tokens = num_tokens + num_seats + len(engine.queue)
        instance.load = replace(
            instance.load,
            num_running=num_seats + (num_prompts > 0),
            num_waiting=max(0, num_prompts - 1) + len(engine.queue),
            num_queued_tokens=num_tokens,
            decode_work=StepWork(num_rows=num_seats),
        )

    def _choose(self, role: str) -> Engine:
        found = [each for each in self.engines.values() if each.instance.role == role and each.instance.takes_requests]
        if role == "prefill":
            return min(found, key=lambda each: sum(asked.num_prompt_tokens for asked in each.prompts))
        return min(found, key=lambda each: len(each.seats) + len(each.queue))

    def _arrive(self, asked: Asked) -> None:
        self._advance(asked.at_s)
        prompt, counts = asked.num_prompt_tokens, self._counts
        counts["arrived_requests"] += 1
        counts["arrived_answers"] += 1
        counts["arrived_prompt_tokens"] += prompt
        counts["arrived_prompt_pairs"] += prompt * (prompt - 1) // 2
        counts["arrived_max_tokens"] += 4096
        engine = self._choose("prefill")
        if not engine.prompts:
            engine.free_s = asked.at_s + prompt / self.pace.prompt_tokens_per_s
        engine.prompts.append(asked)

    def _advance(self, now_s: float) -> None:
        """Computes prompts up to `now_s` in order of completion, and decodes the sequences that they begin."""
        while True:
            busy = [each for each in self.engines.values() if each.prompts]
            engine = min(busy, key=lambda each: each.free_s, default=None)
            if engine is None or engine.free_s > now_s:
                break
            asked, at_s = engine.prompts.popleft(), engine.free_s
            asked.first_s = at_s
            if engine.prompts:
                engine.free_s += engine.prompts[0].num_prompt_tokens / self.pace.prompt_tokens_per_s
            self._counts["prompt_tokens_computed"] += asked.num_prompt_tokens
            target = self._choose("decode")
            self._decode(target, at_s)
            target.queue.append(asked)
            self._seat(target)
        for engine in self.engines.values():
            self._decode(engine, now_s)

    def _decode(self, engine: Engine, now_s: float) -> None:
        while engine.seats:
            ends, _, asked = engine.seats[0]
            end_s = engine.at_s + (ends - engine.made) * self.pace.step_s
            if end_s > now_s:
                num_tokens = (now_s - engine.at_s) / self.pace.step_s
                self._num_generated += num_tokens * len(engine.seats)
                engine.made += num_tokens
                break
            self._num_generated += (ends - engine.made) * len(engine.seats)
            self._counts["finished_length"] += 1
            engine.made, engine.at_s, asked.last_s = ends, end_s, end_s
            heapq.heappop(engine.seats)
            self._seat(engine)
        engine.at_s = now_s

    def _seat(self, engine: Engine) -> None:
        while engine.queue and len(engine.seats) < self.pace.num_seqs:
            asked, self._number = engine.queue.popleft(), self._number + 1
            heapq.heappush(engine.seats, (engine.made + asked.num_output_tokens, self._number, asked))
