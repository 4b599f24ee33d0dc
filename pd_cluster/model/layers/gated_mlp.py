"""Computes the second half of a layer: a gated MLP, or experts that a router chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from pd_cluster.model.layers.activations import sigmoid
from pd_cluster.model.layers.expert_share import ExpertShare, RankExperts
from pd_cluster.model.layers.expert_weights import ExpertLayers
from pd_cluster.model.layers.packed_linear import Linear, make_linear, packs
from pd_cluster.model.layers.packed_modules import rows_apart

Activation = Literal["silu", "gelu_tanh", "swigluoai"]
SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT = 1.702, 7.0  # from gpt-oss; the kernels use the same constants
MLP_NBYTES_AT_ONCE = 8 << 20  # upper limit for gate and up together
MLP_LEAST_ROWS = 256  # with fewer rows, reading the weights again costs more than smaller temporaries save


class Gates(Protocol):
    """The operations of `Ops` that MLPs need."""

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Multiplies the left half's activation by the right half: [num_rows, 2 * features] to [num_rows, features].

        swigluoai (gpt-oss) limits both halves first: g = min(left, 7), u = clamp(right, -7, 7), and returns
        g * sigmoid(1.702 * g) * (u + 1).
        """


class FewRows(Protocol):
    """Computes activation(gate(x)) * up(x) for at most `most_rows` rows."""

    most_rows: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class GatesFewRows(Protocol):
    """`Ops` that may have one kernel for the first half of an MLP with few rows."""

    def few_rows_gate(self, gate_up: Linear, activation: Activation) -> FewRows | None:
        """Returns the kernel for `gate_up`, the joint layer of gate and up, or None if there is none."""


class GatedMLP:
    """Computes down(activation(gate(x)) * up(x)) for a limited number of rows at a time.

    Otherwise the intermediate result would be a large temporary. glibc maps each temporary of 32 MiB or more anew,
    which takes longer than the computation.
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
        """`needs_all`: whether the layers must process all rows of a step together."""
        self.gate_up, self.down, self._ops, self.activation = gate_up, down, ops, activation
        self._needs_all = needs_all
        self._few = ops.few_rows_gate(gate_up, activation) if isinstance(ops, GatesFewRows) else None
        self._num_rows = max(MLP_LEAST_ROWS, MLP_NBYTES_AT_ONCE // (2 * intermediate_size * 4))

    @property
    def is_special(self) -> bool:
        """Whether one kernel replaces `gate_up` and the activation for few rows."""
        return self._few is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # One piece is faster than two, and up to twice as many rows stay below glibc's limit.
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


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """How router logits become weights, all in float32: score the experts, choose `top_k`, then renormalise and scale.

    Scores are a softmax over all experts or, with `sigmoid`, sigmoids. `choice_bias` [num_experts] is added only for
    the choice. The experts form `num_groups` equal groups, and are chosen only from the `top_groups` best ones. Groups
    are ranked by their best expert or, with `best_two`, by the sum of their two best. With `renormalise`, the chosen
    scores are divided by their sum plus `epsilon`, or by `least_sum` if that is larger. Finally they are multiplied by
    `scale`. A softmax over only the chosen logits (gpt-oss) is the same as a renormalised softmax over all.
    """

    top_k: int
    renormalise: bool = True
    round_weights: bool = False  # to the rows' dtype, as most softmax routers do
    sigmoid: bool = False
    choice_bias: torch.Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    best_two: bool = False
    epsilon: float = 0.0
    least_sum: float = 0.0
    scale: float = 1.0
    in_float32: bool = False  # computes the router's product in float32

    @property
    def is_plain(self) -> bool:
        """Whether the routing only chooses the largest softmax scores and, if set, renormalises them."""
        has_more = self.sigmoid or self.choice_bias is not None or self.top_groups < self.num_groups
        return not has_more and (self.epsilon, self.least_sum, self.scale) == (0.0, 0.0, 1.0)

    def weigh(self, logits: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps logits [num_rows, num_experts] to weights (float32) and experts (int64), both [num_rows, top_k].

        `dtype`: the dtype of the rows; None: the dtype of the logits.
        """
        numbers = logits.float()  # in 16 bits, different experts would often have equal scores
        scores = sigmoid(numbers) if self.sigmoid else numbers.softmax(-1)
        if self.is_plain:
            weights, chosen = scores.topk(self.top_k, dim=-1)
        else:
            chosen = self.choice_scores(scores).topk(self.top_k, dim=-1).indices
            weights = scores.gather(1, chosen)
        if self.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + self.epsilon).clamp(min=self.least_sum)
        if self.scale != 1.0:
            weights = weights * self.scale
        return (weights.to(dtype or logits.dtype).float() if self.round_weights else weights), chosen

    def choice_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Returns the scores by which experts are chosen: minus infinity in groups that take no part."""
        wanted = scores if self.choice_bias is None else scores + self.choice_bias
        if self.top_groups == self.num_groups:
            return wanted
        groups = wanted.view(len(wanted), self.num_groups, -1)
        rated = groups.topk(2, dim=-1).values.sum(-1) if self.best_two else groups.amax(-1)
        best = torch.zeros_like(rated, dtype=torch.bool).scatter_(1, rated.topk(self.top_groups, dim=-1).indices, True)
        return groups.masked_fill(~best[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRouter:
    """The router of a sparse block: logits are `weight` [num_experts, hidden_size] times a row, plus `bias`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    routing: Routing

    @classmethod
    def of(cls, block: Any, name: str = "gate") -> ExpertRouter:
        """Reads the router called `name` from a sparse block of transformers."""
        gate = getattr(block, name)
        bias: torch.Tensor | None = getattr(gate, "bias", None)
        return cls(gate.weight.detach(), None if bias is None else bias.detach(), _routing(block, gate))

    def linear(self) -> Linear:
        """Returns the product. On CPU its rows are aligned by padding if a score would otherwise depend on its place in
        memory.
        """
        weight = self.weight.float() if self.routing.in_float32 else self.weight
        if self.routing.sigmoid and packs(weight):
            return rows_apart(weight, self.bias)
        return make_linear(weight, self.bias)


