"""The largest step: its default size, its measured memory, and the error if it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pd_cluster.devices.device import CPU, Device
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.kernels.cuda.attention.attention_configs import configs_for
from pd_cluster.model.kernels.cuda.attention.attention_plan import plan_decode
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.model.layers.attention.latent_attention import MOST_SCORES
from pd_cluster.model.planning import pool_sizing
from pd_cluster.model.runner import memory_profile
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.wire import Plane
from tests.support.fake_device import install

STATES = KVLayout(1, 4, (Plane("state", 1024),), 1, "float32", rule="state", layers=(1,))
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, planes=keys_and_values(8), block_size=4, dtype="float32")


def test_the_largest_step_has_as_many_tokens_and_sequences_as_may_be() -> None:
    for num_tokens, num_seqs, max_len, lens in (
        *((10, 3, 100, [4, 3, 3]), (2, 5, 100, [1, 1]), (40, 2, 8, [8, 8]), (7, 1, 100, [7])),
    ):
        chunks = memory_profile.largest_step(num_tokens, num_seqs, max_len, [LAYOUT])
        assert [count for _, count in chunks] == lens
        assert all(request.num_logit_rows(count) == 1 for request, count in chunks)
        blocks = [block for request, _ in chunks for block in request.tables[0]]
        assert blocks == list(range(len(blocks)))
    assert memory_profile.peak_of_a_step(cast(CausalLM, None), [LAYOUT], 12, 2, 64, CPU) == 0, "no step is run on CPU"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Measures on a fake device whose allocator has held 1 GiB, with the pool on the host."""
    monkeypatch.setattr(memory_profile, "KVPool", lambda layout, num_blocks, device: KVPool(layout, num_blocks))
    for name, found in (("reset_peak", None), ("synchronize", None), ("peak_nbytes", 1 << 30)):
        monkeypatch.setattr(memory_profile, name, lambda device, found=found: found)

    def run(model: Any, *others: KVLayout) -> int:
        return memory_profile.peak_of_a_step(model, [LAYOUT, *others], 12, 2, 64, Device("cuda"))

    return run


def test_the_pools_of_the_measured_step_do_not_count(measured: Callable[..., int]) -> None:
    """The measured step's own pools do not count; all its sequences share one state."""
    batches: list[ForwardBatch] = []

    def model(batch: ForwardBatch) -> torch.Tensor:
        batches.append(batch)
        return torch.zeros(len(batch.sample_rows), 5)

    peak = measured(model)
    assert batches[0].num_tokens == 12
    assert (1 << 30) - peak == batches[0].pool.data.nbytes
    peak = measured(model, STATES)
    states = batches[1].states
    assert states is not None
    assert [(each.first, each.stop, each.block) for each in states.segments] == [(0, 6, 0), (6, 12, 0)]
    assert states.pool.num_blocks == 1
    assert (1 << 30) - peak == batches[1].pool.data.nbytes + states.pool.data.nbytes


def test_graphs_take_the_largest_one_s_memory_and_their_logits(
    measured: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the largest graph step, with a token or more per sequence, and its logits, but not memory held before."""
    monkeypatch.setattr(memory_profile, "reserved_nbytes", lambda device: (1 << 30) - 5000)
    batches: list[ForwardBatch] = []

    def model(batch: ForwardBatch) -> torch.Tensor:
        batches.append(batch)
        return torch.zeros(len(batch.sample_rows), 7)

    assert memory_profile.nbytes_of_graphs(cast(CausalLM, model), LAYOUT, 6, Device("cuda")) == 5000 + 6 * 7 * 4
    for num_tokens in (20, 2):
        memory_profile.nbytes_of_graphs(cast(CausalLM, model), LAYOUT, 6, Device("cuda"), num_tokens=num_tokens)
    assert [(batch.num_tokens, batch.num_seqs) for batch in batches] == [(6, 6), (20, 6), (6, 6)]


def test_what_does_not_fit_names_its_flags(measured: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_profile, "reserved_nbytes", lambda device: 0)

    def model(batch: ForwardBatch) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match=r"graphs of 6 sequences do not fit cuda:0; .*--graph-sizes.*--enforce-eager"):
        memory_profile.nbytes_of_graphs(cast(CausalLM, model), LAYOUT, 6, Device("cuda"))
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 12: .* does not fit cuda:0 .*lower it"):
        measured(model)


def test_the_workspace_of_decode_is_that_of_its_largest_plan() -> None:
    """Its size is what a graph's plan needs; for other attention backends it is 0."""

    class Model:
        attention = "Triton"
        config = SimpleNamespace(num_attention_heads=8)

    group, head_dim = 8 // LAYOUT.num_kv_heads, LAYOUT.head_dim
    plan = plan_decode(256, 20_000, LAYOUT.num_kv_heads, configs_for(head_dim, 16, group, (9, 0)), 132)
    found = memory_profile.decode_workspace_nbytes(cast(CausalLM, Model()), LAYOUT, 256, 20_000)
    assert found == 4 * plan.workspace_numel(8, head_dim)
    of_rank = replace(LAYOUT, num_kv_heads=2 * LAYOUT.num_kv_heads, tp_size=2)  # a rank of a model with twice the heads
    assert memory_profile.decode_workspace_nbytes(cast(CausalLM, Model()), of_rank, 256, 20_000) == found
    for attention in ("FlashInfer", "deterministic Triton"):
        Model.attention = attention
        assert memory_profile.decode_workspace_nbytes(cast(CausalLM, Model()), LAYOUT, 256, 20_000) == 0


def test_lists_of_chosen_keys_are_counted_if_a_context_can_be_long_enough() -> None:
    """They are counted for steps and graphs, with the scores of the choice."""
    layout = replace(LAYOUT, planes=(Plane("latent", 16), Plane("rope", 8), Plane("index", 16)))
    model = cast(CausalLM, SimpleNamespace(config=SimpleNamespace(index_topk=2048)))
    found = memory_profile.lists_nbytes(model, layout, 8192, 256, 2049)
    assert found == 2 * 8 * MOST_SCORES + 4 * (8192 + 256) * 2048
    assert memory_profile.lists_nbytes(model, layout, 8192, 256, 2048) == 0
    assert memory_profile.lists_nbytes(model, LAYOUT, 8192, 256, 2049) == 0


def test_a_large_gpu_takes_large_steps_by_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Large memory gives large default steps; the first size is an H100's as reported by CUDA."""
    memories: list[tuple[DeviceKind, int, int]] = [
        *(("cuda", 85_520_809_984, 8192), ("cuda", 70_000_000_000, 8192), ("cuda", 69_999_999_999, 2048)),
        *(("npu", 96 << 30, 2048), ("cpu", 0, 2048)),
    ]
    gpu = install(monkeypatch)
    for kind, total, num_tokens in memories:
        monkeypatch.setattr(gpu, "mem_get_info", lambda index, total=total: (total // 2, total), raising=False)
        device = Device(kind)
        with caplog.at_level("INFO"):
            assert pool_sizing.num_step_tokens(EngineConfig(model="m"), device) == num_tokens
        assert f"a step has at most {num_tokens} tokens, the default for {device.torch_name}" in caplog.text
        given = EngineConfig(model="m", max_num_batched_tokens=100)
        assert pool_sizing.num_step_tokens(given, device) == 100
