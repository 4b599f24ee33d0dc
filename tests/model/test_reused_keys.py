"""Layers that reuse an earlier layer's keys and values read the pool and never write it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from pd_cluster.errors import ModelError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.language_model.cache_declaration import layouts_of
from pd_cluster.model.language_model.causal_lm import PlainCausalLM
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.model.loading.load_proof import own_logits, probe_batch, prove
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import COMMON, VOCAB_SIZE, shake
from tests.support.more_checkpoints import MORE
from tests.support.state_world import row_errors

TYPES = ("gemma3n_text", "gemma4_text")  # gemma4_text needs a pool for each kind of layer
STEPS = ((40, 3), (5, 37), (1, 1), (14, 1), (1, 19))


@pytest.fixture(params=TYPES)
def model(request: pytest.FixtureRequest) -> PlainCausalLM:
    torch.manual_seed(0)
    AttentionInterface.register(sdpa.NAME, sdpa.forward)
    config = AutoConfig.for_model(request.param, **{**COMMON, **MORE[request.param]})
    made = AutoModelForCausalLM.from_config(config).eval()
    shake(made)
    made.config._attn_implementation = sdpa.NAME
    return PlainCausalLM(made)


def pools_of(model: PlainCausalLM, num_blocks: int) -> list[KVPool]:
    layouts = layouts_of(model.caches, 4, "float32", split_windows=True)
    assert [layout.layers for layout in layouts] == [(2,), (0, 1)]
    return [KVPool(layout, num_blocks) for layout in layouts]


def test_two_sequences_beyond_a_window(model: PlainCausalLM) -> None:
    ids = torch.randint(VOCAB_SIZE, (2, 61))
    pools, rows = pools_of(model, 32), list[list[torch.Tensor]]([[], []])
    requests = [
        Request(f"{seq}", RequestSpec(own, Sampling()), tables=[[2 * at + seq for at in range(16)] for _ in pools])
        for seq, own in enumerate(ids.tolist())
    ]
    with torch.inference_mode():
        for step in STEPS:
            batch = probe_batch(list(zip(requests, step, strict=True)), pools)
            batch.sample_rows = torch.arange(batch.num_tokens)
            for own, request, part in zip(rows, requests, torch.split(model(batch), list(step)), strict=True):
                own.append(part)
                request.num_computed_tokens += len(part)
            assert batch.layers_written == [0, 1, 2]
        expected = own_logits(model, ids)
    for own, whole in zip(rows, expected, strict=True):
        assert row_errors(torch.cat(own), whole).max() < 2e-5


def test_one_that_writes_is_noticed(model: PlainCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.reads for each in model.caches] == [None, None, None, 1, 1, 2]
    pools = pools_of(model, 2)
    prove(model, pools, "float32")
    monkeypatch.setattr(sdpa, "read_and_attend", sdpa.write_and_attend)
    with pytest.raises(ModelError, match=r"layers \[0, 1, 2, 1, 1, 2\] wrote to the KV pool, but each of 3 must do so"):
        prove(model, pools, "float32")
