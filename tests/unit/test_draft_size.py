"""How many drafts a step verifies, on simulated machines whose step time is a function of the number of rows."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pd_cluster.engine.draft.draft_size import DraftSize, Guess
from pd_cluster.engine.draft.step_costs import NEVER, NUM_TRIED, SIZES, StepCosts
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.spread import pairwise

MOST = 16
Cost = Callable[[int], float]


def knee(at: int) -> Cost:
    """Returns a cost that is flat up to `at` rows, then proportional."""
    return lambda num_rows: max(1.0, num_rows / at)


MACHINES: dict[str, Cost] = {
    "8": knee(8),
    "16": knee(16),
    "1": knee(1),
    "wide": knee(200),
    "soft": lambda num_rows: 1.0 + 0.06 * (num_rows - 1),
}


def speedup(cost: Cost, num_seqs: int, chance: float, offered: int = MOST, num_steps: int = 700) -> float:
    """Returns the speedup over plain decoding; step times have up to 5 % of noise."""
    rng, size = random.Random(3), DraftSize()
    requests = [Request(f"{at}", RequestSpec([1], Sampling())) for at in range(num_seqs)]
    num_tokens, took_s = 0, 0.0
    for _ in range(num_steps):
        guesses = {
            each: Guess("prediction", [0] * offered, size.chance(each, "prediction")) for each in requests if offered
        }
        pays = size.can_pay(num_seqs, dict.fromkeys(guesses, ("prediction",)), offered, 256)
        chosen = size.choose(num_seqs, guesses, 256) if pays else {}
        for request, num_drafts in chosen.items():
            num_accepted = next((at for at in range(num_drafts) if rng.random() >= chance), num_drafts)
            size.verified(request, "prediction", num_drafts, num_accepted)
            num_tokens += num_accepted
        num_rows = num_seqs + sum(chosen.values())
        step_s = cost(num_rows) * rng.uniform(1.0, 1.05)
        size.costs.took(num_rows, step_s)
        num_tokens += num_seqs
        took_s += step_s
    return num_tokens / took_s / (num_seqs / (1.025 * cost(num_seqs)))


def best(cost: Cost, num_seqs: int, chance: float) -> float:
    """Returns the best speedup of any constant number of drafts per sequence."""
    gains = [(1 + sum(chance**at for at in range(1, num + 1))) / cost(num_seqs * (1 + num)) for num in range(MOST + 1)]
    return max(gains) * cost(num_seqs)


@pytest.mark.parametrize(
    ("machine", "num_seqs", "chance"), pairwise(list(MACHINES), [1, 4, 16, 32], [0.0, 0.1, 0.5, 0.8, 1.0])
)
def test_it_comes_near_the_best_constant_number(machine: str, num_seqs: int, chance: float) -> None:
    found, most = speedup(MACHINES[machine], num_seqs, chance), best(MACHINES[machine], num_seqs, chance)
    assert found >= 0.97, "drafts cost more than they save"
    assert found >= 0.85 * most, f"{found:.2f} of {most:.2f}"


@pytest.mark.parametrize(("num_lucky", "drafts"), [(10, False), (32, True)])
def test_likely_drafts_of_some_do_not_slow_down_the_others(num_lucky: int, drafts: bool) -> None:
    """Steps of 32, 48 and 64 rows take 85, 118 and 146 ms. Ten lucky sequences would get more tokens per second, but
    end early, and the others would take as many steps as without drafts, each of them longer.
    """
    size = DraftSize()
    for num_rows, step_s in ((32, 0.085), (48, 0.118), (64, 0.146), (80, 0.19)):
        for _ in range(NUM_TRIED):
            size.costs.took(num_rows, step_s)
    lucky = [Request(f"{at}", RequestSpec([1], Sampling())) for at in range(num_lucky)]
    for request in lucky:
        for _ in range(40):
            size.verified(request, "suffix", 2, 2)
    guesses = {each: Guess("suffix", [0] * 2, size.chance(each, "suffix")) for each in lucky}
    assert bool(size.choose(32, guesses, 64)) == drafts
    assert size.can_pay(32, dict.fromkeys(lucky, ("suffix",)), 2, 64) == drafts


def test_a_machine_that_changes_is_measured_again() -> None:
    costs = StepCosts()
    for _ in range(50):
        costs.took(1, 1.0)
        costs.took(8, 8.0)
    assert costs.step_s(4) == pytest.approx(4.0)  # interpolated
    for _ in range(600):
        costs.took(1, 1.0)
    assert costs.step_s(8) == NEVER  # forgotten; only sizes up to twice the largest known one are tried
    assert costs.step_s(2) == 1.0


def test_estimates_are_of_all_sizes() -> None:
    rng, costs = random.Random(1), StepCosts()
    assert costs.step_s(5) == NEVER
    for _ in range(300):
        costs.took(rng.randrange(1, 2000), rng.uniform(1, 2))
        assert len(costs.estimates()) == len(SIZES)
        assert all(each > 0 for each in costs.estimates())


DRAFT_S = 0.1  # time of one draft step, for any number of sequences


@pytest.mark.parametrize(("machine", "num_seqs", "chance"), pairwise(["16", "1"], [1, 4], [0.0, 0.1, 0.5, 0.8, 1.0]))
def test_a_draft_model_pays_for_its_own_steps(machine: str, num_seqs: int, chance: float) -> None:
    """Speed, including the draft model's steps, is near the best constant number's; a bad model costs at most 3 %."""
    rng, cost, size, draft_costs = random.Random(3), MACHINES[machine], DraftSize(), StepCosts()
    requests = [Request(f"{at}", RequestSpec([1], Sampling())) for at in range(num_seqs)]
    num_tokens, took_s, num_steps = 0, 0.0, 1500
    for _ in range(num_steps):
        depth = size.depth(requests, "draft_model", draft_costs, num_seqs, MOST) if size.costs.knows(num_seqs) else 0
        guesses = {each: Guess("", [0] * depth, size.chance(each, "draft_model")) for each in requests if depth}
        chosen = size.choose(num_seqs, guesses, 256)
        for request, num_drafts in chosen.items():
            num_accepted = next((at for at in range(num_drafts) if rng.random() >= chance), num_drafts)
            size.verified(request, "draft_model", num_drafts, num_accepted)
            num_tokens += num_accepted
        if depth:
            draft_costs.took(num_seqs, DRAFT_S * rng.uniform(1.0, 1.05))
        num_rows = num_seqs + sum(chosen.values())
        size.costs.took(num_rows, step_s := cost(num_rows) * rng.uniform(1.0, 1.05))
        num_tokens, took_s = num_tokens + num_seqs, took_s + step_s + depth * DRAFT_S * 1.025
    found = num_tokens / took_s / (num_seqs / (1.025 * cost(num_seqs)))
    rates = [
        (1 + sum(chance**at for at in range(1, num + 1))) / (cost(num_seqs * (1 + num)) + num * DRAFT_S)
        for num in range(MOST + 1)
    ]
    assert found >= 0.97
    assert found >= 0.85 * max(rates) * cost(num_seqs)


@pytest.mark.parametrize(("row_s", "expected"), [(0.0, 1), (1.0, 0)])
def test_nobody_catches_up_for_drafts_whose_verification_cannot_pay(row_s: float, expected: int) -> None:
    size, requests = DraftSize(), [Request(f"{at}", RequestSpec([1], Sampling())) for at in range(32)]
    for num_rows in (16, 32):
        for _ in range(NUM_TRIED):
            size.costs.took(num_rows, 1.0 + row_s * num_rows)
    assert size.depth(requests, "draft_model", StepCosts(), 32, MOST) == expected


def test_first_measurements_are_believed_for_a_short_time() -> None:
    """If a size's first three steps are slow, it is measured again soon; confirmed values last longer."""
    costs = StepCosts()
    num_steps: list[int] = []
    for _ in range(6):
        for _ in range(NUM_TRIED):
            costs.took(2, 1.0)
        count = 0
        while costs.knows(2):
            costs.took(1, 0.1)
            count += 1
        num_steps.append(count)
    assert num_steps == [64, 128, 256, 512, 512, 512]
