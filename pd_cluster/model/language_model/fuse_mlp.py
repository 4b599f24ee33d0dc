"""Makes the second half of a fused layer from transformers modules, and removes their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pd_cluster.model.language_model.architecture_quirks import Quirks
from pd_cluster.model.language_model.layer_maker import LayerMaker
from pd_cluster.model.layers.expert_share import ExpertShare, RankExperts
from pd_cluster.model.layers.expert_weights import ExpertLayers, ExpertWeights, UnpackedExperts, experts_of
from pd_cluster.model.layers.gated_mlp import Activation, ExpertRouter, Experts, GatedMLP, SharedExpert
from pd_cluster.model.layers.linear_weight import weight_of
from pd_cluster.model.layers.ops import Ops, Rows
from pd_cluster.model.layers.packed_linear import Linear, packs
from pd_cluster.model.layers.packed_modules import rows_apart
from pd_cluster.model.parallel.expert_modules import ParallelExperts

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SHARED = "shared_mlp"  # in addition to a layer's experts, or instead of them (Granite 4)
MULTIPLIER = "gate_multiplier"


def activation_name(config: Any) -> str:
    """Returns transformers' name of the activation in a config; "" if it has none."""
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", ""))


def mlp_of(layer: Any, name: str, config: Any, quirks: Quirks, maker: LayerMaker) -> Rows:
    """Fuses the layer's module `name`, an MLP or a sparse block, and the layer's shared MLP, if there is one.

    Removes both from the layer.
    """
    mlp, shared = getattr(layer, name, None), getattr(layer, SHARED, None)
    path = maker.of("mlp" if name == quirks.mlp else name)
    found = None if mlp is None else _mlp(mlp, config, quirks, path)
    if mlp is not None:
        delattr(layer, name)
    if shared is None:
        assert found is not None
        return found
    activation = ACTIVATIONS[activation_name(config)]
    beside = maker.of(SHARED).gated_mlp(shared, activation)
    delattr(layer, SHARED)
    return beside if found is None else SharedExpert(found, beside)


def is_ungated(mlp: Any) -> bool:
    """Whether an MLP, or each of its experts, has no gate: one product, an activation, another product."""
    inner = getattr(mlp, "experts", mlp)
    if isinstance(inner, UnpackedExperts):
        return not inner.is_gated
    return hasattr(inner, "up_proj") and not hasattr(inner, "gate_proj")


def _mlp(mlp: Any, config: Any, quirks: Quirks, maker: LayerMaker) -> Rows:
    """Returns the MLP as a function from [num_rows, hidden_size] to the same shape."""
    activation = quirks.activation or ACTIVATIONS.get(activation_name(config))
    own = getattr(mlp, "experts", None)
    if isinstance(own, ParallelExperts):
        mlp.experts = own.inner
    if is_ungated(mlp):
        return _ungated(mlp, quirks, maker)
    if activation is None:  # no kernel for the activation: call the module itself, with a batch of one
        if maker.adapters is not None:
            maker.adapters.take_over(mlp, maker.path)
        if isinstance(own, ParallelExperts) and maker.experts is not None:
            mlp.experts = own
            maker.experts.note(own)
        return lambda x: mlp(x[None])[0]
    if not hasattr(mlp, "experts"):
        return _multiplied_mlp(mlp, activation, maker) if hasattr(mlp, MULTIPLIER) else maker.gated_mlp(mlp, activation)
    experts = _block(mlp, quirks, activation, maker)
    if maker.adapters is not None and isinstance(experts, Experts):
        features = getattr(mlp, quirks.router).weight.shape
        router = {quirks.router: (int(features[0]), int(features[1]))}
        experts.router = maker.adapters.beside(experts.router, maker.path, router, None)
        maker.adapters.attach_experts(experts.layers, f"{maker.path}.experts")
    if getattr(mlp, "shared_experts", None) is not None:
        return SharedExpert(experts, maker.of("shared_experts").gated_mlp(mlp.shared_experts, activation))
    if not hasattr(mlp, "shared_expert"):
        return experts
    shared = maker.of("shared_expert").gated_mlp(mlp.shared_expert, activation)
    gate = weight_of(mlp.shared_expert_gate).matrix()
    if packs(gate):
        weigh = rows_apart(gate)
        if maker.adapters is not None:
            own = {"shared_expert_gate": (int(gate.shape[0]), int(gate.shape[1]))}
            weigh = maker.adapters.beside(weigh, maker.path, own, None)
    else:
        weigh = maker.joined(mlp, ("shared_expert_gate",))
    return SharedExpert(experts, shared, weigh)


