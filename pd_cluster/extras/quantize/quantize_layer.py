"""Quantizes the linear layers of one decoder layer, given its inputs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pd_cluster.extras.quantize.layerwise import Hidden, through
from pd_cluster.extras.quantize.quantize_methods import awq_scales, gptq, numbers, round_to_nearest, smooth_scales
from pd_cluster.extras.quantize.quantize_schemes import Scheme, Tensors

log = logging.getLogger(__name__)

METHODS = ("rtn", "gptq", "smoothquant", "awq")
STRENGTH = 0.5  # the exponent of SmoothQuant
SAMPLED_ROWS = 512  # rows that AWQ compares
UNCHANGED = 1e-3  # maximum change of outputs when scales move, relative to the largest output
# Scales move from the first module's outputs to the others' inputs, which depend on them feature by feature.
NORMS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
)
LINEARS = (("mlp.up_proj", ("mlp.down_proj",)),)


@dataclass(slots=True)
class InputStatistics:
    """Statistics of a linear layer's inputs. `rows`: a sample of them."""

    largest: torch.Tensor | None = None  # [K], largest magnitudes
    rows: list[torch.Tensor] = field(default_factory=list)
    hessian: torch.Tensor | None = None

    def add(self, x: torch.Tensor, method: str) -> None:
        x = x.reshape(-1, x.shape[-1]).to(torch.float32)
        if method == "gptq":
            products = x.T @ x
            self.hessian = products if self.hessian is None else self.hessian.add_(products)
            return
        most = x.abs().amax(0)
        self.largest = most if self.largest is None else torch.maximum(self.largest, most)
        if sum(map(len, self.rows)) < SAMPLED_ROWS:
            self.rows.append(x[:SAMPLED_ROWS].clone())


@contextmanager
def _watched(linears: dict[str, torch.nn.Linear], method: str) -> Iterator[dict[str, InputStatistics]]:
    found = {name: InputStatistics() for name in linears}
    hooks = [
        linear.register_forward_pre_hook(lambda _, args, name=name: found[name].add(args[0], method))
        for name, linear in linears.items()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def quantize_layer(
    layer: torch.nn.Module, names: list[str], scheme: Scheme, method: str, hidden: Hidden, called: list[dict[str, Any]]
) -> dict[str, Tensors]:
    """Returns the tensors of each named linear layer. Leaves the dequantized weights in the layer.

    The norms before the linear layers may change.
    """
    linears = {name: layer.get_submodule(name) for name in names}
    if strangers := [name for name, each in linears.items() if not isinstance(each, torch.nn.Linear)]:
        raise TypeError(f"{strangers[0]} is not a linear layer")
    with _watched(linears, method) as inputs:  # type: ignore[arg-type]
        through(layer, hidden, called)
    if method in ("smoothquant", "awq"):
        _move_scales(layer, inputs, scheme, method, hidden[:1], called[:1])
    found = {}
    for name, linear in linears.items():
        weight: torch.Tensor = linear.weight.data  # type: ignore[assignment]
        hessian = inputs[name].hessian
        codes, steps = round_to_nearest(weight, scheme) if hessian is None else gptq(weight, hessian, scheme)
        found[name] = scheme.stored(codes, steps)
        weight.copy_(numbers(codes, steps))
    return found


def _move_scales(
    layer: torch.nn.Module,
    inputs: dict[str, InputStatistics],
    scheme: Scheme,
    method: str,
    hidden: Hidden,
    called: list[dict[str, Any]],
) -> None:
    """Moves scales where the layer's output stays the same."""
    for place, names in (*NORMS, *(LINEARS if method == "awq" else ())):
        modules: Any = dict(layer.named_modules())
        if place not in modules or any(name not in inputs for name in names):
            continue
        source, targets = modules[place], [modules[name] for name in names]
        seen, weights = inputs[names[0]], [target.weight.data for target in targets]
        if seen.largest is None:
            continue
        if method == "awq":
            scales = awq_scales(torch.cat(seen.rows)[:SAMPLED_ROWS], weights, scheme)
        else:
            scales = smooth_scales(seen.largest, weights, STRENGTH)
        before = through(layer, hidden, called)[0]
        kept = [each.data.clone() for each in source.parameters()], [weight.clone() for weight in weights]
        for added in (0.0, 1.0):  # some norms multiply by 1 + weight
            _scale(source, scales, added)
            for weight in weights:
                weight.mul_(scales)
            after = through(layer, hidden, called)[0]
            if float((after - before).abs().max()) <= UNCHANGED * float(before.abs().max()):
                break
            for parameter, old in zip((*source.parameters(), *weights), (*kept[0], *kept[1]), strict=True):
                parameter.data.copy_(old)
        else:
            log.warning("%s: scales cannot move to %s in this architecture", place, names[0])


def _scale(source: Any, scales: torch.Tensor, added: float) -> None:
    if isinstance(source, torch.nn.Linear):
        source.weight.data.div_(scales.unsqueeze(1))
        if source.bias is not None:
            source.bias.data.div_(scales)
        return
    source.weight.data.copy_((source.weight.data + added) / scales - added)
