"""Sends random requests with all features through the real scheduler, core and sampler, over modelled memory.

Every output must equal the request's output alone, whatever was shared, preempted, swapped, forked or aborted.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.state_checkpoints import KeepRule
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.step.commit import StepResult
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import STATE, Rule, within
from pd_cluster.kv.host_tier import HostTier, LoadCost
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.types import Logprobs, PromptOutput, Request, RequestSpec, Sampling, Status
from tests.support.drafts import liars
from tests.support.toy_model import VOCAB_SIZE, ToyRunner, generate_alone, told_alone

LONGEST = 40
ONE = ("all", "all", "window")  # rules for a model with one group of layers


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
    """Returns a prompt that often begins with another prompt, or with a part of it."""
    shared = [1, 2, 4, 5] * 5
    return shared[: rng.choice([0, 3, 8, 16, 20])] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]


def sampling_ahead(rng: random.Random) -> Sampling:
    """Returns sampling parameters that allow steps to be launched ahead of the host."""
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


def random_groups(rng: random.Random, rules: Sequence[Rule], block_size: int, has_prefix: bool) -> list[LayerGroup]:
    """Returns a small group for each rule; a single group may also have a host tier."""
    groups = []
    for rule in rules:
        num_blocks = (1 if rule.is_state else -(-LONGEST // block_size)) + rng.randrange(0, 12)
        num_swap_blocks = rng.choice([0, 0, 6, 40])
        num_kept = rng.choice([0, 0, 1, 5, 30]) if has_prefix and len(rules) == 1 else 0
        tier = HostTier(num_kept, num_swap_blocks, LoadCost(block_size)) if num_kept else None
        groups.append(LayerGroup(BlockPool(num_blocks, tier=tier), rule, BlockPool(num_swap_blocks)))
    return groups


class Traffic:
    """`launches`: the runner launches ahead if it can, and most requests allow it. `drafts`: all requests may draft.

    `kinds`: possible lists of group rules, of which one is chosen.
    """

    def __init__(self, seed: int, launches: bool = False, drafts: bool = False, kinds: Sequence[str] = ONE) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 7])
        prefix = PrefixScope("model", Numerics()) if rng.random() < 0.8 else None
        rules = {"all": within(None), "window": within(rng.choice([1, 5, 12])), "state": STATE}
        rules_here = [rules[name] for name in rng.choice(kinds).split()]
        groups = random_groups(rng, rules_here, block_size, prefix is not None)
        self.runner = ToyRunner.over(groups, block_size)
        self.runner.goes_ahead = launches
        sizes = StepSizes(block_size, rng.randrange(2, 10), rng.randrange(1, 30))
        keep_rule = KeepRule(rng.choice(["none", "align", "align", "all"]), rng.randrange(2, 20))
        self.scheduler = StepScheduler(groups, sizes, prefix, keep_rule)
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
            self.note(self.core.step(self.begins))
            self.scheduler.check()
            for request in self.scheduler.requests.values():
                assert request.num_hashed_blocks <= request.num_computed_tokens // self.scheduler.block_size
                assert request.num_behind > 0 or request.status is not Status.RUNNING
            if len(self.requests) == num_requests and not self.scheduler.requests:
                return
        raise AssertionError("some request never ends")

    def submit(self, name: str, now_s: float) -> None:
        prompt = random_prompt(self.rng)
        goes_ahead = self.runner.goes_ahead and self.rng.random() < 0.95
        sampling = sampling_ahead(self.rng) if goes_ahead else random_sampling(self.rng, len(prompt))
        request = Request(name, RequestSpec(prompt, sampling), arrival_s=now_s)
        self.requests[name] = request
        self.scheduler.add(request)

    def abort(self, victim: Request) -> None:
        self.aborted.add(victim.request_id)
        for sequence in [r for r in self.scheduler.requests.values() if r.request_id == victim.request_id]:
            self.scheduler.finish(sequence)

    def begins(self, plan: StepPlan) -> None:
        """Sometimes removes a sequence from a step, as if it was aborted or its guide was not ready."""
        if len(self.scheduler.groups) > 1 and not self.runner.goes_ahead and plan.chunks and self.rng.random() < 0.05:
            plan.chunks.pop(self.rng.randrange(len(plan.chunks)))

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
        assert not any(each.blocks.num_held + each.swap.num_held for each in self.scheduler.groups)
        return Counter(
            preemptions=self.scheduler.num_preemptions,
            hits=self.scheduler.num_prefix_hit_tokens,
            tier=self.scheduler.num_tier_hit_tokens,
            ahead=self.core.ahead.num_ahead,
            drafts=self.core.drafting.totals.num_draft_tokens,
            accepted=self.core.drafting.totals.num_accepted_tokens,
            kept=self.runner.num_kept,
            **self.runner.num_moves,
        )


def explore(
    seeds: range, num_requests: int = 25, launches: bool = False, drafts: bool = False, kinds: Sequence[str] = ONE
) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        traffic = Traffic(seed, launches, drafts, kinds)
        try:
            traffic.run(num_requests)
            seen += traffic.verify()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    return seen
