"""The CUDA path of `--deterministic`: a row's bits depend neither on its batch nor on how its prompt was chunked.

Every kernel uses one tile for all numbers of rows. Single tokens attend through the prefill kernel, because after a
preemption a token is recomputed as part of a prompt. Contexts are not split over programs.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import torch

from pd_cluster.devices.device import Device, compute_capability
from pd_cluster.kv.kv_layout import CODE_BITS
from pd_cluster.model.inputs.forward_batch import ForwardBatch, on_device
from pd_cluster.model.kernels.cuda.attention.attention_configs import AttentionConfigs
from pd_cluster.model.kernels.cuda.attention.attention_plan import plan_tiles
from pd_cluster.model.kernels.cuda.attention.paged_attention import BatchMetadata, PagedKV, attend
from pd_cluster.model.kernels.cuda.attention.triton_planner import AttentionShape
from pd_cluster.model.kernels.cuda.experts.grouped_experts import TritonGroupedExperts
from pd_cluster.model.kernels.cuda.linear.quantized_linear import linear_of
from pd_cluster.model.kernels.cuda.linear.triton_linear import TritonLinear
from pd_cluster.model.kernels.cuda.ops import CudaOps
from pd_cluster.model.layers.attention.sdpa import Scoring
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.layers.expert_weights import ExpertWeights
from pd_cluster.model.layers.gated_mlp import Activation, ExpertRouter
from pd_cluster.model.layers.linear_weight import LinearWeight
from pd_cluster.model.layers.ops import Rows
from pd_cluster.model.layers.packed_linear import Linear


class DeterministicOps(CudaOps):
    """`CudaOps` with the same launch configuration for every number of rows; norms and rotations need no change."""

    name = "deterministic Triton"
    few_gated = sys.maxsize
    has_one_tile = True
    scans_chunks = False

    def linear(self, weight: LinearWeight) -> Linear:
        """Multiplies by the codes of a quantized weight, otherwise by the weight itself."""
        return linear_of(weight, is_deterministic=True) or TritonLinear(weight.matrix(), weight.bias)

    def experts(
        self, router: ExpertRouter, weights: ExpertWeights, activation: Activation, share: ExpertShare | None = None
    ) -> Rows:
        return TritonGroupedExperts.of(router, weights, activation, share, is_deterministic=True)


def attend_rows(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    batch: ForwardBatch,
    scoring: Scoring,
    pdl: bool = False,
) -> torch.Tensor:
    """Maps [num_tokens, num_heads, head_dim] to the same shape; this step's keys and values must be in the pool."""
    shape = AttentionShape.of_step(query, key_pool, batch.pool.layout)
    known = batch.kernel_state
    if not isinstance(known, dict):
        known = batch.kernel_state = {}
    key = "rows", shape
    if key not in known:
        has_codes = batch.pool.layout.dtype in CODE_BITS
        configs = configs_of(shape, query.element_size() * 8, batch.pool.device, has_codes)
        known[key] = _plan(batch, configs, shape.group)
    return attend(query, PagedKV(key_pool, value_pool, batch.pool.layout.dtype), known[key], scoring, pdl=pdl)


@functools.cache
def configs_of(shape: AttentionShape, dtype_bits: int, device: Device, has_codes: bool = False) -> AttentionConfigs:
    return replace(shape.configs(dtype_bits, compute_capability(device), has_codes), is_uniform=True)


def _plan(batch: ForwardBatch, configs: AttentionConfigs, group: int) -> BatchMetadata:
    """Plans all sequences as tiles. If each has one query, the tiles are made on the device, because a graph may be
    being captured.
    """
    plan = plan_tiles(batch.query_lens, batch.host_context_lens, group, configs)
    if (batch.query_lens == 1).all():
        seqs = torch.arange(len(plan.tiles), dtype=torch.int32, device=batch.context_lens.device)
        there = torch.stack((seqs, torch.zeros_like(seqs)), dim=1)
    else:
        there = on_device({"tiles": plan.tiles}, batch.pool.device)["tiles"]
    return BatchMetadata(
        plan,
        batch.query_starts,
        batch.context_lens,
        batch.block_table,
        batch.table_starts,
        batch.table_starts[:0],  # no sequence is planned for the decode kernel
        there,
        batch.table_starts[:0],
        batch.key_limits,
    )
