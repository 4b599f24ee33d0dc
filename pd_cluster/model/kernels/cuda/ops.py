"""The Triton kernels as `Ops`; the attention is passed in. No operation waits for the device.

Checks the kernels' preconditions: dtypes, shapes, strides. Does not deal with graphs or streams: every launch uses the
current stream, and launch sizes depend only on shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from pd_cluster.kv.kv_layout import stored_width
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.cuda import elementwise_kernels as kernels
from pd_cluster.model.kernels.cuda.attention import listed_keys
from pd_cluster.model.kernels.cuda.attention.latent_heads import Attend, LatentKernels, LatentRows, attend_latents
from pd_cluster.model.kernels.cuda.attention.paged_attention import PagedKV
from pd_cluster.model.kernels.cuda.attention.quantized_kv import codes_of
from pd_cluster.model.kernels.cuda.dependent_launch import launched
from pd_cluster.model.kernels.cuda.elementwise_kernels import ACTIVATIONS, DTYPES
from pd_cluster.model.kernels.cuda.experts.grouped_experts import TritonGroupedExperts
from pd_cluster.model.kernels.cuda.linear.quantized_linear import linear_of
from pd_cluster.model.kernels.cuda.linear.skinny_gate import DTYPES as DTYPES_16
from pd_cluster.model.kernels.cuda.linear.skinny_gate import SkinnyGate
from pd_cluster.model.kernels.cuda.states import triton_states
from pd_cluster.model.kernels.cuda.states.chunk_choice import ChunkChoice
from pd_cluster.model.layers.attention.sparse_selection import IndexNorm, IndexRows
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.layers.expert_weights import ExpertWeights
from pd_cluster.model.layers.gated_mlp import Activation, ExpertRouter, FewRows
from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.layers.ops import Heads, Latents, Norm, Rope, Rows
from pd_cluster.model.layers.packed_linear import Linear, PlainLinear
from pd_cluster.model.layers.states.recurrent_kernels import RecurrentKernel, StateShape
from pd_cluster.native.recurrence_values import Convolution, GatedDelta, Mamba2
from pd_cluster.settings.engine_config import PDL, SKINNY_GATE

MAX_FEATURES = 32768  # the most features that a norm supports: a row stays in one program's registers
ROW_ELEMENTS_PER_WARP = 512  # elements of a norm: 16 per thread
FEW_GATED = 1 << 20  # up to this many elements, programs are small, so that there are enough to fill the device
HEAD_ELEMENTS = 512  # elements of half heads, for two warps: 16 bytes per thread at 16 bits


class CudaOps:
    """`Ops` in Triton. `attend_paged` attends to keys and values that are already in the pool."""

    name = "Triton"
    is_capturable = True
    wide_latents = False
    few_gated = FEW_GATED
    # If set (deterministic.py), latent kernels use one tile size for any number of rows, and in models with an indexer
    # every token attends to a list of keys, even if it could attend to all.
    has_one_tile = False
    scans_chunks = True  # chunk kernels of another library may compute prompts in recurrent layers

    def __init__(self, attend_paged: Attend, attention: str = "Triton", speedups: Sequence[str] = ()) -> None:
        """`attention`: its name, for the log. `speedups`: see model/kernels/cuda_speedups.py."""
        self._attend = attend_paged
        self.attention = attention
        self._pdl, self._has_skinny_gate = PDL in speedups, SKINNY_GATE in speedups
        self._chunks = ChunkChoice()

    @property
    def prompt_states(self) -> str:
        return self._chunks.name

    def linear(self, weight: LinearWeight) -> Linear:
        return linear_of(weight) or weight.linear()

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return _norm(x, None, norm, self._pdl)

    def add_norm(self, x: torch.Tensor, delta: torch.Tensor, norm: Norm) -> torch.Tensor:
        assert delta.shape == x.shape
        assert delta.dtype == x.dtype
        assert delta.stride(1) == 1
        return _norm(x, delta, norm, self._pdl)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        num_rows, width = gate_up.shape
        num_features = width // 2
        assert gate_up.dtype in DTYPES
        assert gate_up.stride(1) == 1
        out = gate_up.new_empty(num_rows, num_features)
        if not num_rows:
            return out
        block = 1024 if num_rows * num_features <= self.few_gated else 4096
        kernels.gated[(num_rows, triton.cdiv(num_features, block))](
            gate_up,
            out,
            gate_up.stride(0),
            NUM_FEATURES=num_features,
            BLOCK=block,
            ACTIVATION=ACTIVATIONS[activation],
            num_warps=block // 256,
            **launched(self._pdl),
        )
        return out

    def few_rows_gate(self, gate_up: Linear, activation: Activation) -> FewRows | None:
        if not self._has_skinny_gate or not isinstance(gate_up, PlainLinear) or gate_up.weight.dtype not in DTYPES_16:
            return None
        return SkinnyGate(gate_up.weight.contiguous(), gate_up.bias, activation, self._pdl)

    def experts(
        self, router: ExpertRouter, weights: ExpertWeights, activation: Activation, share: ExpertShare | None = None
    ) -> Rows:
        return TritonGroupedExperts.of(router, weights, activation, share)

    def attend(self, heads: Heads, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch) -> torch.Tensor:
        key_pool, value_pool = batch.pool.layer(heads.layer_idx)
        pools = PagedKV(key_pool, value_pool, batch.pool.layout.dtype)
        query = prepare(heads, qkv, rope, pools, batch.slot_mapping, self._pdl)
        batch.layer_written(heads.layer_idx, heads.sliding_window)
        return self._attend(query, key_pool, value_pool, batch, heads.scoring).reshape(len(qkv), -1)

    def attend_latents(
        self, latents: Latents, queries: torch.Tensor, kept: torch.Tensor, rope: Rope, batch: ForwardBatch
    ) -> torch.Tensor:
        attend = self._attend
        if batch.chosen is not None:
            attend = listed_keys.ListedAttention(not self.has_one_tile, self._pdl)
        by, rows = LatentKernels(attend, self.has_one_tile, self._pdl), LatentRows(queries, kept, rope)
        return attend_latents(by, latents, rows, batch)

    def prepare_index(
        self, queries: torch.Tensor, keys: torch.Tensor, norm: IndexNorm, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return listed_keys.prepare_index(queries, keys, norm, rope, self._pdl)

    def choose_keys(self, rows: IndexRows, rope: Rope, batch: ForwardBatch) -> torch.Tensor | None:
        return listed_keys.choose_keys(rows, batch, self.has_one_tile, self._pdl)

    def takes_states(self, shape: StateShape, device: torch.device) -> bool:
        return triton_states.takes(shape)

    def recurrent(self, convolution: Convolution, recurrence: GatedDelta | Mamba2 | None) -> RecurrentKernel:
        chunks = None
        if recurrence is not None and self.scans_chunks:
            chunks = self._chunks.kernel_for(convolution, recurrence)
        return triton_states.TritonStates(convolution, recurrence, chunks)


def _norm(x: torch.Tensor, delta: torch.Tensor | None, norm: Norm, pdl: bool) -> torch.Tensor:
    num_rows, num_features = x.shape
    assert x.dtype in DTYPES
    assert x.stride(1) == 1
    _check_weight(norm, num_features, x.dtype)
    if num_features > MAX_FEATURES:
        raise ValueError(f"a norm over {num_features} features; the kernel supports at most {MAX_FEATURES}")
    out = x.new_empty(num_rows, num_features)
    if not num_rows:
        return out
    block = triton.next_power_of_2(num_features)
    kernels.rms_norm[(num_rows,)](
        x,
        delta if delta is not None else x,
        norm.weight,
        out,
        x.stride(0),
        delta.stride(0) if delta is not None else 0,
        norm.eps,
        NUM_FEATURES=num_features,
        BLOCK=block,
        HAS_DELTA=delta is not None,
        num_warps=min(16, max(1, block // ROW_ELEMENTS_PER_WARP)),
        enable_fp_fusion=False,
        **launched(pdl),
    )
    return out


def _check_weight(norm: Norm, num_features: int, dtype: torch.dtype) -> None:
    """Asserts that the weight has the activations' dtype (rounding as in Llama) or is float32 (as in Gemma)."""
    assert norm.weight.shape == (num_features,)
    assert norm.weight.dtype in (dtype, torch.float32)
    assert norm.weight.is_contiguous()


