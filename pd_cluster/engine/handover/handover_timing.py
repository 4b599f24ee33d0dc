"""Measures handover times by transport; the router predicts with them. Used by the engine's thread only."""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster.costs.linear_costs import HandoverCost
from pd_cluster.costs.online_fit import OnlineHandoverFit
from pd_cluster.kv.layer_groups import transfer_nbytes
from pd_cluster.transport.transport_table import slowest_nbytes_per_s
from pd_cluster.types import LinkState
from pd_cluster.wire import LayoutInfo, pull_over


class HandoverTiming:
    """A handover's time begins when its prompt's last step ends, and ends when D has landed it and sends Confirm."""

    def __init__(self, layouts: Sequence[LayoutInfo]) -> None:
        self._layouts = layouts
        self._fits: dict[str, OnlineHandoverFit] = {}

    def add(self, link: LinkState, num_tokens: int, took_s: float, is_pull: bool = False) -> None:
        """Records a handover of this many tokens over a link that is up.

        Pulls are measured separately: no step hides part of their time.
        """
        if not link.is_open or took_s <= 0:
            return
        over = pull_over(link.over) if is_pull else link.over
        if (fit := self._fits.get(over)) is None:
            fit = self._fits[over] = OnlineHandoverFit(1 / slowest_nbytes_per_s(link.transports))
        fit.add(transfer_nbytes(self._layouts, self._layouts, num_tokens), took_s)

    @property
    def costs(self) -> dict[str, HandoverCost]:
        """Returns the measured costs. Keys: LinkState.over, or `pull_over` of it for pulls."""
        known = ((over, fit.cost) for over, fit in self._fits.items())
        return {over: cost for over, cost in known if cost is not None}
