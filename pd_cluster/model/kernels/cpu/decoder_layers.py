"""Computes a step's decoder layers in one call of the C kernels, with the same bits as one call per operation.

Supports layers whose four products are packed and that have a norm before each half; no adapters, no experts, and no
other ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.fused_layer import FusedLayer, HeadsAttention
from pd_cluster.model.layers.gated_mlp import Activation, GatedMLP
from pd_cluster.model.layers.ops import Heads, Norm, Rope
from pd_cluster.native.packed_products import PackedProduct, ProductCall

MOST_ROWS = 64  # with more rows, the time of the calls themselves does not matter
LAYERS_AT_ONCE = 4  # layers per call, if the number of threads may change between layers
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "swigluoai": 2}  # row_kernels.h

_Pointer, _Int, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _DecoderLayer(ctypes.Structure):
    """DecoderLayer in decoder_layers.h."""

    _fields_ = (
        *((name, ProductCall) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _Pointer) for name in ("attention", "input_norm", "mlp_norm")),
        *((name, _Float) for name in ("input_eps", "mlp_eps")),
        ("activation", _Int),
    )


class _Layers(ctypes.Structure):
    """Layers in decoder_layers.h."""

    _fields_ = (
        *((name, _Int) for name in ("num_layers", "num_rows", "num_threads")),
        *((name, _Pointer) for name in ("layers", "steps", "plan_attention", "attend", "pools", "x", "delta")),
        ("has_delta", _Int),
        ("scratch", _Pointer),
    )


class BoundLayer(Protocol):
    """A layer in one pool: the address of Layer (attention_step.h), which is valid while this object lives, and the
    attention kernels for the pool.
    """

    address: int
    library: ctypes.CDLL


class StepViews(Protocol):
    """Returns the addresses of C structs that describe a step and its layers."""

    def step_address(self, rope: Rope, batch: ForwardBatch, head_dim: int) -> int:
        """Returns the address of Step (attention_step.h), with torch's thread count; valid while the batch lives."""

    def bound(self, heads: Heads, pool: KVPool) -> BoundLayer: ...


@dataclass(frozen=True, slots=True)
class _Part:
    """One layer: the C struct that describes it, and the objects that must live as long."""

    call: _DecoderLayer
    heads: Heads
    rope: str
    kept: tuple[object, ...]


class DecoderLayers:
    """Computes all layers of a step with at most MOST_ROWS rows."""

    def __init__(self, library: ctypes.CDLL, parts: list[_Part], views: StepViews) -> None:
        for function in (library.pd_layers, library.pd_layers_nbytes):
            function.argtypes = [_Pointer]
        library.pd_layers.restype, library.pd_layers_nbytes.restype = None, _Int
        self._library, self._parts, self._views = library, parts, views
        self._layers = (_Pointer * len(parts))(*(ctypes.addressof(part.call) for part in parts))
        self._width = int(parts[0].call.qkv.inputs)
        self._kinds: dict[tuple[str, int], int] = {}  # rope and group of a layer -> its head_dim
        self._kind_of: list[tuple[str, int]] = []
        self._windows = {part.heads.sliding_window for part in parts}
        self._bound_to: tuple[KVPool, ...] = ()
        self._bound: list[BoundLayer] = []
        self._pools = (_Pointer * len(parts))()

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether the kernels support this batch. All rows must be sampled, because every layer computes every row."""
        return (
            batch.num_tokens <= MOST_ROWS
            and len(batch.sample_rows) == batch.num_tokens
            and batch.hidden is None
            and batch.images is None
            and batch.virtual is None
        )

    def __call__(self, x: torch.Tensor, ropes: dict[str, Rope], batch: ForwardBatch) -> torch.Tensor:
        """Updates x [num_tokens, hidden_size] in place; returns what the last layer still has to add to x."""
        assert x.shape == (batch.num_tokens, self._width)
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        delta = torch.empty_like(x)
        num_layers = len(self._parts)
        at_once = num_layers
        if batch.on_layer is not None or batch.after_layer is not None:
            at_once = 1 if batch.on_layer is not None else LAYERS_AT_ONCE
        pools = (batch.pool, *(each.pool for each in batch.further))
        if self._bound_to != pools:
            self._bind(batch, pools)
        attend = self._bound[0].library
        call = _Layers(
            num_rows=len(x), x=x.data_ptr(), delta=delta.data_ptr(),
            plan_attention=ctypes.cast(attend.pd_attend_plan, _Pointer),
            attend=ctypes.cast(attend.pd_attend_work, _Pointer),
        )  # fmt: skip
        size = ctypes.sizeof(_Pointer)
        for first in range(0, num_layers, at_once):
            call.num_layers = min(at_once, num_layers - first)
            steps = self._steps(ropes, batch)
            call.pools = ctypes.addressof(self._pools) + first * size
            call.layers = ctypes.addressof(self._layers) + first * size
            call.steps = ctypes.addressof(steps) + first * size
            call.num_threads, call.has_delta = torch.get_num_threads(), int(first > 0)
            scratch = torch.empty(self._library.pd_layers_nbytes(ctypes.addressof(call)), dtype=torch.uint8)
            call.scratch = scratch.data_ptr()
            self._library.pd_layers(ctypes.addressof(call))
            if at_once < num_layers:
                for part in self._parts[first : first + at_once]:
                    batch.layer_written(part.heads.layer_idx, part.heads.sliding_window)
        if at_once == num_layers:  # otherwise `layer_written` has recorded them
            batch.layers_written += [part.heads.layer_idx for part in self._parts]
            batch.windows |= self._windows
        return delta

    def _steps(self, ropes: dict[str, Rope], batch: ForwardBatch) -> ctypes.Array[ctypes.c_void_p]:
        """Returns, for each layer, the address of the Step that describes the batch to it."""
        addresses = {
            (rope, group): self._views.step_address(ropes[rope], batch.of_group(group), head_dim)
            for (rope, group), head_dim in self._kinds.items()
        }
        return (_Pointer * len(self._kind_of))(*(addresses[kind] for kind in self._kind_of))

    def _bind(self, batch: ForwardBatch, pools: tuple[KVPool, ...]) -> None:
        """Records each layer's address in its pool. There is one pool per group of layers, and all have one dtype."""
        assert len({pool.layout.dtype for pool in pools}) == 1
        own = [batch.of_layer(part.heads.layer_idx).pool for part in self._parts]
        self._bound = [self._views.bound(part.heads, pool) for part, pool in zip(self._parts, own, strict=True)]
        for at, (part, bound, pool) in enumerate(zip(self._parts, self._bound, own, strict=True)):
            part.call.attention = bound.address
            self._pools[at] = pool.data.data_ptr()
        self._kind_of = [(part.rope, pools.index(pool)) for part, pool in zip(self._parts, own, strict=True)]
        self._kinds = {kind: part.heads.head_dim for kind, part in zip(self._kind_of, self._parts, strict=True)}
        self._bound_to = pools


