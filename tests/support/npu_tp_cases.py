"""Ranks of one instance on simulated NPUs, each in a thread: graphs with HCCL sums, and steps launched ahead.

Run by tests/model/test_npu.py. On real NPUs, scripts/npu_check.sh runs the deployment guide's example both ways
instead.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.devices.device import Device, bind
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.types import Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.npu_coded_cases import make_quantized
from tests.support.quantized import with_outliers
from tests.support.ranks import ranks

NPU = Device("npu")
GREEDY = Sampling(max_tokens=12, temperature=0.0)
LENS = (1, 9, 150, 127, 128)
SETTINGS: dict[str, Any] = {
    "num_blocks": 24,
    "max_model_len": 300,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
    "dtype": "float32",
}
TIGHT = {**SETTINGS, "num_blocks": 3}  # too few for two sequences that need a second block each
OUTGROWING = (120, 125)
HEADS = {"head_dim": 128, "max_position_embeddings": 1024}
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def runners(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    bind("npu", (), 0)  # imports torch-npu
    made: list[ModelRunner] = []
    plain_init = ModelRunner.__init__

    def init(runner: ModelRunner, *arguments: Any) -> None:
        plain_init(runner, *arguments)
        made.append(runner)

    monkeypatch.setattr(ModelRunner, "__init__", init)
    return made


def sizes_of(runner: ModelRunner) -> list[int]:
    assert runner.graphs.decode is not None
    return [size for size, _ in runner.graphs.decode.captured]


@pytest.mark.parametrize(
    ("architecture", "size", "expert_parallel"),
    [("llama", 2, False), ("mixtral", 2, False), ("mixtral", 2, True), pytest.param("llama", 4, False, marks=slow)],
)
def test_tokens_are_those_of_transformers(
    architecture: str, size: int, expert_parallel: bool, tmp_path: Path, runners: list[ModelRunner]
) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4} if size == 4 else {}
    folder = make_checkpoint(tmp_path, architecture, **HEADS, **heads)
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in LENS]
    with ranks(folder, size, NPU, npu_tp_graphs=True, enable_expert_parallel=expert_parallel, **SETTINGS) as core:
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
        assert core.ahead.num_ahead > GREEDY.max_tokens
    assert len(runners) == size
    for runner in runners:
        assert sizes_of(runner) == [8, 2, 4, 1]
        assert runner.model.kernels == "fused layers, NPU kernels, attention by torch-npu (TND)"


def test_without_the_flag_ranks_decode_eagerly_and_wait(
    tmp_path: Path, runners: list[ModelRunner], caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path, "llama", **HEADS)
    prompt = random_prompt(random.Random(2), 20)
    with caplog.at_level("INFO"), ranks(folder, 2, NPU, **SETTINGS) as core:
        assert_all_same(folder, [prompt], generate(core, [prompt], GREEDY), GREEDY.max_tokens)
        assert core.ahead.num_ahead == 0
    assert all(runner.graphs.decode is None for runner in runners)
    assert (
        "decode steps run eagerly: graphs with several ranks are untested on NPUs; --npu-tp-graphs enables them"
        in caplog.text
    )


def test_a_rank_that_holds_fewer_graphs_sets_the_number_for_all(
    tmp_path: Path, runners: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If ranks had different graphs, their sums would have different sizes."""
    from tests.support.npu_devices import FakeNpu

    folder = make_checkpoint(tmp_path, "llama", **HEADS)
    plain, num_captured = FakeNpu.graph, {}

    def graph(npu: FakeNpu, own: Any, pool: Any, stream: Any, **options: Any) -> Any:
        num_captured[stream.index] = num_captured.get(stream.index, 0) + 1
        if (stream.index, num_captured[stream.index]) == (1, 3):
            raise RuntimeError("EE1023: stream resource insufficient")
        return plain(npu, own, pool, stream, **options)

    monkeypatch.setattr(FakeNpu, "graph", graph)
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in LENS[:3]]
    with ranks(folder, 2, NPU, npu_tp_graphs=True, **SETTINGS) as core:
        assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert [sizes_of(runner) for runner in runners] == [[8], [8]]


@slow
def test_codes_over_ranks_and_after_a_preemption(tmp_path: Path) -> None:
    """Each rank multiplies by its share of quantized weights; of two sequences that outgrow the pool, one restarts."""
    quantized, plain = make_quantized(tmp_path, "msmodelslim W4A16, pairs", least_group=32)
    rng = random.Random(5)
    prompts = [random_prompt(rng, length) for length in OUTGROWING]
    with ranks(quantized, 2, NPU, npu_tp_graphs=True, **TIGHT) as core:
        assert_all_same(plain, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
        assert core.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("form", "architecture"),
    [
        ("msmodelslim", "llama"),
        pytest.param("msmodelslim", "mixtral", marks=slow),
        pytest.param("msmodelslim static", "llama", marks=slow),
    ],
)
def test_int8_activations_over_ranks_are_those_of_one(form: str, architecture: str, tmp_path: Path) -> None:
    """Attention's outputs are far larger on one rank than on the other; decode steps run as graphs."""
    quantized, _ = make_quantized(tmp_path, form, architecture, least_group=32, change=with_outliers)
    prompts = [random_prompt(random.Random(6), length) for length in LENS[:3]]
    expected = generate(make_core(quantized, device="npu", **SETTINGS), prompts, GREEDY)
    with ranks(quantized, 2, NPU, npu_tp_graphs=True, **SETTINGS) as core:
        assert generate(core, prompts, GREEDY) == expected
