"""The C kernels as `Ops`. Checks everything that C relies on: dtypes, shapes, contiguity.

Block ids are not checked here, but against the pool when the batch is built.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.kv.kv_layout import INDEX, KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.cpu.decoder_layers import ACTIVATIONS, DecoderLayers, decoder_layers
from pd_cluster.model.layers.attention.sparse_selection import IndexNorm, IndexRows
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.layers.expert_weights import ExpertLayers, ExpertWeights
from pd_cluster.model.layers.fused_layer import FusedLayer
from pd_cluster.model.layers.gated_mlp import Activation, ExpertRouter, Experts
from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.layers.ops import Heads, Latents, Norm, Rope, Rows, prepared_index
from pd_cluster.model.layers.packed_linear import Linear
from pd_cluster.model.layers.states.recurrent_kernels import NativeStates, RecurrentKernel, StateShape
from pd_cluster.native import build
from pd_cluster.native.recurrence_values import Convolution, GatedDelta, Mamba2

MAX_HEAD_DIM = 256
MAX_LATENTS = (512, 128)  # widths of the latent and of the rotated part
MAX_INDEX_HEADS = 256
LEAST_SLAB = 16  # tokens whose scores are computed at once, in addition to one per thread
HEAD_DIM_MULTIPLE = 16
POOLS = {"float32": 0, "bfloat16": 1, "int8": 2, "fp8_e4m3": 3, "int4": 4}  # pool_vectors.h

_Pointer, _Int, _Float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class StepFields(ctypes.Structure):
    """Step in attention_step.h: one batch."""

    _fields_ = (
        *((name, _Int) for name in ("num_tokens", "num_seqs", "num_threads")),
        *((name, _Pointer) for name in ("query_starts", "context_lens", "block_table", "table_starts", "order")),
        *((name, _Pointer) for name in ("together", "slots", "cos", "sin", "key_limits")),
    )


class LayerFields(ctypes.Structure):
    """Layer in attention_step.h: one layer in one pool."""

    _fields_ = (
        *((name, _Int) for name in ("num_heads", "num_kv_heads", "head_dim", "window", "first_key", "block_size")),
        *((name, _Int) for name in ("block_stride", "key_offset", "value_offset")),
        *((name, _Float) for name in ("scaling", "softcap", "eps")),
        *((name, _Pointer) for name in ("q_norm", "k_norm", "sinks")),
    )


class _Latents(ctypes.Structure):
    """Latents in latent_attention.h: one layer in one pool."""

    _fields_ = (
        *((name, _Int) for name in ("num_heads", "width", "rope_width", "query_width", "value_width", "block_size")),
        *((name, _Int) for name in ("block_stride", "latent_offset", "rope_offset", "first_key")),
        ("scaling", _Float),
        *((name, _Pointer) for name in ("keys", "values", "chosen")),
        ("most", _Int),
    )


class _Index(ctypes.Structure):
    """Index in sparse_index.h: one layer's index keys in one pool."""

    _fields_ = tuple((name, _Int) for name in ("num_heads", "width", "most", "block_size", "block_stride", "offset"))


@dataclass(slots=True)
class _BatchState:
    """The C struct that describes a batch with one kind of rope, and the objects that must live as long."""

    step: StepFields
    address: int
    rope: Rope
    order: npt.NDArray[np.int32]
    together: npt.NDArray[np.int32] | None


@dataclass(slots=True)
class _Bound:
    """The C struct that describes a layer in one pool, and the attention kernels for the pool's dtype."""

    pool: KVPool
    layer: LayerFields
    address: int
    attend: Any
    library: ctypes.CDLL  # the attention kernels


@functools.cache
def _library(flags: tuple[str, ...]) -> ctypes.CDLL:
    library = build.load(flags)
    library.pd_norm.argtypes = [*[_Pointer] * 4, _Int, _Int, _Float, _Int]
    library.pd_gate.argtypes = [*[_Pointer] * 2, _Int, _Int, ctypes.c_int, _Int]
    for function in (library.pd_norm, library.pd_gate):
        function.restype = None
    return library


@functools.cache
def _attend_in(flags: tuple[str, ...], pool_dtype: str) -> ctypes.CDLL:
    """Returns the kernels for pools of this dtype. Each dtype has its own library, compiled at first use."""
    library = build.load((*flags, *_chosen(pool_dtype)))
    library.pd_attend.argtypes = [_Pointer] * 5
    library.pd_attend.restype = None
    return library