def _routing(block: Any, gate: Any) -> Routing:
    kind = type(gate).__name__
    if kind == "MixtralTopKRouter":
        return Routing(gate.top_k)
    if kind == "DeepseekV2TopkRouter":
        routing = Routing(gate.top_k, renormalise=False, in_float32=True, scale=float(gate.routed_scaling_factor))
        if gate.topk_method != "group_limited_greedy":
            return routing
        return replace(routing, num_groups=int(gate.num_group), top_groups=int(gate.topk_group))
    renormalise = bool(getattr(gate, "norm_topk_prob", True))
    statics = getattr(
        gate, "moe_statics", block
    )  # the bias belongs to a module of the gate (ERNIE 4.5), or to the block (MiniMax-M2, Hy3)
    bias = getattr(gate, "e_score_correction_bias", getattr(statics, "e_score_correction_bias", None))
    if kind == "Lfm2MoeTopKRouter":
        bias = block.expert_bias.detach().float() if block.use_expert_bias else None
        scale = float(gate.routed_scaling_factor)
        return Routing(gate.top_k, renormalise, sigmoid=True, choice_bias=bias, epsilon=1e-6, scale=scale)
    if bias is None:
        return Routing(gate.top_k, renormalise=renormalise, round_weights=True)
    routing = Routing(gate.top_k, renormalise=renormalise, choice_bias=bias.detach().float().flatten(), in_float32=True)
    if hasattr(gate, "norm_min"):
        return replace(routing, least_sum=float(gate.norm_min), round_weights=True)
    routing = replace(routing, sigmoid=True, in_float32=kind != "MiniMaxM2TopKRouter")
    if not routing.in_float32:
        return routing
    scale = getattr(gate, "routed_scaling_factor", getattr(gate, "router_scaling_factor", 1.0))
    groups = int(getattr(gate, "num_group", 1)), int(getattr(gate, "topk_group", 1))
    return replace(
        routing, epsilon=1e-20, scale=float(scale), num_groups=groups[0], top_groups=groups[1], best_two=True
    )


class Experts:
    """A sparse block: each row passes through the `top_k` experts that its router scores highest.

    `share`: the layers are only this rank's experts, and the output is this rank's part of a sum over ranks.
    """

    def __init__(
        self,
        router: ExpertRouter,
        layers: ExpertLayers,
        ops: Gates,
        activation: Activation,
        share: ExpertShare | None = None,
    ) -> None:
        self._ops, self._activation = ops, activation
        self.router = router.linear()  # to [num_rows, num_experts]
        self._routing = router.routing
        self.layers = layers
        self._own = None if share is None else RankExperts(share, len(router.weight))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x.float() if self._routing.in_float32 else x)
        weights, chosen = self._routing.weigh(logits, x.dtype)  # [num_rows, top_k]
        if self._own is None:
            return self._compute(x, chosen, weights)
        return self._own.through(self._compute, x, chosen, weights)

    def take_part(self) -> None:
        assert self._own is not None
        self._own.take_part(self._compute)

    def _compute(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.layers.through(self._gate, x, chosen, weights)

    def _gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._ops.gate(gate_up, self._activation)


class SharedExpert:
    """Adds the output of a shared expert, perhaps weighted by a gate, to the output of the chosen experts."""

    def __init__(self, experts: Linear, shared: Linear, gate: Linear | None = None) -> None:
        """`gate` maps [num_rows, hidden_size] to [num_rows, 1], the logits of the weights; None: all weights are 1."""
        self._experts, self._shared, self._gate = experts, shared, gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shared = self._shared(x) if self._gate is None else sigmoid(self._gate(x)) * self._shared(x)
        return self._experts(x).add_(shared)
