"""Beam search: the hypotheses it keeps, against an exhaustive search, and the blocks of its groups."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.step import beam_groups
from pd_cluster.engine.step.beam_search import BeamSearch, Growth, are_first_tokens, first_tokens_of
from pd_cluster.engine.step.engine_limits import EngineLimits
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import ALL
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.numerics import Numerics
from pd_cluster.types import Candidate, Request, RequestSpec, Sampling, Status, TokenOutput
from tests.support.reference_beams import search_everything

INF = math.inf


def search_params(width: int = 3, **fields: Any) -> Sampling:
    return Sampling(**{"n": width, "beam_width": width, "temperature": 0.0, "max_tokens": 6, **fields})


# ---- the policy


class Table:
    """Log-probabilities as a function of all tokens so far. `step` 0.5 makes many of them equal."""

    def __init__(self, rng: random.Random) -> None:
        self.seed = rng.random()
        self.vocab_size = rng.choice([3, 5, 12])
        self.step = rng.choice([None, None, 0.5])
        self.masked = rng.choice([0.0, 0.0, 0.3])
        self.ends = set(rng.sample(range(self.vocab_size), rng.choice([0, 1, 1, 2, 3])))

    def row(self, tokens: tuple[int, ...]) -> list[float]:
        rng = random.Random(repr((self.seed, tokens)))
        values = [-INF if rng.random() < self.masked else -rng.uniform(0, 4) for _ in range(self.vocab_size)]
        if self.step:
            values = [value if value == -INF else round(value / self.step) * self.step for value in values]
        return values if max(values) > -INF else [0.0, *values[1:]]

    def candidates(self, tokens: tuple[int, ...], width: int) -> list[Candidate]:
        """Returns the fewest candidates that a search may get."""
        best = sorted((-value, token) for token, value in enumerate(self.row(tokens)) if value > -INF)
        kept = {*best[:width], *[each for each in best if each[1] not in self.ends][:width]}
        return [Candidate(token, -negated, token in self.ends) for negated, token in sorted(kept)]


def search(table: Table, params: Sampling) -> list[list[int]]:
    found = BeamSearch(params)
    tokens: list[tuple[int, ...]] = [()]
    while not found.is_over:
        growths = found.advance([table.candidates(each, params.beam_width) for each in tokens])
        assert len(growths) <= params.beam_width
        tokens = [(*tokens[growth.parent], growth.token_id) for growth in growths]
    return [[candidate.token_id for candidate in each] for each in found.hypotheses(params.n)]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_the_hypotheses_are_those_of_a_search_through_everything(early_stopping: Any) -> None:
    rng = random.Random(f"{early_stopping}")
    lengths: Counter[str] = Counter()
    for at in range(150):
        table, width = Table(rng), rng.randrange(2, 6)
        params = search_params(
            width,
            n=rng.randrange(1, width + 1),
            max_tokens=rng.randrange(1, 8),
            length_penalty=rng.choice([0.0, 0.5, 1.0, 2.0, -1.0, -0.3]),
            early_stopping=early_stopping,
        )
        found = search(table, params)
        assert found == search_everything(table.row, params, table.ends), f"case {at}: {params}"
        lengths.update("full" if len(each) == params.max_tokens else "ended" for each in found)
    assert min(lengths["full"], lengths["ended"]) > 40


def test_each_way_to_stop_gives_an_answer_of_its_own() -> None:
    """The three rules for early stopping give different answers on the same tables."""
    differ: Counter[str] = Counter()
    for seed in range(100):
        found = []
        for rule in (True, False, "never"):
            params = search_params(2, max_tokens=12, length_penalty=2.0, early_stopping=rule)
            found.append(search(Table(random.Random(seed)), params))
        differ["eager"] += found[0] != found[1]
        differ["patient"] += found[1] != found[2]
    assert min(differ["eager"], differ["patient"]) > 5


def test_too_few_continuations_repeat_the_last_hypothesis() -> None:
    search = BeamSearch(search_params(3))
    assert search.advance([[Candidate(5, -0.1, True)]]) == []
    assert search.is_over
    assert [[c.token_id for c in each] for each in search.hypotheses(3)] == [[5], [5], [5]]


# ---- what is handed over

ROW = [Candidate(7, -0.5, False), Candidate(3, -1.0, True), Candidate(9, -1.0, False), Candidate(1, -2.0, False)]


def decode_request(**fields: Any) -> Request:
    return Request("r", RequestSpec([1] * 8, search_params(2, **fields)), leg="decode", transfer_id="t", peer="p")


def changed(at: int, **fields: Any) -> list[TokenOutput]:
    tokens = first_tokens_of(decode_request(), ROW)
    tokens[at] = msgspec.structs.replace(tokens[at], **fields)
    return tokens


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [*changed(0), TokenOutput("r", 0, 4, 0, 8, score=-3.0)],
        changed(0, request_id="other"),
        changed(0, attempt=1),
        changed(1, index=2),
        changed(0, position=1),
        changed(0, token_id=10),
        changed(0, token_id=-1),
        changed(1, token_id=7),
        changed(0, score=None),
        changed(0, score=math.nan),
        changed(0, score=INF),
        changed(0, score=-1.5),
        changed(2, token_id=2),
        changed(1, finish_reason="length"),
        first_tokens_of(decode_request(), [Candidate(7, -0.5, True), Candidate(3, -1.0, True)]),
    ],
)
def test_other_candidates_are_refused(tokens: list[TokenOutput]) -> None:
    assert not are_first_tokens(decode_request(), tokens, 10)


def test_candidates_are_first_tokens_unless_the_search_is_over() -> None:
    for row in (ROW, ROW[:1]):
        assert are_first_tokens(decode_request(), first_tokens_of(decode_request(), row), 10)
    over = decode_request(max_tokens=1)
    assert not are_first_tokens(over, first_tokens_of(over, ROW), 10)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"beam_width": 1}, "beam_width 1"),
        ({"beam_width": 129}, "beam_width 129"),
        ({"n": 3, "beam_width": 2}, "beam_width 2"),
        ({"temperature": 0.5}, "temperature 0"),
        ({"length_penalty": math.nan}, "length_penalty nan"),
        ({"length_penalty": 11.0}, "length_penalty 11.0"),
        ({"n": 120, "beam_width": 120, "max_tokens": 9_000}, "over 1000000 tokens"),
    ],
)
def test_an_engine_refuses_what_no_search_is(fields: dict[str, Any], said: str) -> None:
    limits = EngineLimits(100, 10_000, RopeLimit())
    assert limits.problem(Request("r", RequestSpec([1], search_params(2)))) is None
    problem = limits.problem(Request("r", RequestSpec([1], msgspec.structs.replace(search_params(2), **fields))))
    assert problem is not None
    assert said in problem


# ---- groups in a scheduler


def make(
    num_blocks: int, max_num_seqs: int = 8, budget: int = 16, caches: bool = False, swap: int = 0
) -> StepScheduler:
    prefix = PrefixScope("model", Numerics()) if caches else None
    return StepScheduler(
        [LayerGroup(BlockPool(num_blocks), ALL, BlockPool(swap))], StepSizes(4, max_num_seqs, budget), prefix
    )


def row_after(beam: Request) -> list[Candidate]:
    rng = random.Random(repr(beam.token_ids(0, beam.num_tokens)))
    tokens = rng.sample(range(50), beam.sampling.beam_width)
    return [Candidate(token, -(at + rng.random()) / 2, False) for at, token in enumerate(tokens)]


def step(scheduler: StepScheduler, answers: dict[str, list[TokenOutput]]) -> StepPlan:
    """Plans and computes a step, and extends every beam whose tokens are all computed."""
    plan = scheduler.plan()
    for beam in scheduler.computed(plan):
        change = beam_groups.advance(scheduler, beam, row_after(beam))
        if change.tokens:
            answers[beam.request_id] = change.tokens
    scheduler.check()
    assert scheduler.num_seqs <= scheduler.max_num_seqs
    return plan


def finish_all(scheduler: StepScheduler) -> dict[str, list[TokenOutput]]:
    answers: dict[str, list[TokenOutput]] = {}
    for _ in range(2000):
        step(scheduler, answers)
        if not scheduler.requests:
            assert scheduler.blocks.num_held == scheduler.swap.num_held == 0
            return answers
    raise AssertionError(f"requests did not finish: {[(r.key, r.status) for r in scheduler.requests.values()]}")


def beam_request(name: str, prompt: int, arrival_s: float = 0.0, width: int = 3, **fields: Any) -> Request:
    return Request(name, RequestSpec([1] * prompt, search_params(width, **fields)), arrival_s=arrival_s)


def test_beams_share_blocks_and_write_to_copies() -> None:
    scheduler = make(64)
    scheduler.add(beam_request("a", 10, width=4))
    step(scheduler, {})
    assert [r.index for r in scheduler.running] == [0, 1, 2, 3]
    assert scheduler.blocks.num_held == 3  # the prompt's blocks, shared by all four
    plan = step(scheduler, {})
    assert len(plan.moves) == 3  # all but one copy the third block, which is only partly filled
    assert scheduler.blocks.num_held <= 2 + 4
    scheduler = make(64)
    scheduler.add(beam_request("a", 5, width=2))
    step(scheduler, {})
    first, second = scheduler.running
    for beam in (first, second):
        beam.num_computed_tokens += 1  # as if the step had been computed
        scheduler.park(beam)
    children = beam_groups.regroup(scheduler, [first, second], [Growth(1, 8), Growth(1, 9)])
    assert children == [first, second]
    assert first.tables[0] == second.tables[0]
    assert [child.output_token_ids[-1] for child in children] == [8, 9]
    assert first.output_token_ids[:-1] == second.output_token_ids[:-1]
    plan = scheduler.plan()
    assert [move.kind for move in plan.moves] == ["copy"]
    assert first.tables[0][0] == second.tables[0][0]
    assert first.tables[0][1] != second.tables[0][1]


@pytest.mark.parametrize("swap", [0, 3, 40])
@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8])
def test_searches_end_however_scarce_everything_is(max_num_seqs: int, caches: bool, swap: int) -> None:
    """With blocks for one and a half sequences and several beam groups, each gets the same answer as alone."""
    rng = random.Random(f"{max_num_seqs} {caches} {swap}")
    for _ in range(3):
        scheduler = make(rng.randrange(6, 10), max_num_seqs, rng.choice([1, 3, 16]), caches, swap)
        requests = []
        for at in range(4):
            prompt, width, most = rng.randrange(1, 13), rng.randrange(2, 5), rng.randrange(1, 12)
            requests.append(beam_request(f"r{at}", prompt, float(at), width, max_tokens=most))
            scheduler.add(requests[-1])
        answers = finish_all(scheduler)
        for request in requests:
            alone = make(200)
            alone.add(Request(request.request_id, RequestSpec(request.prompt_token_ids, request.sampling)))
            assert finish_all(alone)[request.request_id] == answers[request.request_id]


def test_a_parked_beam_gives_way_to_its_sibling_and_to_older_requests_only() -> None:
    scheduler = make(8)
    scheduler.add(beam_request("b", 4, arrival_s=1.0, width=2))
    step(scheduler, {})
    parked = scheduler.running[0]
    scheduler.park(parked)
    young, old = (
        Request(name, RequestSpec([1] * 29, Sampling()), arrival_s=at) for name, at in (("y", 2.0), ("o", 0.0))
    )
    scheduler.add(young)
    assert scheduler.plan().admitted == []
    assert parked.tables[0]
    scheduler.finish(young)
    sibling = scheduler.running[0]
    scheduler.finish(sibling)
    scheduler.add(old)
    assert scheduler.plan().admitted == [old]
    assert (parked.tables[0], parked.status) == ([], Status.PARKED)
    scheduler.check()


def test_an_abort_in_the_middle_leaves_nothing() -> None:
    for num_steps in range(1, 14):
        scheduler = make(7, budget=2, swap=2)
        scheduler.add(beam_request("a", 9, width=4, max_tokens=8))
        for _ in range(num_steps):
            step(scheduler, {})
        for beam in list(scheduler.requests.values()):
            scheduler.finish(beam)
        scheduler.check()
        assert scheduler.blocks.num_held == scheduler.swap.num_held == 0


def test_beams_that_masks_leave_no_room_for_end_and_come_back() -> None:
    scheduler = make(32)
    scheduler.add(beam_request("a", 5, width=3))
    step(scheduler, {})
    beams = list(scheduler.running)
    scheduler.plan()
    rows = {0: [Candidate(4, -0.1, False)], 1: [], 2: []}
    changes = []
    for beam in beams:
        beam.num_computed_tokens = beam.num_tokens
        changes.append(beam_groups.advance(scheduler, beam, rows[beam.index]))
    assert changes[-1].ended == beams[1:]
    assert [beam.status for beam in beams] == [Status.RUNNING, Status.FINISHED, Status.FINISHED]
    scheduler.check()
    assert [r.key for r in scheduler.requests.values()] == [beams[0].key]
    step(scheduler, {})
    assert [r.index for r in scheduler.running] == [0, 1, 2]
    assert beams[1] not in scheduler.running
    finish_all(scheduler)
