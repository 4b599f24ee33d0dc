"""Random traffic of all features through the real scheduler, core and sampler, over a model of memory.

Every output must be what the request gives alone, whatever was shared, preempted, swapped, forked or aborted beside it.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from pd_cluster.engine.step import acceptance
from pd_cluster.engine.step import core as core_module
from pd_cluster.engine.step.commit import StepResult
from pd_cluster.engine.step.core import EngineCore
from pd_cluster.engine.step.group import LayerGroup
from pd_cluster.engine.step.plan import StepPlan
from pd_cluster.engine.step.scheduler import StepScheduler, StepSizes
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.prefix import PrefixScope
from pd_cluster.kv.rule import within
from pd_cluster.numerics import Numerics
from pd_cluster.types import Logprobs, Order, PromptOutput, Request, Sampling, Status
from tests.support.drafts import liars
from tests.support.toy_model import VOCAB_SIZE, ToyRunner, generate_alone, told_alone

LONGEST = 40
SEEDS = range(12)


def random_sampling(rng: random.Random, num_prompt: int) -> Sampling:
    max_tokens = rng.randrange(1, min(20, LONGEST - num_prompt) + 1)
    temperature = rng.choice([0.0, 0.7, 1.5])
    beam_width = rng.choice([0, 2, 3, 4]) if not temperature else 0
    return Sampling(
        n=rng.randrange(1, beam_width + 1) if beam_width else rng.choice([1, 1, 1, 2, 3, 4]) if temperature else 1,
        beam_width=beam_width,
        length_penalty=rng.choice([1.0, 0.0, -1.0, 2.0]),
        early_stopping=rng.choice([False, True, "never"]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, max_tokens // 2]),
        temperature=temperature,
        top_k=rng.choice([-1, 5]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(1000),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 1]))),
        ignore_eos=rng.random() < 0.3,
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, -0.3]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        logit_bias=((7, 2.0),) if rng.random() < 0.1 else (),
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
    )


def random_prompt(rng: random.Random) -> list[int]:
    """Often the beginning of another prompt, or the whole of it."""
    shared = [1, 2, 4, 5] * 5
    return shared[: rng.choice([0, 3, 8, 16, 20])] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]


def sampling_ahead(rng: random.Random) -> Sampling:
    """Returns sampling with which a device can continue on its own."""
    max_tokens = rng.randrange(1, 16)
    ids = range(VOCAB_SIZE)
    return Sampling(
        n=1,
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, max_tokens // 2]),
        temperature=rng.choice([0.0, 1.0]),
        min_p=rng.choice([0.0, 0.05]),
        top_k=rng.choice([-1, 5]),
        top_p=rng.choice([1.0, 0.8]),
        seed=rng.randrange(1000),
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 1]))),
        ignore_eos=rng.random() < 0.7,
        logit_bias=tuple((i, rng.uniform(-5, 5)) for i in rng.sample(ids, 6)) if rng.random() < 0.2 else (),
        allowed_token_ids=tuple(rng.sample(ids, 12)) if rng.random() < 0.2 else (),
        bad_words=tuple(tuple(rng.choices(ids, k=rng.choice([1, 1, 2]))) for _ in range(60 * (rng.random() < 0.2))),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.0, -0.8]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.5]),
        logprobs=rng.choice([None, None, None, 0, 3]),
    )


class Traffic:
    """`launches`: the runner goes ahead of the host where it can, and most requests let it. `drafts`: all may draft."""

    def __init__(self, seed: int, launches: bool = False, drafts: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 7])
        num_blocks = -(-LONGEST // block_size) + rng.randrange(0, 12)
        num_swap_blocks = rng.choice([0, 0, 6, 40])
        prefix = PrefixScope("model", Numerics()) if rng.random() < 0.8 else None
        window = rng.choice([None, None, 1, 5, 12])
        num_kept = rng.choice([0, 0, 1, 5, 30]) if prefix is not None else 0
        tier = HostTier(num_kept, num_swap_blocks, LoadCost(block_size)) if num_kept else None
        self.runner = ToyRunner(num_blocks, block_size, num_swap_blocks + num_kept, window)
        self.runner.goes_ahead = launches
        self.scheduler = StepScheduler(
            [LayerGroup(BlockPool(num_blocks, tier=tier), within(window), BlockPool(num_swap_blocks))],
            StepSizes(block_size, rng.randrange(2, 10), rng.randrange(1, 30)),
            prefix,
        )
        drafting = liars(self.scheduler, random.Random(seed), self.truth, VOCAB_SIZE) if drafts else None
        self.core = EngineCore(self.runner, self.scheduler, drafting=drafting)
        self.truths: dict[str, list[list[int]]] = {}
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.told: dict[str, dict[int, list[Logprobs | None]]] = defaultdict(lambda: defaultdict(list))
        self.reasons: dict[str, dict[int, str]] = defaultdict(dict)
        self.prompts: dict[str, PromptOutput] = {}
        self.aborted: set[str] = set()
        self.oldest_progress: tuple[str, int] = ("", 0)

    def truth(self, request: Request) -> list[int]:
        known = self.truths.get(request.request_id)
        if known is None:
            known = self.truths[request.request_id] = generate_alone(request.prompt_token_ids, request.sampling)
        return known[request.index]

    def run(self, num_requests: int) -> None:
        now_s = 0.0
        for _ in range(20_000):
            now_s += 1.0
            if len(self.requests) < num_requests and self.rng.random() < 0.5:
                self.submit(f"r{len(self.requests)}", now_s)
            if self.scheduler.requests and self.rng.random() < 0.03:
                self.abort(self.rng.choice(list(self.scheduler.requests.values())))
            self.note(self.core.step())
            self.scheduler.check()
            for request in self.scheduler.requests.values():
                assert request.num_hashed_blocks <= request.num_computed_tokens // self.scheduler.block_size
                assert request.num_behind > 0 or request.status is not Status.RUNNING
            if len(self.requests) == num_requests and not self.scheduler.requests:
                return
        raise AssertionError("somebody starves")

    def submit(self, name: str, now_s: float) -> None:
        prompt = random_prompt(self.rng)
        goes_ahead = self.runner.goes_ahead and self.rng.random() < 0.95
        sampling = sampling_ahead(self.rng) if goes_ahead else random_sampling(self.rng, len(prompt))
        request = Request(name, Order(prompt, sampling), arrival_s=now_s)
        self.requests[name] = request
        self.scheduler.add(request)

    def abort(self, victim: Request) -> None:
        self.aborted.add(victim.request_id)
        for sequence in [r for r in self.scheduler.requests.values() if r.request_id == victim.request_id]:
            self.scheduler.finish(sequence)

    def note(self, result: StepResult) -> None:
        assert result.plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert self.scheduler.num_seqs <= self.scheduler.max_num_seqs
        for _, prompt in result.prompts:
            assert prompt.request_id not in self.prompts
            self.prompts[prompt.request_id] = prompt
        for request, token in result.sampled:
            known = self.outputs[token.request_id][token.index]
            assert token.position == len(known)
            known.append(token.token_id)
            self.told[token.request_id][token.index].append(token.logprobs)
            assert (token.logprobs is not None) == (request.sampling.logprobs is not None)
            if token.finish_reason is not None:
                self.reasons[token.request_id][token.index] = token.finish_reason

    def verify(self) -> Counter[str]:
        for name, request in self.requests.items():
            assert request.status is Status.FINISHED
            expected = generate_alone(request.prompt_token_ids, request.sampling)
            found = self.outputs[name]
            if not request.sampling.beam_width:
                for index, ids in found.items():
                    assert self.told[name][index] == told_alone(request.prompt_token_ids, ids, request.sampling), name
            if name in self.aborted:
                assert all(expected[index][: len(ids)] == ids for index, ids in found.items())
                continue
            assert [found[index] for index in range(request.sampling.n)] == expected, name
            assert len(self.reasons[name]) == request.sampling.n
            logprobs = self.prompts[name].logprobs
            wanted = request.sampling.prompt_logprobs is not None
            assert [entry is None for entry in logprobs] == [at == 0 for at in range(len(logprobs))]
            assert len(logprobs) == (len(request.prompt_token_ids) if wanted else 0)
        assert self.scheduler.blocks.num_held == 0
        assert self.scheduler.swap.num_held == 0
        return Counter(
            preemptions=self.scheduler.num_preemptions,
            hits=self.scheduler.num_prefix_hit_tokens,
            tier=self.scheduler.num_tier_hit_tokens,
            ahead=self.core.ahead.num_ahead,
            drafts=self.core.drafting.totals.num_draft_tokens,
            accepted=self.core.drafting.totals.num_accepted_tokens,
            **self.runner.num_moves,
        )


def explore(seeds: range, num_requests: int = 25, launches: bool = False, drafts: bool = False) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        traffic = Traffic(seed, launches, drafts)
        try:
            traffic.run(num_requests)
            seen += traffic.verify()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return seen


def test_random_traffic_gives_the_tokens_of_each_request_alone() -> None:
    seen = explore(SEEDS)
    for what in ("preemptions", "hits", "tier", "copy", "out", "in"):
        assert seen[what] > 10, f"{what} was hardly seen: {seen}"


def test_a_step_ahead_of_the_host_changes_no_token() -> None:
    """Whatever stops, is aborted, arrives or gives way meanwhile."""
    seen = explore(range(300, 315), launches=True)
    for what, least in (("ahead", 100), ("preemptions", 10), ("hits", 10), ("tier", 10)):
        assert seen[what] > least, f"{what} was hardly seen: {seen}"


@pytest.mark.parametrize("launches", [False, True])
def test_drafts_change_no_token(launches: bool) -> None:
    """Right ones, wrong ones, tokens that the model lacks, as many as a random number says."""
    seen = explore(range(500, 512), launches=launches, drafts=True)
    least = {"drafts": 200, "accepted": 100, "preemptions": 1, "hits": 10, "tier": 10, "ahead": 10 * launches - 1}
    for what, number in least.items():
        assert seen[what] > number, f"{what} was hardly seen: {seen}"


@pytest.mark.parametrize("fault", ["booked too early", "another row", "another position"])
def test_faults_of_acceptance_are_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "booked too early":
        advance = StepScheduler.computed

        def computed(scheduler: StepScheduler, plan: StepPlan) -> list[Request]:
            ready = advance(scheduler, plan)
            for request, drafts in plan.drafts.items():
                request.num_computed_tokens += len(drafts)
            return ready

        monkeypatch.setattr(StepScheduler, "computed", computed)
        monkeypatch.setattr(StepScheduler, "accepted", lambda scheduler, request: None)
    elif fault == "another row":
        rows = acceptance.draft_rows
        monkeypatch.setattr(core_module, "draft_rows", lambda plan, first_row: rows(plan, max(0, first_row - 1)))
    else:
        monkeypatch.setattr(acceptance, "adjusts", lambda sampling, position: False)
    with pytest.raises((AssertionError, IndexError)):
        explore(range(500, 512), drafts=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_much_random_traffic_with_drafts() -> None:
    explore(range(5000, 5700), drafts=True)
    explore(range(5700, 6400), launches=True, drafts=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_much_random_traffic_a_step_ahead() -> None:
    explore(range(2500, 4000), launches=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_much_random_traffic() -> None:
    explore(range(1000, 2500))
