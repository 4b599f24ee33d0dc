"""The step by which an accelerator's memory is measured, and what is said when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from pd_cluster.config import EngineConfig
from pd_cluster.device import CPU, Device
from pd_cluster.errors import ConfigError
from pd_cluster.kv.layout import KVLayout
from pd_cluster.kv.pool import KVPool
from pd_cluster.model import profile
from pd_cluster.model.batch import ForwardBatch
from pd_cluster.model.causal_lm import CausalLM

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, k_head_dim=8, v_head_dim=8, block_size=4, dtype="float32")


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "max_len", "lens"),
    [(10, 3, 100, [4, 3, 3]), (2, 5, 100, [1, 1]), (40, 2, 8, [8, 8]), (7, 1, 100, [7])],
)
def test_the_largest_step_has_as_many_tokens_and_sequences_as_may_be(
    num_tokens: int, num_seqs: int, max_len: int, lens: list[int]
) -> None:
    chunks = profile.largest_step(num_tokens, num_seqs, max_len, LAYOUT)
    assert [count for _, count in chunks] == lens
    assert all(request.num_logit_rows(count) == 1 for request, count in chunks)
    blocks = [block for request, _ in chunks for block in request.block_table]
    assert blocks == list(range(len(blocks)))


def test_on_cpu_nothing_is_run() -> None:
    config = EngineConfig(model="m")
    assert profile.peak_of_a_step(cast(CausalLM, None), LAYOUT, config, 64, CPU) == 0


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], int]:
    """A device whose allocator has held 1 GiB, with its pool on the host."""
    monkeypatch.setattr(profile, "KVPool", lambda layout, num_blocks, device: KVPool(layout, num_blocks))
    for name, found in (("reset_peak", None), ("synchronize", None), ("peak_nbytes", 1 << 30)):
        monkeypatch.setattr(profile, name, lambda device, found=found: found)

    def run(model: Any) -> int:
        config = EngineConfig(model="m", max_num_batched_tokens=12, max_num_seqs=2)
        return profile.peak_of_a_step(model, LAYOUT, config, 64, Device("cuda"))

    return run


def test_the_pool_of_the_measured_step_does_not_count(measured: Callable[[Any], int]) -> None:
    batches: list[ForwardBatch] = []

    def model(batch: ForwardBatch) -> torch.Tensor:
        batches.append(batch)
        return torch.zeros(len(batch.sample_rows), 5)

    peak = measured(model)
    assert batches[0].num_tokens == 12
    assert (1 << 30) - peak == batches[0].pool.data.nbytes


def test_a_step_that_does_not_fit_names_its_flag(measured: Callable[[Any], int]) -> None:
    def model(batch: ForwardBatch) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 12: .* does not fit cuda:0 .*give fewer"):
        measured(model)
