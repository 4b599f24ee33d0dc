"""Compares recurrent layers whose prompts flash-linear-attention (fla) computes with the kernels of single tokens.

On a GPU fla itself runs; on a CPU a fake replaces it. Run by tests/model/test_cuda_ops.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.devices.device import CPU, Device
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.model.inputs.state_rows import StateRows, segments_of
from pd_cluster.model.kernels.attention_backend import triton_attention
from pd_cluster.model.kernels.cuda.deterministic import DeterministicOps
from pd_cluster.model.kernels.cuda.ops import CudaOps
from pd_cluster.model.kernels.cuda.states import chunk_choice
from pd_cluster.model.kernels.cuda.states.chunk_choice import TOLERANCE, ChunkChoice, trial_error
from pd_cluster.model.kernels.cuda.states.chunk_passes import LEAST_ROWS
from pd_cluster.model.kernels.cuda.states.triton_states import TritonStates
from pd_cluster.model.loading import model_loader
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.runner.load_runner import numerics_of
from pd_cluster.native.recurrence_values import GatedDelta, GatedNorm
from pd_cluster.native.state_kernels import StateKernel
from pd_cluster.settings.engine_config import EngineConfig
from tests.support import fake_fla
from tests.support.checkpoints import make_checkpoint
from tests.support.cuda_hybrid_cases import GREEDY, SHORT
from tests.support.cuda_states_cases import IS_HOST, ON_DEVICE
from tests.support.engines import assert_all_same, generate, random_prompt
from tests.support.interpreted import SLOW_IF_INTERPRETED, choose_device
from tests.support.recurrences import BlocksOfStates, RecurrentCase, delta_case, kernel_of, mamba_case

choose_device()

pytestmark = pytest.mark.skipif(
    not IS_HOST and importlib.util.find_spec("fla") is None, reason="fla-core is not installed"
)
CASES: dict[str, Callable[[int], RecurrentCase]] = {
    "delta": lambda n: delta_case(2, 1, (16, 16), n),
    "by channel": lambda n: delta_case(2, 2, (16, 16), n, by_channel=True),
    "mamba": lambda n: mamba_case(2, 1, (16, 16), n),
}
WIDE: dict[str, Callable[[int], RecurrentCase]] = {
    "delta of qwen3_next": lambda n: delta_case(4, 2, (128, 128), n),
    "by channel, wide": lambda n: delta_case(4, 4, (128, 128), n, by_channel=True),
    "mamba of granite": lambda n: mamba_case(8, 1, (64, 128), n),
    "mamba of falcon": lambda n: mamba_case(4, 2, (32, 256), n),
}
SLOW = ("by channel", *WIDE)
NAMES = ["delta", "mamba", *(pytest.param(name, marks=SLOW_IF_INTERPRETED) for name in SLOW)]
LENS = (1, 66, 2, 67)


@pytest.fixture(autouse=True)
def _fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces fla by the fake on a CPU."""
    if not IS_HOST:
        yield
        return
    monkeypatch.setattr(chunk_choice, "DEVICE", "cpu")
    with fake_fla.installed():
        yield


def a_case(name: str, dtype: torch.dtype = torch.bfloat16) -> RecurrentCase:
    torch.manual_seed(3)
    case = (CASES | WIDE)[name](sum(LENS))
    convolution = replace(case.convolution, weight=case.convolution.weight.to(dtype))
    inputs = type(case.inputs)(*(None if each is None else each.to(dtype) for each in case.inputs))
    return replace(case, convolution=convolution, inputs=inputs)


def compute(case: RecurrentCase, layer: TritonStates | StateKernel) -> tuple[torch.Tensor, BlocksOfStates]:
    """Computes four sequences, the last of which is kept twice."""
    pool = BlocksOfStates(case, 8)
    pool.data[:4] = 0.1 * torch.randn(4, pool.data.shape[1], generator=torch.Generator(pool.data.device).manual_seed(5))
    rows = StateRows.of(ON_DEVICE, segments_of(LENS, [2, 0, 3, 1], [(3, 1, 6), (3, 3, 7)]))
    if isinstance(layer, TritonStates):
        return layer(case.inputs, pool.planes, rows), pool
    return layer(
        type(case.inputs)(*(None if x is None else x.float() for x in case.inputs)), pool.planes, rows.table
    ), pool


