"""Computes the second half of a layer: one gated MLP, or several experts among which a router chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from pd_cluster.model.layers.expert_weight import ExpertLayers, ExpertWeights
from pd_cluster.model.layers.linear import Linear, make_linear

Activation = Literal["silu", "gelu_tanh", "swigluoai"]
SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT = 1.702, 7.0  # gpt-oss's; the kernels have them as constants
MLP_NBYTES_AT_ONCE = 8 << 20  # of gate and up together
MLP_LEAST_ROWS = 256  # fewer would cost more in repeated reads of the weights than they save


class Gates(Protocol):
    """The part of `Ops` that MLPs need."""

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Multiplies the left half's activation by the right half: [num_rows, 2 * features] to [num_rows, features].

        swigluoai (gpt-oss) limits both halves first: g = min(left, 7), u = clamp(right, -7, 7), and returns
        g * sigmoid(1.702 * g) * (u + 1).
        """


class FewRows(Protocol):
    """activation(gate(x)) * up(x) for x of at most `most_rows` rows."""

    most_rows: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class GatesFewRows(Protocol):
    """`Ops` that may compute the first half of an MLP at once, for few rows."""

    def few_rows_gate(self, gate_up: Linear, activation: Activation) -> FewRows | None:
        """`gate_up` is the layer of both; None: it is computed as it is."""


class GatedMLP:
    """Computes down(activation(gate(x)) * up(x)), for some rows at a time.

    The intermediate result is a large temporary; from 32 MiB on, glibc maps each one anew, which takes longer than its
    computation.
    """

    def __init__(
        self,
        gate_up: Linear,
        down: Linear,
        ops: Gates,
        activation: Activation,
        intermediate_size: int,
        needs_all: Callable[[], bool] = lambda: False,
    ) -> None:
        """`needs_all`: whether the layers must see a step's rows together."""
        self.gate_up, self.down, self._ops, self.activation = gate_up, down, ops, activation
        self._needs_all = needs_all
        self._few = ops.few_rows_gate(gate_up, activation) if isinstance(ops, GatesFewRows) else None
        self._num_rows = max(MLP_LEAST_ROWS, MLP_NBYTES_AT_ONCE // (2 * intermediate_size * 4))

    @property
    def is_special(self) -> bool:
        """Whether few rows take another way than through `gate_up`, the activation and `down`."""
        return self._few is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # Still below the limit, and faster whole.
        if len(x) <= 2 * self._num_rows or not x.is_cpu or self._needs_all():
            return self._some(x)
        result = torch.empty_like(x)
        for start in range(0, len(x), self._num_rows):
            part = slice(start, start + self._num_rows)
            result[part] = self._some(x[part])
        return result

    def _some(self, x: torch.Tensor) -> torch.Tensor:
        if self._few is not None and len(x) <= self._few.most_rows:
            return self.down(self._few(x))
        return self.down(self._ops.gate(self.gate_up(x), self.activation))


@dataclass(frozen=True, slots=True)
class Routing:
    """How router logits become weights: softmax in float32, the `top_k` largest, and the architecture's last steps.

    A softmax over the chosen logits alone (gpt-oss) is the same as `renormalise`.
    """

    top_k: int
    renormalise: bool = True  # the chosen weights are scaled to add up to 1
    round_weights: bool = False  # to the logits' dtype, as all but Mixtral do

    def weigh(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps logits [num_rows, num_experts] to weights (float32) and experts (int64), both [num_rows, top_k]."""
        weights, chosen = logits.float().softmax(-1).topk(self.top_k, dim=-1)  # in 16 bits experts would tie
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights.to(logits.dtype).float() if self.round_weights else weights), chosen


def routing_of(gate: Any) -> Routing:
    """Reads the routing from one of transformers' router modules."""
    if type(gate).__name__ == "MixtralTopKRouter":
        return Routing(gate.top_k)
    return Routing(gate.top_k, renormalise=getattr(gate, "norm_topk_prob", True), round_weights=True)


def bias_of(gate: Any) -> torch.Tensor | None:
    """Returns the bias of one of transformers' router modules, [num_experts]; None if it has none."""
    bias: torch.Tensor | None = getattr(gate, "bias", None)
    return None if bias is None else bias.detach()


class Experts:
    """A sparse block: each row goes through the `top_k` experts that its router rates highest."""

    def __init__(self, gate: Any, weights: ExpertWeights, ops: Gates, activation: Activation) -> None:
        """`gate`: transformers' router."""
        self._ops, self._activation = ops, activation
        self.router = make_linear(gate.weight, bias_of(gate))  # to [num_rows, num_experts]
        self._routing = routing_of(gate)
        self.layers = ExpertLayers(weights)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._routing.weigh(self.router(x))  # [num_rows, top_k]
        return self.layers.through(self._gate, x, chosen, weights)

    def _gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._ops.gate(gate_up, self._activation)


class SharedExpert:
    """Adds to the chosen experts' output that of an expert which every row goes through, weighted by its own gate."""

    def __init__(self, experts: Linear, shared: Linear, gate: Linear) -> None:
        """`gate` maps [num_rows, hidden_size] to [num_rows, 1]: the logits of the weights."""
        self._experts, self._shared, self._gate = experts, shared, gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shared = self._gate(x).sigmoid() * self._shared(x)
        return self._experts(x).add_(shared)
