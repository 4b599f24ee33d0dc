"""Loads weights in forms that transformers does not support: transformers loads placeholders, then these are replaced.

A placeholder has the shape and dtype that transformers expects, but the memory of a single value.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pd_cluster.errors import ModelError
from pd_cluster.model.layers.expert_weights import PRODUCTS, ExpertStack, UnpackedExperts, products_of
from pd_cluster.model.layers.linear_weight import PLAIN, Tensors, UnpackedLinear, WeightTensors, no_weight
from pd_cluster.model.layers.whole_rows import WholeRows
from pd_cluster.model.parallel.parallel_layers import RankShare
from pd_cluster.model.parallel.parallel_plan import EXPERT_ALIASES, FUSED_EXPERTS, LAYER
from pd_cluster.model.weights.weight_forms import FORMS, form_of

# The layers that are joined into each product of transformers, in this order.
JOINED = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
LAYER_OF = re.compile(r"(?:.*\.)?layers\.\d+\.")
# Parts of paths in files -> in the model, for Nemotron-H and Kimi-Linear.
RENAMED = (
    (re.compile(r"^backbone\."), "model."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.self_attn\.(f_[ab]_proj)$"), r".self_attn.forget_gate.\1"),
)
ONE_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<name>\w+)")
Weights = dict[str, torch.Tensor]
OneByOne = Mapping[int, Mapping[str, Tensors]]  # expert index -> layer name -> tensors


@dataclass(frozen=True, slots=True)
class PlaceholderModules:
    """Weights by the path of the module that they replace; for experts, by the product's name.

    `rows`, by the same paths: for each linear layer or experts' `down_proj` that reads whole rows on every rank, how
    these are joined and which outputs this rank computes.
    """

    linears: dict[str, WeightTensors] = field(default_factory=dict)
    experts: dict[str, dict[str, WeightTensors]] = field(default_factory=dict)
    rows: dict[str, WholeRows] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.linears) + len(self.experts)

    def install(self, model: torch.nn.Module) -> None:
        """Replaces the modules that have loaded placeholders."""
        for path, parts in self.linears.items():
            linear: Any = model.get_submodule(path)
            model.set_submodule(path, UnpackedLinear(parts, linear.weight.shape, self.rows.get(path)))
        for path, products in self.experts.items():
            inner = model.get_submodule(path)
            gate_up, down = (products[name] for name in products_of(inner) or PRODUCTS)
            model.set_submodule(path, UnpackedExperts(inner, gate_up, down, self.rows.get(path)))


def is_in_other_form(key: str) -> bool:
    """Whether a tensor, by its name in the files, is a part of a form that transformers does not support."""
    fused, layer = FUSED_EXPERTS.search(key), LAYER.search(key)
    name = (fused["part"] or "weight") if fused else layer["part"] if layer else ""
    return name not in PLAIN.parts and any(name in form.parts for form in FORMS.values())


def hold(
    weights: Weights, architecture: Any, config: Any, dtype: torch.dtype, share: RankShare | None = None
) -> PlaceholderModules:
    """Removes layers in other forms from `weights`, a model's tensors by name, and puts placeholders in their place.

    `architecture`: the class in transformers. `share`: the weights are one rank's share. Raises ModelError if they do
    not fit the architecture.
    """
    held = PlaceholderModules()
    layers = _take(weights)
    if not layers:
        return held
    with torch.device("meta"):
        skeleton: torch.nn.Module = architecture(config)
    named = dict(skeleton.named_modules())
    places = {name: products for name, module in named.items() if (products := products_of(module)) is not None}
    singles: dict[str, dict[int, dict[str, Tensors]]] = defaultdict(lambda: defaultdict(dict))
    for path, tensors in layers.items():
        path = path if path in named else _renamed(path)
        if one := ONE_EXPERT.fullmatch(path):
            name = EXPERT_ALIASES.get(one["name"], one["name"])
            singles[_experts_path(places, one["experts"])][int(one["index"])][name] = tensors
        elif path.rpartition(".")[2] in PRODUCTS and ".experts." in path:
            place = _experts_path(places, path.rpartition(".")[0])
            held.experts.setdefault(place, {})[path.rpartition(".")[2]] = WeightTensors(
                form_of(tensors, path), tensors, dtype
            )
        else:
            held.linears[path] = WeightTensors(form_of(tensors, path), tensors, dtype)
    for path, experts in singles.items():
        held.experts[path] = {name: _stack(path, experts, JOINED[name], dtype) for name in places[path]}
    _leave_placeholders(weights, held, named, dtype, share)
    return held


def _renamed(path: str) -> str:
    """Maps a layer's path in the files to its path in the model."""
    for part, name in RENAMED:
        path = part.sub(name, path)
    return path


def _take(weights: Weights) -> dict[str, Tensors]:
    """Removes layers in other forms, with all their parts, and returns them by path."""
    keys: dict[str, dict[str, str]] = defaultdict(dict)
    for key in weights:
        if fused := FUSED_EXPERTS.search(key):
            keys[key[: fused.end("name")]][fused["part"] or "weight"] = key
        elif layer := LAYER.search(key):
            keys[key[: layer.end("path")]][layer["part"]] = key
    others = {path: parts for path, parts in keys.items() if any(is_in_other_form(key) for key in parts.values())}
    return {path: {part: weights.pop(key) for part, key in parts.items()} for path, parts in others.items()}