def token_by_token(case: RecurrentCase) -> tuple[torch.Tensor, BlocksOfStates]:
    """Computes the reference: by C kernels on a CPU, because interpreted kernels would take long."""
    if not IS_HOST:
        return compute(case, TritonStates(case.convolution, case.recurrence))
    wide = replace(case.convolution, weight=case.convolution.weight.float())
    return compute(case, kernel_of(replace(case, convolution=wide)))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def check(case: RecurrentCase) -> torch.Tensor:
    """Compares rows and states of all sequences, to the precision of 16 bits; returns the rows."""
    assert case.recurrence is not None
    chunks = fla_chunks().FlaChunks(case.recurrence)
    fake_fla.calls.clear()
    expected, single = token_by_token(case)
    found, pool = compute(case, TritonStates(case.convolution, case.recurrence, chunks))
    if IS_HOST:
        assert fake_fla.calls == [2, 1, 1]
    for rows in (slice(0, 1), slice(1, 67), slice(67, 69), slice(69, None)):
        assert error(found[rows], expected[rows]) < TOLERANCE / 3
    for block in (2, 0, 3, 1, 6, 7):
        for plane, own in zip(pool.planes, single.planes, strict=True):
            assert error(plane[block], own[block]) < TOLERANCE / 3
    assert pool.data[4:6].isnan().all()
    return found


def fla_chunks() -> Any:
    return importlib.import_module("pd_cluster.model.kernels.cuda.states.fla_chunks")


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_has_the_numbers_of_single_tokens(name: str) -> None:
    check(a_case(name))


@pytest.mark.parametrize("name", [pytest.param("delta", marks=SLOW_IF_INTERPRETED)])
def test_a_layer_without_norm(name: str) -> None:
    """Without a norm, results are written directly in bfloat16."""
    case = a_case(name)
    assert isinstance(case.recurrence, GatedDelta)
    assert check(replace(case, recurrence=replace(case.recurrence, norm=GatedNorm()))).dtype == torch.bfloat16


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW_IF_INTERPRETED) for name in CASES])
def test_a_trial_measures_16_bits(name: str) -> None:
    """If only rounding differs, the trial's error is far below the limit."""
    case = a_case(name)
    assert case.recurrence is not None
    chunks = fla_chunks().FlaChunks(case.recurrence)
    assert 0 < trial_error(case.convolution, case.recurrence, chunks) < TOLERANCE / 3


def other_base(real: Any) -> Any:
    """A fault: takes decays for logarithms to base 2."""
    return lambda *given, g, **more: real(*given, g=g * 0.6931, **more)


def turned(real: Any) -> Any:
    """A fault: returns states with keys and values exchanged, which are equally wide."""

    def call(*given: Any, **more: Any) -> Any:
        out, final = real(*given, **more)
        return out, final.transpose(2, 3).contiguous()

    return call


def other_heads(real: Any) -> Any:
    """A fault: reads values head after head, as if tokens were the inner dimension."""

    def call(q: Any, k: Any, v: Any, *given: Any, **more: Any) -> Any:
        return real(q, k, v.transpose(1, 2).reshape(v.shape), *given, **more)

    return call


def without_a_past(real: Any) -> Any:
    def call(*given: Any, initial_state: Any, **more: Any) -> Any:
        return real(*given, initial_state=torch.zeros_like(initial_state), **more)

    return call


def of_another_version(real: Any) -> Any:
    def call(*given: Any, cu_seqlens: Any, **more: Any) -> Any:
        raise TypeError("unexpected keyword argument")

    return call


FAULTS = (other_base, turned, other_heads, without_a_past, of_another_version)
QUICK = ("delta", turned), ("mamba", of_another_version)
FAULTY = [
    pytest.param(name, fault, marks=[] if (name, fault) in QUICK else SLOW_IF_INTERPRETED)
    for name in CASES
    for fault in FAULTS
]


