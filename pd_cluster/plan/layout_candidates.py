"""The candidates of a search. Knows nothing of costs or loads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pd_cluster.simulate.simulated_layout import SimulatedLayout


@dataclass(frozen=True, slots=True)
class LayoutCandidate:
    """A layout of instances with `tp_size` ranks each, one device per rank."""

    layout: SimulatedLayout
    tp_size: int = 1

    @property
    def num_devices(self) -> int:
        return self.layout.num_instances * self.tp_size

    @property
    def is_hybrid(self) -> bool:
        return self.layout.num_hybrid > 0

    @property
    def name(self) -> str:
        """Returns a name such as `2P1D`, or `3H` for hybrid instances; with `TP2` if instances have 2 ranks."""
        layout = self.layout
        shape = f"{layout.num_hybrid}H" if self.is_hybrid else f"{layout.num_prefill}P{layout.num_decode}D"
        return shape if self.tp_size == 1 else f"{shape} TP{self.tp_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The values to try. If there is nothing to route, only the first of `policies` is tried."""

    tp_sizes: Sequence[int] = (1,)
    chunks: Sequence[int] = (512, 2048, 8192)
    seats: Sequence[int] = (32, 128, 256)
    policies: Sequence[str] = ("prefix-aware", "predicted-ttft", "least-loaded")
    are_neighbours: bool = False

    def candidates(self, num_devices: int) -> Iterator[LayoutCandidate]:
        """Yields all layouts with as many instances as fit on this number of devices."""
        for tp_size in self.tp_sizes:
            num_instances = num_devices // tp_size
            for num_prefill in range(num_instances):
                yield from self._settings(num_instances, num_prefill, tp_size)

    def single(self, tp_size: int) -> Iterator[LayoutCandidate]:
        """Yields a single instance with all settings, the smallest first."""
        return self._settings(1, 0, tp_size)

    def _settings(self, num_instances: int, num_prefill: int, tp_size: int) -> Iterator[LayoutCandidate]:
        """Yields all settings of one split. Without prefill instances, all instances are hybrid."""
        num_decode = num_instances - num_prefill if num_prefill else 0
        num_hybrid = 0 if num_prefill else num_instances
        has_choice = max(num_prefill, num_decode, num_hybrid) > 1
        policies = self.policies if has_choice else self.policies[:1]
        for chunk, seats, policy in itertools.product(self.chunks, self.seats, policies):
            layout = SimulatedLayout(
                num_prefill=num_prefill,
                num_decode=num_decode,
                num_hybrid=num_hybrid,
                max_num_batched_tokens=chunk,
                max_num_seqs=seats,
                routing_policy=policy,
                are_neighbours=self.are_neighbours,
            )
            yield LayoutCandidate(layout, tp_size)
