"""The scheduler and its block accounting have the same plans and counts as a brute-force reference in every step."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.state_checkpoints import KeepRule
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import STATE, Rule, within
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.types import Request, RequestSpec, Sampling, Status, TokenOutput
from tests.support.reference_groups import ReferenceGroup
from tests.support.reference_scheduler import PEER_BLOCK, Job, Reference, ReferencePlan

LONGEST = 36
KINDS = ("all", "window", "all window", "all state", "window state", "all window state")  # groups of layers


def random_rules(rng: random.Random, kind: str) -> list[Rule]:
    rules = {"all": within(None), "window": within(rng.choice([1, 3, 8, 17])), "state": STATE}
    return [rules[name] for name in kind.split()]


class Both:
    """Sends the same traffic through both. Tokens are a function of request, index and position."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 7])
        max_seqs, budget = rng.randrange(1, 9), rng.randrange(1, 25)
        caches, keep_rule = (
            rng.random() < 0.8,
            KeepRule(rng.choice(["none", "align", "align", "all"]), rng.randrange(2, 20)),
        )
        groups, references = [], []
        for rule in random_rules(rng, rng.choice(KINDS)):
            least = 1 if rule.is_state else -(-LONGEST // block_size)
            num_blocks, num_swap_blocks = least + rng.randrange(0, 14), rng.choice([0, 5, 30])
            groups.append(LayerGroup(BlockPool(num_blocks), rule, BlockPool(num_swap_blocks)))
            references.append(
                ReferenceGroup(num_blocks, block_size, num_swap_blocks, rule.window or None, rule.is_state)
            )
        prefix = PrefixScope("model", Numerics()) if caches else None
        self.real = StepScheduler(groups, StepSizes(block_size, max_seqs, budget), prefix, keep_rule)
        self.reference = Reference(references, max_seqs, budget, caches, *keep_rule)
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
                assert not any(each.blocks.num_held + each.swap.num_held for each in self.real.groups)
                return
        raise AssertionError("a request never ends")

    def arrive(self) -> None:
        rng, name = self.rng, f"r{self.count}"
        self.count += 1
        prompt = [9, 8, 7, 6] * rng.choice([0, 1, 3]) + [rng.randrange(3) for _ in range(rng.randrange(1, 10))]
        leg = rng.choice(["hybrid", "hybrid", "prefill", "decode"])
        sampling = Sampling(max_tokens=rng.randrange(1, LONGEST - len(prompt)), n=rng.choice([1, 1, 2, 3]))
        salt = rng.choice(["", "", "x"])
        priority = rng.choice([0, 0, 0, -1, 2])
        request = Request(
            name, RequestSpec(prompt, sampling, cache_salt=salt, priority=priority), arrival_s=self.now_s, leg=leg
        )  # type: ignore[arg-type]
        order = (priority, self.now_s, name, 0)
        job = Job(request.key, order, list(prompt), len(prompt), salt, leg, sampling.n)
        if leg == "decode":
            num_tokens = len(prompt) + min(sampling.max_tokens, 4)
            can = self.real.can_land(request, num_tokens)
            assert can == self.reference.can_land(job, num_tokens)
            if can:
                first_tokens = self.real.land(request, num_tokens)
                assert first_tokens == self.reference.land(job, num_tokens)
                self.seen["landed on cached blocks"] += max(first_tokens) > 0
                self.landing.append(request)
            return
        self.real.add(request)
        self.reference.add(job)

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
        plan, expected = self.real.plan(), self.reference.plan()
        self.check_plan(plan, expected)
        if plan.chunks and self.rng.random() < 0.03:  # as if its guide was not ready or it was aborted
            taken_out, _ = plan.chunks.pop(self.rng.randrange(len(plan.chunks)))
            del expected.chunks[taken_out.key]
            self.seen["kept in vain"] += any(keep.request is taken_out for keep in plan.keeps)
        ready = self.real.computed(plan)
        self.reference.keep(expected)
        for key, num_tokens in expected.chunks.items():
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

    def check_plan(self, plan: StepPlan, expected: ReferencePlan) -> None:
        """Asserts the same chunks, admissions, preemptions, moved and cleared blocks, and kept states."""
        assert [(r.key, n) for r, n in plan.chunks] == list(expected.chunks.items())
        assert [r.key for r in plan.admitted] == expected.admitted
        assert [r.key for r in plan.preempted] == expected.preempted
        assert Counter((move.kind, move.group) for move in plan.moves) == +expected.moves
        assert [(k.request.key, k.num_tokens) for k in plan.keeps] == [(job.key, at) for job, at, _ in expected.keeps]
        self.seen.update(plans=1, preempted=len(plan.preempted), **{f"move {m.kind}": 1 for m in plan.moves})
        at_state = len(self.real.groups) - 1 if self.real.groups[-1].rule.is_state else None
        self.seen["state copied"] += any((m.kind, m.group) == ("copy", at_state) for m in plan.moves)
        self.seen["state kept"] += len(plan.keeps)
        self.seen["kept where prompts part"] += sum(job.parting == at for job, at, _ in expected.keeps)
        self.seen["state hit"] += at_state is not None and any(r.num_cached_tokens > 0 for r in plan.admitted)

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
        reference = self.reference
        for real, group in zip(self.real.groups, reference.groups, strict=True):
            pool = real.blocks
            found = (pool.num_free, pool.num_cached, pool.num_held, real.swap.num_free)
            expected = (len(group.free()), len(group.cached()), len(group.held()), group.swap_room)
            assert found == expected, f"(free, cached, held, swap) of group {real.at} is {found} instead of {expected}"
        for key, job in reference.jobs.items():
            request = self.real.requests[key]
            assert (request.status.value, request.num_computed_tokens) == (job.status, job.computed)
            for real in self.real.groups:
                passed = [block == real.padding_block for block in request.tables[real.at]]
                assert passed == [block is None for block in job.tables[real.at]]
                self.seen["passed by the window"] += any(passed)
                self.seen["passed of a prefill leg"] += request.leg == "prefill" and any(passed)
        assert len(self.real.requests) == len(reference.jobs)
        for request in [r for r in self.real.requests.values() if r.status is Status.EXPORTING]:
            if self.rng.random() < 0.3:
                self.finish(request)
        self.seen["cached"] += self.real.blocks.num_cached > 0


@pytest.fixture(autouse=True)
def _small_peer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes windows pass blocks even of the short prompts that are handed over."""
    monkeypatch.setattr("pd_cluster.engine.scheduling.group_holdings.MAX_PEER_BLOCK_SIZE", PEER_BLOCK)


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
    seen = explore(range(100))
    assert seen["plans"] >= 10_000
    kinds = ["preempted", "forked", "forked to wait", "cached", "landed on cached blocks"]
    kinds += ["passed by the window", "passed of a prefill leg"]
    states = ["state copied", "state kept", "state hit", "kept where prompts part", "kept in vain"]
    for what in (*kinds, *states, "move copy", "move out", "move in", "move clear"):
        assert seen[what] > 10, f"{what} was hardly seen: {seen}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_much_random_traffic() -> None:
    explore(range(1000, 4000))