def decoder_layers(library: ctypes.CDLL, layers: Sequence[FusedLayer], views: StepViews) -> DecoderLayers | None:
    """Returns a function that computes all layers; None if a layer is not supported."""
    parts = [_part(layer) for layer in layers]
    found = [part for part in parts if part is not None]
    widths = {int(part.call.qkv.inputs) for part in found}
    return DecoderLayers(library, found, views) if len(found) == len(parts) and len(widths) == 1 else None


def _fit(heads: Heads, qkv: ProductCall, output: ProductCall, gate_up: ProductCall, down: ProductCall) -> bool:
    """Whether each product's output is as wide as the next one's input; C allocates and reads by these sizes."""
    width = heads.num_heads * heads.head_dim
    needed = (
        (qkv.outputs, width + 2 * heads.num_kv_heads * heads.head_dim),
        (output.inputs, width),
        (gate_up.outputs, 2 * down.inputs),
        *((each, qkv.inputs) for each in (output.outputs, gate_up.inputs, down.outputs)),
    )
    return all(int(found) == int(wanted) for found, wanted in needed)


def _part(layer: FusedLayer) -> _Part | None:
    mlp, norms, attention = layer.mlp, (layer.input_norm, layer.mlp_norm), layer.attention
    if not isinstance(attention, HeadsAttention) or attention.spanning:
        return None
    has_more = layer.post_attention_norm is not None or layer.post_mlp_norm is not None
    if has_more or layer.residual_multiplier != 1.0 or not isinstance(mlp, GatedMLP) or mlp.is_special:
        return None
    products = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
    if not all(isinstance(each, PackedProduct) for each in products):
        return None
    calls = [each.call for each in products if isinstance(each, PackedProduct)]
    if not _fit(attention.heads, *calls):
        return None
    weights = [norm.weight for norm in norms if isinstance(norm, Norm)]
    if len(weights) < len(norms) or any(weight.dtype != torch.float32 for weight in weights):
        return None
    call = _DecoderLayer(
        *calls,
        input_norm=weights[0].data_ptr(),
        mlp_norm=weights[1].data_ptr(),
        input_eps=norms[0].eps if norms[0] is not None else 0.0,
        mlp_eps=norms[1].eps if norms[1] is not None else 0.0,
        activation=ACTIVATIONS[mlp.activation],
    )
    return _Part(call, attention.heads, attention.rope, (products, weights))