def prepare(
    heads: Heads,
    qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    rope: Rope,
    pools: PagedKV,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
    pdl: bool = False,
) -> torch.Tensor:
    """Applies norms and rope to queries and keys, and writes keys and values to their slots, in the pool's dtype.

    Returns the queries, [num_tokens, num_heads, head_dim], contiguous; qkv is unchanged.
    """
    num_tokens, (key_pool, value_pool, pool_dtype) = len(qkv), pools
    _check_heads(heads, qkv, rope, pools, slot_mapping)
    query = qkv.new_empty(num_tokens, heads.num_heads, heads.head_dim)
    if not num_tokens:
        return query
    q_norm, k_norm = heads.q_norm, heads.k_norm
    half = triton.next_power_of_2(heads.head_dim // 2)
    at_once = min(max(1, HEAD_ELEMENTS // half), triton.next_power_of_2(max(heads.num_heads, heads.num_kv_heads)))
    num_tiles = triton.cdiv(heads.num_heads, at_once) + triton.cdiv(heads.num_kv_heads, at_once)
    kernels.prepare_heads[(num_tokens, num_tiles)](
        qkv,
        rope.cos,
        rope.sin,
        q_norm.weight if q_norm is not None else qkv,
        k_norm.weight if k_norm is not None else qkv,
        query,
        key_pool,
        value_pool,
        slot_mapping,
        qkv.stride(0),
        rope.cos.stride(0),
        key_pool.stride(0),
        key_pool.stride(1),
        key_pool.stride(2),
        q_norm.eps if q_norm is not None else 0.0,
        k_norm.eps if k_norm is not None else 0.0,
        NUM_HEADS=heads.num_heads,
        NUM_KV_HEADS=heads.num_kv_heads,
        HEAD_DIM=heads.head_dim,
        BLOCK_SIZE=key_pool.shape[1],
        HEADS=at_once,
        HALF=half,
        HAS_NORM=q_norm is not None,
        CODES=codes_of(pool_dtype),
        num_warps=2,
        enable_fp_fusion=False,
        **launched(pdl),
    )
    return query


def _check_heads(
    heads: Heads,
    qkv: torch.Tensor,
    rope: Rope,
    pools: PagedKV,
    slot_mapping: torch.Tensor,
) -> None:
    (num_tokens, width), (key_pool, value_pool, pool_dtype) = qkv.shape, pools
    assert width == (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    assert heads.head_dim % 2 == 0
    assert qkv.dtype in DTYPES
    assert qkv.stride(1) == 1
    for table in (rope.cos, rope.sin):
        assert table.shape == (num_tokens, heads.head_dim)
        assert table.dtype in (qkv.dtype, torch.float32)
        assert table.dtype == rope.cos.dtype
        assert table.stride() == (rope.cos.stride(0), 1)
    assert (heads.q_norm is None) == (heads.k_norm is None)
    for norm in (heads.q_norm, heads.k_norm):
        if norm is not None:
            _check_weight(norm, heads.head_dim, qkv.dtype)
    assert key_pool.shape[2:] == (heads.num_kv_heads, stored_width(pool_dtype, heads.head_dim))
    assert key_pool.stride(3) == 1
    assert value_pool.shape == key_pool.shape
    assert value_pool.stride() == key_pool.stride()
    assert value_pool.dtype == key_pool.dtype
    assert slot_mapping.shape == (num_tokens,)
    assert slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
