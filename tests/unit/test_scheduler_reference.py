"""The scheduler and its block accounting against a brute-force reference: same plans, same counts, every step."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pd_cluster.engine.step.group import LayerGroup
from pd_cluster.engine.step.scheduler import StepScheduler, StepSizes
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.prefix import PrefixScope
from pd_cluster.kv.rule import within
from pd_cluster.numerics import Numerics
from pd_cluster.types import Order, Request, Sampling, Status, TokenOutput
from tests.support.reference_scheduler import Job, Reference

LONGEST = 36


class Both:
    """The same traffic through both. Tokens are a function of request, index and position."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 7])
        num_blocks = -(-LONGEST // block_size) + rng.randrange(0, 14)
        max_seqs, budget = rng.randrange(1, 9), rng.randrange(1, 25)
        caches, num_swap_blocks = rng.random() < 0.8, rng.choice([0, 5, 30])
        window = rng.choice([None, 1, 3, 8, 17])
        self.real = StepScheduler(
            [LayerGroup(BlockPool(num_blocks), within(window), BlockPool(num_swap_blocks))],
            StepSizes(block_size, max_seqs, budget),
            PrefixScope("model", Numerics()) if caches else None,
        )
        self.reference = Reference(num_blocks, block_size, max_seqs, budget, caches, num_swap_blocks, window)
        self.count = 0
        self.now_s = 0.0
        self.landing: list[Request] = []
        self.seen: Counter[str] = Counter()

    def run(self, num_requests: int) -> None:
        for _ in range(5000):
            self.now_s += 1.0
            if self.count < num_requests and self.rng.random() < 0.5:
                self.arrive()
            if self.landing and self.rng.random() < 0.5:
                self.land()
            if self.rng.random() < 0.04:
                self.abort()
            self.step()
            self.compare()
            if self.count == num_requests and not self.real.requests:
                assert not self.reference.jobs
                return
        raise AssertionError("somebody starves")

    def arrive(self) -> None:
        rng, name = self.rng, f"r{self.count}"
        self.count += 1
        prompt = [9, 8, 7, 6] * rng.choice([0, 1, 3]) + [rng.randrange(3) for _ in range(rng.randrange(1, 10))]
        leg = rng.choice(["hybrid", "hybrid", "prefill", "decode"])
        sampling = Sampling(max_tokens=rng.randrange(1, LONGEST - len(prompt)), n=rng.choice([1, 1, 2, 3]))
        salt = rng.choice(["", "", "x"])
        priority = rng.choice([0, 0, 0, -1, 2])
        request = Request(
            name, Order(prompt, sampling, cache_salt=salt, priority=priority), arrival_s=self.now_s, leg=leg
        )  # type: ignore[arg-type]
        order = (priority, self.now_s, name, 0)
        job = Job(request.key, order, list(prompt), len(prompt), salt, leg, sampling.n)
        if leg == "decode":
            num_tokens = len(prompt) + min(sampling.max_tokens, 4)
            can = self.real.can_land(request, num_tokens)
            assert can == self.reference.can_land(job, num_tokens)
            if can:
                first_token = self.real.land(request, num_tokens)
                assert first_token == [self.reference.land(job, num_tokens)]
                self.seen["landed on cached blocks"] += first_token[0] > 0
                self.landing.append(request)
            return
        self.real.add(request)
        self.reference.jobs[job.key] = job

    def land(self) -> None:
        request = self.landing.pop(self.rng.randrange(len(self.landing)))
        job = self.reference.jobs[request.key]
        if self.rng.random() < 0.2:
            self.finish(request)
            return
        self.real.landed(request)
        job.computed, job.status = job.prompt, "running"
        self.reference.remember(job)
        self.first_tokens(request, job)

    def abort(self) -> None:
        candidates = [r for r in self.real.requests.values() if r.status is not Status.LANDING]
        if candidates:
            self.finish(self.rng.choice(candidates))

    def finish(self, request: Request) -> None:
        self.reference.finish(self.reference.jobs[request.key])
        self.real.finish(request)

    def step(self) -> None:
        plan = self.real.plan()
        found = [(r.key, n) for r, n in plan.chunks]
        expected, admitted, preempted = self.reference.plan()
        assert found == expected
        assert [r.key for r in plan.admitted] == admitted
        assert [r.key for r in plan.preempted] == preempted
        self.seen.update(preempted=len(preempted), **{f"move {m.kind}": 1 for m in plan.moves})
        ready = self.real.computed(plan)
        for key, num_tokens in expected:
            self.reference.jobs[key].computed += num_tokens
            self.reference.remember(self.reference.jobs[key])
            self.reference.slide(self.reference.jobs[key])
        for request in ready:
            job = self.reference.jobs[request.key]
            assert job.behind == 0
            if request.output_token_ids:
                self.next_token(request, job)
            elif request.leg == "prefill":
                self.real.export(request)
                job.status = "exporting"
            else:
                self.first_tokens(request, job)

    def first_tokens(self, request: Request, job: Job) -> None:
        ends = self.rng.randrange(-2, request.sampling.n)
        tokens = [
            TokenOutput(request.request_id, 0, index, 0, index % 3, "stop" if index == ends else None)
            for index in range(request.sampling.n)
        ]
        sequences = self.real.start_sequences(request, tokens)
        for token in tokens:
            if token.finish_reason is None:
                own = job if token.index == 0 else self.reference.fork(job, token.index)
                own.tokens = [*own.tokens[: own.prompt], token.token_id]
        if tokens[0].finish_reason is not None:
            self.reference.finish(job)
        self.seen["forked"] += sum(1 for s in sequences if s is not request)
        self.seen["forked to wait"] += sum(1 for s in sequences if s.status is Status.WAITING)

    def next_token(self, request: Request, job: Job) -> None:
        token = (len(request.output_token_ids) * 7 + request.index) % 3
        request.output_token_ids.append(token)
        job.tokens.append(token)
        if len(request.output_token_ids) >= request.sampling.max_tokens:
            self.finish(request)

    def compare(self) -> None:
        self.real.check()
        pool, reference = self.real.blocks, self.reference
        found = (pool.num_free, pool.num_cached, pool.num_held, self.real.swap.num_free)
        expected = (len(reference.free()), len(reference.cached()), len(reference.held()), reference.swap_room)
        assert found == expected, f"(free, cached, held, swap) is {found} instead of {expected}"
        for key, job in reference.jobs.items():
            request = self.real.requests[key]
            assert (request.status.value, request.num_computed_tokens) == (job.status, job.computed)
            passed = [block == pool.num_blocks for block in request.tables[0]]
            assert passed == [block is None for block in job.blocks]
            self.seen["passed by the window"] += any(passed)
        assert len(self.real.requests) == len(reference.jobs)
        for request in [r for r in self.real.requests.values() if r.status is Status.EXPORTING]:
            if self.rng.random() < 0.3:
                self.finish(request)
        self.seen["cached"] += pool.num_cached > 0


def explore(seeds: range) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        both = Both(seed)
        try:
            both.run(num_requests=25)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        seen += both.seen
    return seen


def test_random_traffic_is_planned_as_the_reference_plans_it() -> None:
    seen = explore(range(50))
    kinds = ["preempted", "forked", "forked to wait", "cached", "landed on cached blocks", "passed by the window"]
    for what in (*kinds, "move copy", "move out", "move in"):
        assert seen[what] > 10, f"{what} was hardly seen: {seen}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_much_random_traffic() -> None:
    explore(range(1000, 4000))
