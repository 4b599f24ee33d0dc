"""Random traffic over several groups of layers, and seeded faults that it must detect; see random_traffic.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pd_cluster.engine.scheduling.block_holdings import Holdings
from pd_cluster.engine.scheduling.group_holdings import GroupHoldings
from pd_cluster.engine.scheduling.state_checkpoints import Checkpoints
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.kv.group_rule import Rule
from tests.support.random_traffic import explore
from tests.support.toy_model import ToyRunner

SEVERAL = ("all window", "all state", "window state", "all window state")

Whatever = Callable[..., Any]


def _not_cleared(move: Whatever) -> Whatever:
    return lambda self, moves: move(self, [each for each in moves if each.kind != "clear"])


def _states_are_written_together(must_copy: Whatever) -> Whatever:
    return lambda self, block: not self.rule.is_state and must_copy(self, block)


def _one_token_short(first_seen: Whatever) -> Whatever:
    return lambda self, num_tokens: first_seen(self, num_tokens) + (1 if self.window and num_tokens else 0)


def _without_a_state(longest: Whatever) -> Whatever:
    return lambda self, request, most, step, groups: longest(
        self, request, most, step, [each for each in groups if not each.rule.is_state]
    )


def _a_token_early(kept: Whatever) -> Whatever:
    return lambda self: [keep._replace(num_tokens=keep.num_tokens - 1) for keep in kept(self)]


def _though_not_computed(computed: Whatever) -> Whatever:
    return lambda self, keeps, chunks: computed(self, keeps, [(keep.request, 0) for keep in keeps])


# owner, name of a function, and its faulty replacement
GROUP_FAULTS: dict[str, tuple[Any, str, Callable[[Whatever], Whatever]]] = {
    "a slot is not cleared": (ToyRunner, "move", _not_cleared),
    "states are written together": (GroupHoldings, "must_copy", _states_are_written_together),
    "a window is one token short": (Rule, "first_seen", _one_token_short),
    "a hit without a state": (Holdings, "_longest", _without_a_state),
    "a state is kept a token early": (StepPlan, "kept", _a_token_early),
    "a state is kept that nobody computed": (Checkpoints, "computed", _though_not_computed),
}


def test_groups_of_layers_change_no_token() -> None:
    """Outputs are the same whatever is shared, copied, kept, found, preempted or released in any group."""
    seen = explore(range(7), kinds=SEVERAL)
    for what in ("preemptions", "hits", "copy", "out", "in", "clear", "kept"):
        assert seen[what] > 10, f"{what} was hardly seen: {seen}"


@pytest.mark.parametrize("fault", sorted(GROUP_FAULTS))
def test_faults_of_groups_are_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    owner, name, faulty = GROUP_FAULTS[fault]
    monkeypatch.setattr(owner, name, faulty(getattr(owner, name)))
    with pytest.raises(AssertionError, match="finds in group"):
        explore(range(40), kinds=SEVERAL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_much_random_traffic_over_groups_of_layers() -> None:
    """Only models without states are launched ahead; the host plans the steps of others."""
    explore(range(8000, 8200), kinds=SEVERAL)
    explore(range(8400, 8600), launches=True, kinds=SEVERAL[:1])
