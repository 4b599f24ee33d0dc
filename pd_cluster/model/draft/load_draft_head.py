"""Loads the draft head that the settings name, after the target model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pd_cluster.model.draft.draft_head import DraftHead
from pd_cluster.model.draft.eagle3_head import check_eagle3, load_eagle3
from pd_cluster.model.draft.mtp_head import check_mtp, load_mtp
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.settings.speculation import Method


class _Kind(NamedTuple):
    check: Callable[[LoadPlan], object]
    load: Callable[[LoadPlan, CausalLM], DraftHead]


KINDS: dict[Method, _Kind] = {"eagle3": _Kind(check_eagle3, load_eagle3), "mtp": _Kind(check_mtp, load_mtp)}


def check_head(plan: LoadPlan) -> None:
    """Checks that the draft head and the model match, before any weight is read. Raises ConfigError, ModelError."""
    if (kind := _kind_of(plan)) is not None:
        kind.check(plan)


def load_head(plan: LoadPlan, model: CausalLM) -> DraftHead | None:
    """Loads the draft head; returns None if the settings name none. Raises ConfigError, ModelError."""
    kind = _kind_of(plan)
    return None if kind is None else kind.load(plan, model)


def _kind_of(plan: LoadPlan) -> _Kind | None:
    method = plan.config.speculation.with_weights
    return None if method is None else KINDS.get(method)
