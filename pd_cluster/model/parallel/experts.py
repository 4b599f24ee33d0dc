"""A unit's exchange of rows between ranks with experts, as what loads a model knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pd_cluster.model.layers.expert_share import ExpertExchange as ExpertExchange
from pd_cluster.model.layers.expert_share import ExpertShare as ExpertShare


class ExpertUnit(ExpertExchange, Protocol):
    """An exchange whose ends have to meet first.

    `rows`: those of each member in the next step; None: as many as here, as in proofs that all compute alike.
    """

    rows: Sequence[int] | None

    def form(self) -> None:
        """Returns once all members are there: weights are loaded, and nothing is computed yet. Raises InstanceLost."""
