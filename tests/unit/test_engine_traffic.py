"""Random traffic of all features, with and without steps ahead of the host and drafts; see random_traffic.py."""

from __future__ import annotations

import pytest

from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.step import draft_acceptance
from pd_cluster.engine.step import engine_core as core_module
from pd_cluster.types import Request
from tests.support.random_traffic import explore

SEEDS = range(8)


def test_random_traffic_gives_the_tokens_of_each_request_alone() -> None:
    seen = explore(SEEDS)
    for what in ("preemptions", "hits", "tier", "copy", "out", "in"):
        assert seen[what] > 10, f"{what} was hardly seen: {seen}"


def test_a_step_ahead_of_the_host_changes_no_token() -> None:
    """Steps ahead of the host give the same tokens, whatever stops, is aborted, arrives or is preempted meanwhile."""
    seen = explore(range(300, 309), launches=True)
    for what, least in (("ahead", 100), ("preemptions", 10), ("hits", 10), ("tier", 10)):
        assert seen[what] > least, f"{what} was hardly seen: {seen}"


@pytest.mark.parametrize("launches", [False, True])
def test_drafts_change_no_token(launches: bool) -> None:
    """Outputs stay the same with any random number of correct, wrong and invalid drafts."""
    seen = explore(range(500, 508), launches=launches, drafts=True)
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
        rows = draft_acceptance.draft_rows
        monkeypatch.setattr(core_module, "draft_rows", lambda plan, first_row: rows(plan, max(0, first_row - 1)))
    else:
        monkeypatch.setattr(draft_acceptance, "adjusts", lambda sampling, position: False)
    with pytest.raises((AssertionError, IndexError)):
        explore(range(500, 512), drafts=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seeds", "more"),
    [
        (range(1000, 2500), {}),
        (range(2500, 4000), {"launches": True}),
        (range(5000, 5700), {"drafts": True}),
        (range(5700, 6400), {"launches": True, "drafts": True}),
    ],
)
def test_much_random_traffic(seeds: range, more: dict[str, bool]) -> None:
    explore(seeds, **more)
