"""The layout that a simulation is asked for, and its answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_cluster.bench.outcomes import InstanceSample, Outcome
from pd_cluster.settings.routing import RoutingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLayout:
    """Instances by role, and the settings that a search varies. `num_hybrid`: instances that do both, without pairs.

    A number that is None is the costs' own.
    """

    num_prefill: int = 0
    num_decode: int = 0
    num_hybrid: int = 0
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    num_blocks: int | None = None
    routing_policy: str = RoutingConfig().policy
    auto_role: str = ""  # "", cost or rules
    are_neighbours: bool = False  # all instances share one host

    @property
    def routing(self) -> RoutingConfig:
        """Returns the scheduler's settings: those that it has without flags, but for the policy."""
        return RoutingConfig(policy=self.routing_policy)

    @property
    def num_instances(self) -> int:
        return self.num_prefill + self.num_decode + self.num_hybrid


@dataclass(slots=True)
class Simulated:
    """`duration_s` is simulated time, from the first arrival until the last answer."""

    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[InstanceSample] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)  # deaths, joins, changes of role
    duration_s: float = 0.0