@pytest.mark.skipif(not IS_HOST, reason="faults are put into the fake")
@pytest.mark.parametrize(("name", "fault"), FAULTY)
def test_a_library_with_other_conventions_is_not_used(
    name: str, fault: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = fla_chunks()
    for function in ("chunk_gated_delta_rule", "chunk_kda", "chunk_simple_gla"):
        monkeypatch.setattr(module, function, fault(getattr(module, function)))
    case = a_case(name)
    assert case.recurrence is not None
    choice = ChunkChoice()
    with caplog.at_level(logging.WARNING):
        assert choice.kernel_for(case.convolution, case.recurrence) is None
    assert choice.name == ""
    said = "TypeError: unexpected" if fault is of_another_version else "its results differ by"
    assert f"recurrent layers: Triton kernels compute prompts, not flash-linear-attention: {said}" in caplog.text
    assert choice.kernel_for(case.convolution, case.recurrence) is None
    assert len(caplog.records) == 1


@pytest.mark.skipif(not IS_HOST, reason="trials of the fake are short")
def test_only_16_bits_and_not_with_deterministic(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fla is used for 16 bits only, and after one trial for all layers of a shape; other tests cover the trial."""
    trials = list[object]()
    monkeypatch.setattr(chunk_choice, "trial_error", lambda *given: trials.append(given) or 0.001)
    case, wide = a_case("delta"), a_case("delta", torch.float32)
    ops, others = CudaOps(lambda *_: torch.empty(0)), CudaOps(lambda *_: torch.empty(0))
    deterministic = DeterministicOps(lambda *_: torch.empty(0))
    with caplog.at_level(logging.INFO):
        ops.recurrent(case.convolution, case.recurrence)
        kernel = ops.recurrent(case.convolution, case.recurrence)
        exact = deterministic.recurrent(case.convolution, case.recurrence)
        others.recurrent(wide.convolution, wide.recurrence)
    assert (ops.prompt_states, deterministic.prompt_states, others.prompt_states) == ("fla 0.6.0", "", "")
    said = "recurrent layers: fla 0.6.0 computes prompts in chunks, Triton kernels compute single tokens"
    assert [each.message for each in caplog.records] == [said]
    assert len(trials) == 1
    prompt = case.rows(slice(0, LEAST_ROWS))
    for layer, calls in ((kernel, [1]), (exact, [])):
        fake_fla.calls.clear()
        pool = BlocksOfStates(prompt, 1)
        pool.data[:] = 0
        layer(prompt.inputs, pool.planes, StateRows.of(ON_DEVICE, segments_of([LEAST_ROWS], [0])))
        assert fake_fla.calls == calls


@pytest.mark.slow
@pytest.mark.skipif(not IS_HOST, reason="the fake alone computes float32 exactly")
@pytest.mark.parametrize("architecture", ["qwen3_next", "kimi_linear", "granitemoehybrid"])
def test_tokens_are_transformers(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes long prompts beside short ones and single tokens, then again from kept states."""
    monkeypatch.setattr(chunk_choice, "DTYPES", (torch.float32,))
    monkeypatch.setattr(model_loader, "choose_attention", lambda *given: triton_attention())
    monkeypatch.setattr(model_loader, "STATES", SHORT)
    folder = make_checkpoint(tmp_path, architecture)
    sizes: dict[str, Any] = {"num_blocks": 60, "max_model_len": 160, "max_num_seqs": 4, "block_size": 16}
    config = EngineConfig(
        model=str(folder), device="cpu", max_num_batched_tokens=200, mamba_block_size=64, state_cache_gib=0.01, **sizes
    )
    core, runner = build_core(config)
    assert runner.model.kernels.endswith("attention by Triton, states of prompts by fla 0.6.0")
    plan = replace(LoadPlan.of(config, SingleRank(), CPU), device=Device("cuda"))
    assert numerics_of(plan, runner.model).attention_backend == "Triton + fla 0.6.0"
    rng = random.Random(3)
    prompts = [random_prompt(rng, length) for length in (5, 70, 140)]
    fake_fla.calls.clear()
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert 2 in fake_fla.calls
    fake_fla.calls.clear()
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert core.scheduler.num_prefix_hit_tokens > 0