def _experts_path(places: Iterable[str], path: str) -> str:
    """Returns the module path of the experts in a path's layer; the path in files may differ. Raises ModelError."""
    layer = LAYER_OF.match(path)
    found = [place for place in places if layer is not None and place.startswith(layer.group())]
    if len(found) != 1:
        raise ModelError(f"{path}: this architecture has no experts here that can be quantized")
    return found[0]


def _stack(path: str, experts: OneByOne, names: tuple[str, ...], dtype: torch.dtype) -> WeightTensors:
    """Stacks layers that the files store expert by expert. Raises ModelError if one is missing or has other parts."""
    for index in range(len(experts)):
        if missing := [name for name in names if name not in experts.get(index, {})]:
            raise ModelError(
                f"{path}: expert {index} lacks {missing[0]} in the form of the other experts; copy or recreate the "
                f"folder"
            )
    layers = [[experts[index][name] for name in names] for index in range(len(experts))]
    form = form_of(layers[0][0], path)
    for index, each in enumerate(layers):
        if any(layer.keys() != layers[0][0].keys() for layer in each):
            expected = ", ".join(sorted(layers[0][0]))
            raise ModelError(f"{path}: {' or '.join(names)} of expert {index} lacks some of the tensors {expected}")
    return WeightTensors(form, ExpertStack.stacked(form, layers, dtype).parts, dtype)


def _leave_placeholders(
    weights: Weights,
    held: PlaceholderModules,
    named: Mapping[str, torch.nn.Module],
    dtype: torch.dtype,
    share: RankShare | None,
) -> None:
    """Leaves placeholders, and records the layers that take whole rows. Raises ModelError for an unknown layer.

    `named`: the modules of the model, by path.
    """
    for path in held.linears:
        linear = named.get(path)
        if not isinstance(linear, torch.nn.Linear):
            raise ModelError(f"{path}: this architecture has no linear layer here that can be quantized")
        if (rows := _whole_rows(share, path, held.linears[path], len(linear.weight))) is not None:
            held.rows[path] = rows
        _check_shape(path, held.linears[path], tuple(linear.weight.shape), rows=rows)
        weights |= {f"{path}.{name}": no_weight(each.shape, dtype) for name, each in linear.named_parameters()}
    for path, products in held.experts.items():
        experts = named[path]
        if missing := [name for name in products_of(experts) or PRODUCTS if name not in products]:
            raise ModelError(f"{path}: {missing[0]} is missing, or not in the form of the other product")
        for name, each in experts.named_parameters():
            if name in products:
                turned = bool(getattr(experts, "is_transposed", False))
                num_outputs = each.shape[-1 if turned else -2]
                has_parts = share is not None and not share.plan.has_whole_experts
                rows = _whole_rows(share, f"{path}.{name}", products[name], num_outputs) if has_parts else None
                if rows is not None:
                    held.rows[path] = rows  # only for `down_proj`, whose inputs are split over ranks
                _check_shape(f"{path}.{name}", products[name], tuple(each.shape), turned, rows)
        weights |= {f"{path}.{name}": no_weight(each.shape, dtype) for name, each in experts.named_parameters()}


def _whole_rows(share: RankShare | None, path: str, parts: WeightTensors, num_outputs: int) -> WholeRows | None:
    """Returns this rank's share of a layer if its inputs are split over ranks and rounded to codes; otherwise None."""
    if share is None or not parts.form.rounds_activations or not share.plan.shares_inputs(path):
        return None
    return share.whole_rows(num_outputs)


def _check_shape(
    path: str, parts: WeightTensors, shape: tuple[int, ...], is_transposed: bool = False, rows: WholeRows | None = None
) -> None:
    """Raises ModelError if the features do not match `shape`, which is [..., N, K], or [..., K, N] if transposed."""
    leading = len(shape) - 2
    outputs, inputs = set(), {0}
    for name, tensor in parts.tensors.items():
        part = parts.form.parts[name]
        outputs |= set() if part.outputs is None else {tensor.shape[leading + part.outputs]}
        inputs |= set() if part.inputs is None else {tensor.shape[leading + part.inputs]}
        if tuple(tensor.shape[:leading]) != shape[:leading]:
            raise _wrong_shape(path, f"{name} of {list(tensor.shape)}", shape)
    expected = shape[leading:][::-1] if is_transposed else shape[leading:]
    if rows is not None:
        expected = rows.own_shape(expected[1])
    if (*outputs, max(inputs)) != expected:
        features = " and ".join(map(str, sorted(outputs)))
        raise _wrong_shape(path, f"{features} output and {max(inputs)} input features", shape)


def _wrong_shape(path: str, found: str, shape: tuple[int, ...]) -> ModelError:
    return ModelError(
        f"{path}: {found}, but config.json requires {list(shape)}; copy the folder again, since its files do not match"
    )