@functools.cache
def _latents_in_pools(flags: tuple[str, ...], pool_dtype: str) -> ctypes.CDLL:
    """Returns the kernels of latent attention for pools of this dtype, compiled at first use."""
    library = build.load((*flags, *_chosen(pool_dtype), "-DLATENTS"))
    library.pd_latents.argtypes = [_Pointer] * 7
    library.pd_choose.argtypes = [*[_Pointer] * 7, *[_Int] * 3, *[_Pointer] * 4]
    library.pd_latents.restype = library.pd_choose.restype = None
    return library


def _chosen(pool_dtype: str) -> tuple[str, ...]:
    return (f"-DPOOL={POOLS[pool_dtype]}",) if POOLS[pool_dtype] else ()


def supports(layout: KVLayout, latent_values: Collection[int] = ()) -> bool:
    """Whether the attention kernels support a pool. `latent_values`: with latents, the widths of the heads' values."""
    if layout.dtype not in POOLS:
        return False
    multiple = HEAD_DIM_MULTIPLE * (2 if layout.dtype == "int4" else 1)  # each half of a vector fills whole registers
    if layout.has_latents:
        widths = (*(plane.width for plane in layout.planes), *latent_values)
        most = (*MAX_LATENTS, *(MAX_HEAD_DIM for _ in widths[len(MAX_LATENTS) :]))
        return all(width % multiple == 0 and width <= limit for width, limit in zip(widths, most, strict=True))
    return layout.has_one_width and layout.head_dim % multiple == 0 and layout.head_dim <= MAX_HEAD_DIM


