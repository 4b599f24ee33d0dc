"""Estimates costs from a model's bytes and operations, for devices that were not measured.

A step reads the weights and the attended KV cache once. If a product's operations take longer than the read, their time
counts instead. The linear terms of `StepCost` are exact for one rank, whose first rows or prompt tokens are free while
it reads the weights. For several ranks they are exact for full steps, and too high otherwise. All experts count as
read, and windows as full attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pd_cluster.costs.linear_costs import Costs, HandoverCost, HostCost, StepCost
from pd_cluster.kv.kv_layout import DTYPE_NBYTES, KVLayout
from pd_cluster.model.planning.model_needs import ModelNeeds
from pd_cluster.plan.device_models import DeviceModel

MEMORY_SHARE = 0.9  # the share of a device's memory that is used: the default of --gpu-memory-utilization
UNSEEN_NBYTES = 1 << 30  # memory that pools leave to the driver and its libraries
SUMS_PER_LAYER = 2
LOGIT_NBYTES = 4
STREAMS_WIDE = 4  # a step holds this many copies of the residual stream besides a layer's widest product
ROUTER = HostCost(request_s=0.74e-3, message_s=42e-6)  # the scheduler's costs, from docs/benchmarks.md
COMPUTED = "computed"


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Says why a layout is impossible."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceShape:
    """The properties of an instance that determine its costs. `is_one_host`: handovers stay on one host."""

    tp_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    is_one_host: bool = True


def computed_costs(
    needs: ModelNeeds, device: DeviceModel, shape: InstanceShape, num_tokens: int = 1
) -> Costs | Infeasible:
    """Estimates an instance's costs.

    `num_tokens`: the number of tokens of the longest request, which the pool must hold.
    """
    if shape.tp_size > device.devices_per_host:
        return Infeasible(f"{shape.tp_size} ranks: a host has {device.devices_per_host} {device.name}")
    if reason := needs.why_not_split(shape.tp_size):
        return Infeasible(reason)
    layout = pool_layout(needs, device, shape.tp_size)
    num_blocks = _num_blocks(needs, device, shape, layout)
    place = f"{shape.tp_size} x {device.name}"
    if num_blocks <= 0:
        return Infeasible(
            f"{place}: weights of {needs.weights_nbytes / shape.tp_size / 1e9:.1f} GB a device and a step's "
            f"activations leave no memory for a KV pool in {device.memory_nbytes / 1e9:.0f} GB"
        )
    if num_blocks * layout.block_size < num_tokens:
        capacity = num_blocks * layout.block_size
        return Infeasible(
            f"{place}: the KV pool has room for {capacity} tokens, and the longest request has {num_tokens}"
        )
    return Costs(
        model=needs.name,
        device=device.name,
        source=COMPUTED,
        step=step_cost(needs, device, shape),
        handover=HandoverCost(device.handover_s, 1 / device.link_nbytes_per_s(shape.is_one_host)),
        host=ROUTER,
        kv_token_nbytes=layout.token_nbytes,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
    )


def pool_layout(needs: ModelNeeds, device: DeviceModel, tp_size: int) -> KVLayout:
    """Returns the layout of a rank's pool, for layers that keep all tokens."""
    return replace(needs.layouts[0], tp_size=tp_size, block_size=device.traits.block_size)


def step_cost(needs: ModelNeeds, device: DeviceModel, shape: InstanceShape) -> StepCost:
    """Returns the linear terms of a step. The module's docstring says which are exact."""
    size, rate = shape.tp_size, device.read_nbytes_per_s
    read_s = needs.read_nbytes / size / rate
    sums_s = SUMS_PER_LAYER * needs.num_layers * device.sum_s if size > 1 else 0.0
    product_s = needs.token_flops / size / device.flops_per_s
    token_s = _sums_nbytes(needs, size) / device.sum_nbytes_per_s(size) if size > 1 else 0.0
    row_s = prompt_s = product_s
    num_flat_rows = int(read_s / product_s)
    state_s = 2 * _state_nbytes(needs, size) / rate  # read and written
    if token_s or state_s:  # no row is free: the linear cost is exact for a step with all seats taken
        seats = shape.max_num_seqs
        row_s, num_flat_rows = token_s + state_s + max(0.0, product_s - read_s / seats), 0
        prompt_s = token_s + max(0.0, product_s - read_s / shape.max_num_batched_tokens)
    return StepCost(
        step_s=device.overhead_s + sums_s + read_s,
        row_s=row_s,
        context_token_s=pool_layout(needs, device, size).token_nbytes / rate,
        prompt_token_s=prompt_s,
        prompt_pair_s=needs.pair_flops / size / device.flops_per_s,
        num_flat_rows=num_flat_rows,
    )


def _num_blocks(needs: ModelNeeds, device: DeviceModel, shape: InstanceShape, layout: KVLayout) -> int:
    """Counts a rank's blocks as a real instance would; below 1 if the weights leave no memory."""
    number = DTYPE_NBYTES[needs.dtype]
    streams = needs.widest // shape.tp_size + STREAMS_WIDE * needs.hidden_size
    of_step = shape.max_num_batched_tokens * streams * number + shape.max_num_seqs * needs.vocab_size * LOGIT_NBYTES
    of_states = shape.max_num_seqs * _state_nbytes(needs, shape.tp_size)
    taken = needs.weights_nbytes // shape.tp_size + of_step + of_states + UNSEEN_NBYTES
    num_blocks = (int(device.memory_nbytes * MEMORY_SHARE) - taken) // layout.block_nbytes
    if most := device.traits.most_plane_numel:
        num_blocks = min(num_blocks, most // max(map(math.prod, layout.block_shapes(layout.planes))))
    return int(num_blocks)


def _state_nbytes(needs: ModelNeeds, tp_size: int) -> int:
    """Returns the bytes of a sequence's state on a rank; 0 if the model has no states."""
    states = [each for each in needs.layouts if each.holds.is_state]
    return sum(each.block_nbytes for each in states) // tp_size


def _sums_nbytes(needs: ModelNeeds, tp_size: int) -> float:
    """Returns the bytes that a rank sends per token, for two ring all-reduces per layer."""
    share = 2 * (tp_size - 1) / tp_size
    return SUMS_PER_LAYER * needs.num_layers * needs.hidden_size * DTYPE_NBYTES[needs.dtype] * share