def _block(mlp: Any, quirks: Quirks, activation: Activation, maker: LayerMaker) -> Rows:
    """Makes a sparse block from its router and experts; records it if this rank has only a share of the experts."""
    router, blocks = ExpertRouter.of(mlp, quirks.router), maker.experts
    if blocks is None:
        return maker.ops.experts(router, _experts(mlp, quirks), activation)
    experts = maker.ops.experts(router, _experts(mlp, quirks), activation, blocks.share)
    blocks.note(experts)
    return experts


def _experts(mlp: Any, quirks: Quirks) -> ExpertWeights:
    """Removes the experts' weights from a sparse block, and orders gates before ups."""
    weights = experts_of(mlp.experts)
    del mlp.experts
    if not quirks.interleaves_gates:
        return weights
    rows = torch.arange(weights.gate_up.out_features)
    return replace(weights, gate_up=weights.gate_up.reordered(torch.cat((rows[::2], rows[1::2]))))


def _ungated(mlp: Any, quirks: Quirks, maker: LayerMaker) -> Rows:
    """Makes an MLP or a sparse block without gates. Their only activation is relu2, a squared relu (Nemotron-H)."""
    if not hasattr(mlp, "experts"):
        first, last = maker.joined(mlp, ("up_proj",)), maker.joined(mlp, ("down_proj",))
        return lambda x: last(squared_relu(first(x)))
    layers, router = ExpertLayers(experts_of(mlp.experts)), ExpertRouter.of(mlp, quirks.router)
    del mlp.experts
    shared = _ungated(mlp.shared_experts, quirks, maker.of("shared_experts"))
    share = None if maker.experts is None else maker.experts.share
    narrow, wide = (
        None if isinstance(getattr(mlp, name), torch.nn.Identity) else maker.joined(mlp, (name,))
        for name in ("fc1_latent_proj", "fc2_latent_proj")
    )
    experts = UngatedExperts(router, layers, (narrow, wide), share)
    if maker.experts is not None:
        maker.experts.note(experts)
    return SharedExpert(experts, shared)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu_().square_()


class UngatedExperts:
    """A sparse block of experts without gates. Its experts may take narrower rows than the block."""

    def __init__(
        self,
        router: ExpertRouter,
        layers: ExpertLayers,
        ends: tuple[Linear | None, Linear | None],
        share: ExpertShare | None = None,
    ) -> None:
        """`ends`: the projections to narrower rows and back; None: not narrower. `share`: see `Experts`."""
        self._router, self._routing, self._layers = router.linear(), router.routing, layers
        self._narrow, self._wide = ends
        self._own = None if share is None else RankExperts(share, len(router.weight))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._routing.weigh(self._router(x.float() if self._routing.in_float32 else x), x.dtype)
        if self._narrow is None or self._wide is None:
            return self._through(x, chosen, weights)
        return self._wide(self._through(self._narrow(x), chosen, weights))

    def _through(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self._own is None:
            return self._compute(x, chosen, weights)
        return self._own.through(self._compute, x, chosen, weights)

    def take_part(self) -> None:
        assert self._own is not None
        self._own.take_part(self._compute)

    def _compute(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._layers.through(squared_relu, x, chosen, weights)


class MultipliedMLP:
    """A gated MLP with multipliers for its gates, before the activation, and for its output (Falcon-H1)."""

    def __init__(self, inner: GatedMLP, ops: Ops, multipliers: tuple[float, float]) -> None:
        self._inner, self._ops, self._multipliers = inner, ops, multipliers

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self._multipliers
        gate_up = self._inner.gate_up(x)
        gate_up[:, : gate_up.shape[1] // 2].mul_(first)
        return self._inner.down(self._ops.gate(gate_up, self._inner.activation)).mul_(last)


def _multiplied_mlp(mlp: Any, activation: Activation, maker: LayerMaker) -> MultipliedMLP:
    multipliers = float(mlp.gate_multiplier), float(mlp.down_multiplier)
    return MultipliedMLP(maker.gated_mlp(mlp, activation), maker.ops, multipliers)
