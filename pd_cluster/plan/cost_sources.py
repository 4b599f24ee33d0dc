"""Sources of candidates' costs: a file measured with one kind of instance, or a device model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.costs.linear_costs import Costs
from pd_cluster.devices.device_kinds import BY_KIND, CPU_KIND, DeviceKind
from pd_cluster.errors import ConfigError
from pd_cluster.model.planning.model_needs import ModelNeeds
from pd_cluster.plan.computed_costs import Infeasible, InstanceShape, computed_costs
from pd_cluster.plan.device_models import DeviceModel
from pd_cluster.plan.layout_candidates import LayoutCandidate, SearchSpace

POLICIES = ("prefix-aware", "predicted-ttft", "least-loaded")
OF_SESSIONS = "session"
CHUNKS, SEATS = (512, 2048, 8192), (32, 128, 256)
STEPS = (4, 1)  # the sizes to try are the measured chunk and number of seats, divided by these

MOST_BLOCK_TOKENS, LEAST_BLOCKS = 128, 64  # limits of `coarser`: tokens of a block, and blocks of a mean request


class CostSource(Protocol):
    """A source of costs.

    `name`: the name of the devices. `remark`: printed after lines that depend on these costs; "" for measured costs.
    """

    @property
    def name(self) -> str: ...

    @property
    def remark(self) -> str: ...

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def devices_per_host(self) -> int: ...

    def space(self, tp_sizes: Sequence[int], are_neighbours: bool) -> SearchSpace: ...

    def costs(self, candidate: LayoutCandidate) -> Costs | Infeasible: ...


@dataclass(frozen=True, slots=True)
class ComputedSource:
    """Costs from a device model. `arrivals`: the requests, the longest of which the pool must hold."""

    needs: ModelNeeds
    device: DeviceModel
    arrivals: Sequence[Arrival]

    @property
    def name(self) -> str:
        return self.device.name

    @property
    def remark(self) -> str:
        return "not measured"

    @property
    def kind(self) -> DeviceKind:
        return self.device.kind

    @property
    def devices_per_host(self) -> int:
        return self.device.devices_per_host

    def space(self, tp_sizes: Sequence[int], are_neighbours: bool) -> SearchSpace:
        """Returns the values to try. Without given sizes, these are all powers of two up to the devices of a host."""
        usual = [size for size in (1, 2, 4, 8, 16) if size <= self.device.devices_per_host]
        chunks = useful_chunks(CHUNKS, self.arrivals)
        policies = policies_for(self.arrivals)
        return SearchSpace(tp_sizes=tuple(tp_sizes) or tuple(usual), chunks=chunks, seats=SEATS, policies=policies)

    def costs(self, candidate: LayoutCandidate) -> Costs | Infeasible:
        layout = candidate.layout
        shape = InstanceShape(
            tp_size=candidate.tp_size,
            max_num_batched_tokens=layout.max_num_batched_tokens or CHUNKS[-1],
            max_num_seqs=layout.max_num_seqs or SEATS[-1],
            is_one_host=candidate.num_devices <= self.device.devices_per_host,
        )
        found = computed_costs(self.needs, self.device, shape, longest(self.arrivals))
        return found if isinstance(found, Infeasible) else coarser(found, self.arrivals)


@dataclass(frozen=True, slots=True)
class MeasuredSource:
    """Costs from a file. They were measured with one number of ranks, which the file does not state."""

    measured: Costs
    file: str
    arrivals: Sequence[Arrival]

    @property
    def name(self) -> str:
        return self.measured.device

    @property
    def remark(self) -> str:
        return "" if self.measured.is_measured else "not measured"

    @property
    def kind(self) -> DeviceKind:
        """Returns the kind with which the device's name begins."""
        return next((kind for kind in BY_KIND if self.measured.device.startswith(kind)), CPU_KIND.name)

    @property
    def devices_per_host(self) -> int:
        return 1 << 30 if self.kind == "cpu" else 8

    def space(self, tp_sizes: Sequence[int], are_neighbours: bool) -> SearchSpace:
        """Returns the values to try. Raises ConfigError if several sizes are given."""
        if len(tp_sizes) > 1:
            given = " ".join(map(str, tp_sizes))
            raise ConfigError(
                f"--tensor-parallel-size {given}: {self.file} was measured with one size; give only that one"
            )
        own = self.measured
        chunks = sorted({max(1, own.max_num_batched_tokens // step) for step in STEPS})
        seats = tuple(sorted({max(1, own.max_num_seqs // step) for step in STEPS}))
        return SearchSpace(
            tp_sizes=tuple(tp_sizes) or (1,),
            chunks=useful_chunks(chunks, self.arrivals),
            seats=seats,
            policies=policies_for(self.arrivals),
            are_neighbours=are_neighbours,
        )

    def costs(self, candidate: LayoutCandidate) -> Costs | Infeasible:
        capacity, num_tokens = self.measured.num_blocks * self.measured.block_size, longest(self.arrivals)
        if capacity < num_tokens:
            return Infeasible(
                f"{self.file}: its num_blocks hold {capacity} tokens, and the longest request has {num_tokens}"
            )
        return coarser(self.measured, self.arrivals)


def longest(arrivals: Sequence[Arrival]) -> int:
    """Returns the tokens of the longest request."""
    return max(each.num_prompt_tokens + each.num_output_tokens for each in arrivals)


def coarser(costs: Costs, arrivals: Sequence[Arrival]) -> Costs:
    """Returns costs with fewer, larger blocks if requests are long, because simulation time grows with their number."""
    mean = sum(each.num_prompt_tokens + each.num_output_tokens for each in arrivals) / len(arrivals)
    step = 1
    while costs.block_size * step * 2 <= min(MOST_BLOCK_TOKENS, mean / LEAST_BLOCKS):
        step *= 2
    size, number = costs.block_size * step, max(1, costs.num_blocks // step)
    return msgspec.structs.replace(costs, block_size=size, num_blocks=number)


def useful_chunks(chunks: Sequence[int], arrivals: Sequence[Arrival]) -> tuple[int, ...]:
    """Returns the chunk sizes without those that make no difference for any prompt."""
    longest_prompt = max(each.num_prompt_tokens for each in arrivals)
    return (chunks[0], *(each for before, each in itertools.pairwise(chunks) if before < longest_prompt))


def policies_for(arrivals: Sequence[Arrival]) -> tuple[str, ...]:
    has_sessions = any(each.session for each in arrivals)
    return (*POLICIES, OF_SESSIONS) if has_sessions else POLICIES