class CpuOps:
    """`Ops` in C. Raises KernelsUnavailable if the kernels cannot be built or loaded.

    `pool_dtype`: the dtype of the pool that will be used; attention for other dtypes is compiled at first use.
    `has_latents`: the pool holds latents.
    """

    name = "C"
    attention = "C"
    prompt_states = ""
    is_capturable = False  # there are no graphs on a CPU
    wide_latents = True

    def __init__(
        self, flags: tuple[str, ...] = build.FLAGS, pool_dtype: str = "float32", has_latents: bool = False
    ) -> None:
        library = _library(flags)
        self._norm, self._gate, self._flags = library.pd_norm, library.pd_gate, flags
        (_latents_in_pools if has_latents else _attend_in)(flags, pool_dtype)
        self._layers: dict[Heads, _Bound] = {}

    def linear(self, weight: LinearWeight) -> Linear:
        return weight.linear()

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self._add_norm(x, None, norm)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        assert delta.shape == x.shape
        assert delta.is_contiguous()
        return self._add_norm(x, delta, norm)

    def _add_norm(self, x: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        num_rows, features = x.shape
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        assert norm.weight.shape[0] == features
        out = torch.empty_like(x)
        self._norm(
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            norm.weight.data_ptr(),
            out.data_ptr(),
            num_rows,
            features,
            norm.eps,
            torch.get_num_threads(),
        )
        return out

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        num_rows, features = gate_up.shape
        assert gate_up.dtype == torch.float32
        assert gate_up.is_contiguous()
        out = torch.empty(num_rows, features // 2)
        self._gate(
            gate_up.data_ptr(),
            out.data_ptr(),
            num_rows,
            features // 2,
            ACTIVATIONS[activation],
            torch.get_num_threads(),
        )
        return out

    def experts(
        self, router: ExpertRouter, weights: ExpertWeights, activation: Activation, share: ExpertShare | None = None
    ) -> Rows:
        return Experts(router, ExpertLayers(weights, ACTIVATIONS[activation]), self, activation, share)

    def attend(self, heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
        num_tokens, width = qkv.shape
        assert num_tokens == batch.num_tokens
        assert width == (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        assert qkv.dtype == torch.float32
        assert qkv.is_contiguous()
        address, bound = self.step_address(rope, batch, heads.head_dim), self.bound(heads, batch.pool)
        out = torch.empty(num_tokens, heads.num_heads * heads.head_dim)
        bound.attend(address, bound.address, batch.pool.data.data_ptr(), qkv.data_ptr(), out.data_ptr())
        batch.layer_written(heads.layer_idx, heads.sliding_window)
        return out

    def attend_latents(
        self, latents: Latents, queries: torch.Tensor, kept: torch.Tensor, rope: Rope, batch: ForwardBatch
    ) -> torch.Tensor:
        num_tokens, pool = batch.num_tokens, batch.pool
        width, rope_width = latents.width, latents.rope_width
        assert queries.shape == (num_tokens, latents.num_heads * (latents.query_width + rope_width))
        assert kept.shape == (num_tokens, width + rope_width)
        latent, rotated = self.norm(kept[:, :width].contiguous(), latents.norm), kept[:, width:].contiguous()
        assert queries.dtype == latent.dtype == rotated.dtype == torch.float32
        assert queries.is_contiguous()
        address, layer = self.step_address(rope, batch, rope_width), _latents_in(latents, pool, batch.chosen)
        out = torch.empty(num_tokens, latents.num_heads * latents.value_width)
        _latents_in_pools(self._flags, pool.layout.dtype).pd_latents(
            address, ctypes.addressof(layer), pool.data_ptr(), queries.data_ptr(), latent.data_ptr(),
            rotated.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        batch.layer_written(latents.layer_idx, None)
        return out

    def prepare_index(
        self, queries: torch.Tensor, keys: torch.Tensor, norm: IndexNorm, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return prepared_index(queries, keys, norm, rope)

    def choose_keys(self, rows: IndexRows, rope: Rope, batch: ForwardBatch) -> torch.Tensor | None:
        (num_tokens, num_heads, width), pool = rows.queries.shape, batch.pool
        assert num_heads <= MAX_INDEX_HEADS
        assert rows.weights.shape == (num_tokens, num_heads)
        assert rows.keys.shape == (num_tokens, width) == (batch.num_tokens, pool.layout.width_of(INDEX))
        for given in (rows.queries, rows.weights, rows.keys):
            assert given.dtype == torch.float32
            assert given.is_contiguous()
        chooses, seqs, longest = _choosing(batch, rows.most)
        num_slab = min(len(chooses), LEAST_SLAB + torch.get_num_threads())
        scores = torch.empty(num_slab, longest)
        counters = np.zeros(2 * -(-len(chooses) // max(1, num_slab)), dtype=np.int64)
        chosen = torch.empty(num_tokens, rows.most, dtype=torch.int32) if len(chooses) else None
        offset = pool.planes(rows.layer_idx)[2].data_ptr() - pool.data_ptr()
        index = _Index(num_heads, width, rows.most, pool.layout.block_size, pool.layout.block_nbytes, offset)
        _latents_in_pools(self._flags, pool.layout.dtype).pd_choose(
            self.step_address(rope, batch, rope.cos.shape[1]), ctypes.addressof(index), pool.data_ptr(),
            rows.queries.data_ptr(), rows.weights.data_ptr(), rows.keys.data_ptr(), scores.data_ptr(),
            longest, num_slab, len(chooses), chooses.ctypes.data, seqs.ctypes.data,
            None if chosen is None else chosen.data_ptr(), counters.ctypes.data,
        )  # fmt: skip
        return chosen

    def takes_states(self, shape: StateShape, device: torch.device) -> bool:
        return NativeStates.takes(shape, device)

    def recurrent(self, convolution: Convolution, recurrence: GatedDelta | Mamba2 | None) -> RecurrentKernel:
        return NativeStates.of(convolution, recurrence, self._flags)

    def decoder(self, layers: Sequence[FusedLayer]) -> DecoderLayers | None:
        """Returns a function that computes all layers; None if the kernels do not support them."""
        return decoder_layers(_library(self._flags), layers, self)

    def step_address(self, rope: Rope, batch: ForwardBatch, head_dim: int) -> int:
        """Returns the address of the C struct for a batch, with torch's thread count; valid while the batch lives."""
        states = batch.kernel_state
        if not isinstance(states, dict):
            states = batch.kernel_state = {}
        state = states.get(rope)
        if state is None:
            state = states[rope] = _batch_state(batch, rope, head_dim)
        state.step.num_threads = torch.get_num_threads()  # may change between layers
        address: int = state.address
        return address

    def bound(self, heads: Heads, pool: KVPool) -> _Bound:
        """Returns the C struct of a layer in a pool."""
        found = self._layers.get(heads)
        return self._bind(heads, pool) if found is None or found.pool is not pool else found

    def _bind(self, heads: Heads, pool: KVPool) -> _Bound:
        data, layout = pool.data, pool.layout
        assert data.dtype == TORCH_DTYPES[layout.dtype]
        assert data.is_contiguous()
        strides = [data.element_size() * stride for stride in data.stride()]
        assert (layout.local_kv_heads, layout.head_dim) == (heads.num_kv_heads, heads.head_dim)
        assert heads.num_heads % heads.num_kv_heads == 0
        layer = layout.local_layer(heads.layer_idx)
        assert layer < layout.num_layers
        if heads.sinks is not None:
            assert heads.sinks.shape == (heads.num_heads,)
            assert heads.sinks.dtype == torch.float32
            assert heads.sinks.is_contiguous()
        bound = LayerFields(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            window=heads.sliding_window or 0,
            first_key=heads.first_key,
            block_size=layout.block_size,
            block_stride=strides[0],
            key_offset=layer * strides[1],
            value_offset=layer * strides[1] + strides[2],
            scaling=heads.scaling,
            softcap=heads.softcap or 0.0,
            eps=heads.q_norm.eps if heads.q_norm is not None else 0.0,
            q_norm=heads.q_norm.weight.data_ptr() if heads.q_norm is not None else None,
            k_norm=heads.k_norm.weight.data_ptr() if heads.k_norm is not None else None,
            sinks=heads.sinks.data_ptr() if heads.sinks is not None else None,
        )
        library = self._kernels_for(layout.dtype)
        found = self._layers[heads] = _Bound(pool, bound, ctypes.addressof(bound), library.pd_attend, library)
        return found

    def _kernels_for(self, pool_dtype: str) -> ctypes.CDLL:
        return _attend_in(self._flags, pool_dtype)


def _choosing(batch: ForwardBatch, most: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """Returns the tokens that see more than `most` keys, their sequences, and the largest number of keys that a token
    sees.
    """
    seqs = np.repeat(np.arange(batch.num_seqs, dtype=np.int32), batch.query_lens)
    ends = np.cumsum(batch.query_lens)
    seen = batch.host_context_lens[seqs] - ends[seqs] + np.arange(1, len(seqs) + 1)
    (chooses,) = np.nonzero(seen > most)
    return chooses.astype(np.int32), seqs[chooses], int(seen[chooses].max(initial=0))


def _latents_in(latents: Latents, pool: KVPool, chosen: torch.Tensor | None) -> _Latents:
    """Returns the C struct of a layer in a pool. In each block the layers are consecutive, and each has its planes."""
    layout, planes = pool.layout, pool.layer(latents.layer_idx)
    first = pool.data_ptr()
    assert [plane.width for plane in layout.planes[:2]] == [latents.width, latents.rope_width]
    for matrix in (latents.keys, latents.values):
        assert matrix.dtype == torch.float32
        assert matrix.is_contiguous()
    assert latents.values.shape[:2] == (latents.num_heads, latents.width)
    return _Latents(
        num_heads=latents.num_heads,
        width=latents.width,
        rope_width=latents.rope_width,
        query_width=latents.query_width,
        value_width=latents.value_width,
        block_size=layout.block_size,
        block_stride=layout.block_nbytes,
        latent_offset=planes[0].data_ptr() - first,
        rope_offset=planes[1].data_ptr() - first,
        first_key=latents.first_key,
        scaling=latents.scaling,
        keys=latents.keys.data_ptr(),
        values=latents.values.data_ptr(),
        chosen=None if chosen is None else chosen.data_ptr(),
        most=0 if chosen is None else chosen.shape[1],
    )


def _batch_state(batch: ForwardBatch, rope: Rope, head_dim: int) -> _BatchState:
    for table in (rope.cos, rope.sin):
        assert table.shape == (batch.num_tokens, head_dim)
        assert table.dtype == torch.float32
        assert table.is_contiguous()
    if batch.key_limits is not None:
        assert batch.key_limits.shape == (batch.num_tokens,)
        assert batch.key_limits.dtype == torch.int32
    order, together = _order(batch)
    step = StepFields(
        batch.num_tokens,
        batch.num_seqs,
        torch.get_num_threads(),
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        batch.block_table.data_ptr(),
        batch.table_starts.data_ptr(),
        order.ctypes.data,
        None if together is None else together.ctypes.data,
        batch.slot_mapping.data_ptr(),
        rope.cos.data_ptr(),
        rope.sin.data_ptr(),
        None if (limits := batch.key_limits) is None else limits.data_ptr(),
    )
    return _BatchState(step, ctypes.addressof(step), rope, order, together)


def _order(batch: ForwardBatch) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32] | None]:
    """Returns the order of the sequences, and for each the number of sequences from it on that share its block table.

    The longest come first, except that sequences with one table are consecutive, shortest first; all but the first of
    these have 0. The numbers are None if no table is shared.
    """
    lens, leaders = batch.host_context_lens, batch.leaders
    if leaders is None:
        return np.argsort(-lens, kind="stable").astype(np.int32), None
    assert leaders.shape == lens.shape
    assert leaders.min() >= 0
    own = np.arange(len(lens))
    leaders = np.where(batch.query_lens == 1, leaders, own)
    longest = np.zeros_like(lens)
    np.maximum.at(longest, leaders, lens)  # IndexError for an invalid leader
    order = np.lexsort((own, lens, leaders, -longest[leaders]))
    firsts = np.flatnonzero(np.diff(leaders[order], prepend=-1))
    together = np.zeros(len(lens), dtype=np.int32)
    together[firsts] = np.diff(firsts, append=len(lens))
    return order.astype(np.int32), together
