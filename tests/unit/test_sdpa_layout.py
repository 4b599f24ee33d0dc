"""scaled_dot_product_attention guarantees no strides, so the layout of CUDA's memory-efficient kernel must work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.types import Request, RequestSpec, Sampling

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
CONTEXT_LEN = 6


def _decoded() -> torch.Tensor:
    """Returns one decode step's output, [1, num_heads, head_dim]."""
    generator = torch.Generator().manual_seed(1)
    pool = KVPool(KVLayout(1, NUM_KV_HEADS, keys_and_values(HEAD_DIM), 4, "float32"), num_blocks=2)
    pool.data[:2] = torch.randn(pool.data[:2].shape, generator=generator)
    request = Request("r", RequestSpec([1] * CONTEXT_LEN, Sampling()), tables=[[0, 1]])
    request.num_computed_tokens = CONTEXT_LEN - 1
    query = torch.randn(NUM_HEADS, 1, HEAD_DIM, generator=generator)
    keys = torch.randn(1, NUM_KV_HEADS, HEAD_DIM, generator=generator)
    found = sdpa.write_and_attend(0, query, keys, keys, build_batch([(request, 1)], pool), sdpa.Scoring(0.3))
    pool.close()
    return found


def test_a_decode_step_takes_an_output_whose_heads_are_strided(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _decoded()
    real: Any = torch.nn.functional.scaled_dot_product_attention

    def strided(*args: Any, **options: Any) -> torch.Tensor:
        like = torch.ops.aten._scaled_dot_product_efficient_attention(*(x.to("meta") for x in args), None, False)[0]
        found = real(*args, **options)
        return torch.empty_strided(like.shape, like.stride()).copy_(found)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", strided)
    assert torch.equal(_decoded(), expected)
