"""Whole models through the CUDA path's kernels, graphs and steps ahead, against transformers' `generate()`.

Interpreted on CPU, where replaying a graph repeats its calls. Run by tests/model/test_cuda_ops.py.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.graphs import prompt_graphs
from pd_cluster.model.graphs.decode_graphs import DecodeGraphs, GraphRules
from pd_cluster.model.graphs.prompt_graphs import PromptGraphs
from pd_cluster.model.graphs.step_graphs import StepGraphs
from pd_cluster.model.kernels.attention_backend import Attention, cuda_ops, triton_attention
from pd_cluster.model.kernels.cuda.attention.triton_planner import PaddedPlanner
from pd_cluster.model.kernels.cuda.linear import quantized_linear
from pd_cluster.model.kernels.cuda.linear.quantized_linear import E2M1, INT4, ROUNDED
from pd_cluster.model.language_model.cache_declaration import caches_of, layout_of
from pd_cluster.model.language_model.causal_lm import CausalLM, PlainCausalLM
from pd_cluster.model.language_model.fused_lm import FusedCausalLM, Served
from pd_cluster.model.language_model.overwrite_tensors import CannotOverwrite
from pd_cluster.model.loading import model_loader, transformers_modules
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support import fake_flashinfer
from tests.support.checkpoints import make_checkpoint
from tests.support.coded_cache import generated
from tests.support.engines import assert_all_same, generate, random_prompt, run
from tests.support.interpreted import Noted, choose_device
from tests.support.quantized import FORMATS, INT8_FORMATS, W8A8, rewritten
from tests.support.weight_versions import make_version

choose_device()

GREEDY = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
ASKING = Sampling(
    max_tokens=5,
    min_tokens=3,
    temperature=0.0,
    logit_bias=((7, 1.0), (9, -1.0)),
    bad_words=((3,), (5, 6)),
    repetition_penalty=1.3,
    presence_penalty=0.5,
    logprobs=2,
)
LENS = (1, 5, 18)
ALWAYS = ("llama",)
SHALLOW = {"num_hidden_layers": 2}
SOMETIMES = ("mixtral", "qwen3", "gemma2", "gpt_oss", "phi3", "qwen2_moe", "olmo2", "smollm3", "glm4")


def as_cuda(monkeypatch: pytest.MonkeyPatch, attention: Attention | None = None) -> None:
    """Makes the loader choose the CUDA path's layers on CPU."""
    monkeypatch.setattr(model_loader, "choose_attention", lambda *given: attention or triton_attention())


def with_graphs(folder: Path, **settings: Any) -> tuple[EngineCore, ModelRunner, DecodeGraphs]:
    config = EngineConfig(model=str(folder), num_blocks=40, max_model_len=64, device="cpu", **settings)
    core, runner = build_core(config)
    graphs = DecodeGraphs(runner.model, runner.pool, lambda run: run, GraphRules(8, 64))
    runner.graphs = StepGraphs(graphs)
    return core, runner, graphs


def prompts_of(lens: Sequence[int] = LENS) -> list[list[int]]:
    rng = random.Random(3)
    return [random_prompt(rng, length) for length in lens]


@pytest.mark.parametrize("architecture", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in SOMETIMES)])
def test_fused_layers_graphs_and_steps_ahead(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_cuda(monkeypatch)
    check_fused_layers(architecture, tmp_path)


@pytest.mark.slow
def test_fused_layers_around_flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a fake FlashInfer that computes attention in torch."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.as_module())
    kernels = importlib.import_module("pd_cluster.model.kernels.cuda.attention.flashinfer").FlashInfer(CPU)
    as_cuda(monkeypatch, Attention("FlashInfer", kernels.write_and_attend, kernels.attend_batch, cuda_ops))
    assert check_fused_layers("gemma2", tmp_path) == "fused layers, Triton kernels, attention by FlashInfer"
    assert any(wrapper.is_graph for wrapper in fake_flashinfer.calls.planned)


def check_fused_layers(architecture: str, tmp_path: Path) -> str:
    """Compares greedy tokens with transformers'; returns the name of the kernels that computed them."""
    folder = make_checkpoint(tmp_path, architecture, **(SHALLOW if architecture in ALWAYS else {}))
    core, runner, graphs = with_graphs(folder, max_num_batched_tokens=16)
    assert isinstance(runner.model, FusedCausalLM)
    assert runner.model.ops.name == "Triton"
    runner.goes_ahead = True
    prompts = prompts_of()
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert graphs.num_captured > 0
    num_ahead = core.ahead.num_ahead
    assert num_ahead > 0
    ahead = answers(core, prompts)
    assert core.ahead.num_ahead > num_ahead
    runner.goes_ahead = False
    assert answers(core, prompts) == ahead
    return runner.model.kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name", "kind"),
    [
        ("llama", "gptq asymmetric", INT4),
        ("llama", "mxfp4", E2M1),
        ("mixtral", "awq", INT4),
        ("qwen2", "fp8 blocks", None),  # groups of 40 have no kernel, so the weights are dequantized
    ],
)
def test_layers_of_codes_have_the_tokens_of_their_numbers(
    architecture: str, name: str, kind: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers joined projections (queries with keys and values, gate with up) and graphs."""
    kinds = noted_kinds(monkeypatch)
    as_cuda(monkeypatch)
    folder, plain = rewritten(make_checkpoint(tmp_path / "made", architecture), tmp_path, FORMATS[name])
    core, runner, graphs = with_graphs(folder)
    assert isinstance(runner.model, FusedCausalLM)
    assert set(kinds) == ({kind} if kind is not None else set())
    assert_all_same(plain, prompts_of(), generate(core, prompts_of(), GREEDY), GREEDY.max_tokens)
    assert graphs.num_captured > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", "int4"), ("qwen3", "int8"), ("gpt_oss", "fp8_e4m3"), ("gemma2", "bfloat16")],
)
def test_tokens_are_transformers_with_a_cache_of_codes(
    architecture: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_cuda(monkeypatch)
    folder = make_checkpoint(tmp_path, architecture)
    core, runner, graphs = with_graphs(folder, kv_cache_dtype=dtype)
    assert runner.pool.layout.dtype == dtype
    assert generate(core, prompts_of(), GREEDY) == generated(folder, dtype, prompts_of(), GREEDY.max_tokens)
    assert graphs.num_captured > 0


def test_int8_products_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integer sums are exact in any order, so logits differ from a CPU's only by operations between the layers."""
    folder, _ = rewritten(make_checkpoint(tmp_path / "made", "llama", **SHALLOW), tmp_path, W8A8)
    checkpoint = Checkpoint.open(str(folder))
    model = model_loader.load_model(checkpoint, "float32", CPU)
    layout = layout_of(model.caches, 16, "float32")
    expected = model_loader.probe_logits(model, layout, CPU)
    as_cuda(monkeypatch)
    kinds = noted_kinds(monkeypatch)
    found = model_loader.probe_logits(model_loader.load_model(checkpoint, "float32", CPU), layout, CPU)
    assert set(kinds) == {ROUNDED}
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


def noted_kinds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each product appends its kind of quantization."""
    kinds: list[int] = []
    noted = Noted(quantized_linear.kernels.coded_linear_product, lambda options: kinds.append(options["KIND"]))
    monkeypatch.setattr(quantized_linear.kernels, "coded_linear_product", noted)
    return kinds


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_steps_with_prompts_through_graphs(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes prompts in chunks beside decoding sequences, ahead of the host; four sequences do not fit a graph."""
    as_cuda(monkeypatch)
    monkeypatch.setattr(prompt_graphs, "TOKENS", (6, 17))
    monkeypatch.setattr(prompt_graphs, "SEQS", (1, 3))
    folder = make_checkpoint(tmp_path, architecture, **SHALLOW)
    core, runner, _ = with_graphs(folder, max_num_batched_tokens=16)
    planner = PaddedPlanner(runner.model.config.num_attention_heads, runner.pool.layout, 32, CPU)
    graphs = PromptGraphs(runner.model, runner.pool, lambda run: run, GraphRules(8, 400), planner)
    runner.graphs = StepGraphs(prompts=graphs)
    runner.goes_ahead = True
    with torch.inference_mode():
        graphs.prepare(lambda: graphs.num_captured < 1)
    assert list(graphs.captured) == [(17, 3)], "expected the largest size"
    used = counted(graphs)
    prompts = prompts_of((1, 5, 18, 9))
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
    assert core.ahead.num_ahead > 0
    assert {True, False} <= set(used)
    layers: list[int] = []
    runner.forward([(Request("layers", RequestSpec(prompts[3], GREEDY), tables=[[0]]), 9)], layers.append)
    assert used[-1]
    assert layers == list(range(1, runner.pool.layout.num_layers + 1))


def counted(graphs: PromptGraphs) -> list[bool]:
    """Returns a list to which each step appends whether a graph computed it."""
    used, compute = [], graphs.compute

    def noting(*given: Any) -> torch.Tensor | None:
        found = compute(*given)
        used.append(found is not None)
        return found

    graphs.compute = noting  # type: ignore[method-assign]
    return used


def answers(core: EngineCore, prompts: list[list[int]]) -> list[list[tuple[int, int, list[int]]]]:
    """Returns each token with its rank and the most likely tokens, if the request asks for logprobs."""
    requests = [Request(f"r{i}", RequestSpec(prompt, ASKING), arrival_s=float(i)) for i, prompt in enumerate(prompts)]
    found = []
    for tokens in run(core, requests).values():
        told = [(token.token_id, token.logprobs) for token in tokens[0]]
        found.append([(token_id, p.rank, [top for top, _ in p.top]) for token_id, p in told if p is not None])
    assert all(found)
    return found


def test_modules_of_transformers_attend_through_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_cuda(monkeypatch)
    monkeypatch.setattr(model_loader, "can_fuse", lambda model: False)
    folder = make_checkpoint(
        tmp_path, "gpt_oss", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )
    core, runner, _ = with_graphs(folder)
    runner.graphs = StepGraphs()
    assert isinstance(runner.model, PlainCausalLM)
    assert runner.model.kernels == "transformers' modules, attention by Triton"
    assert_all_same(folder, prompts_of(), generate(core, prompts_of(), GREEDY), GREEDY.max_tokens)


def test_sixteen_bits_stay_near_float32(tmp_path: Path) -> None:
    """With bfloat16 weights and pool, the error against float32 is no larger than that of transformers in bfloat16."""
    folder = make_checkpoint(tmp_path, "llama")
    checkpoint = Checkpoint.open(str(folder))
    rounded = transformers_modules.load_plain(checkpoint, "bfloat16", CPU)
    caches = caches_of(rounded)
    whole, half = (layout_of(caches, 16, dtype) for dtype in ("float32", "bfloat16"))
    exact = model_loader.probe_logits(model_loader.load_model(checkpoint, "float32", CPU), whole, CPU)
    by_modules = model_loader.probe_logits(PlainCausalLM(rounded), half, CPU)
    by_kernels = model_loader.probe_logits(
        model_loader.fuse(rounded, model_loader.choose_ops(half, CPU, triton_attention()), Served(caches)), half, CPU
    )
    error_of_modules = (by_modules - exact).norm() / exact.norm()
    error_of_kernels = (by_kernels - exact).norm() / exact.norm()
    assert torch.isfinite(by_kernels).all()
    assert error_of_kernels < 1.5 * error_of_modules + 1e-3, (float(error_of_kernels), float(error_of_modules))


def test_weights_are_overwritten_where_graphs_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_cuda(monkeypatch)
    base = make_checkpoint(tmp_path / "made", "llama", **SHALLOW)
    other = make_version(base, tmp_path / "other", 1)
    core, runner, graphs = with_graphs(base)
    prompts = prompts_of((3,))
    before, num_captured = generate(core, prompts, GREEDY), graphs.num_captured
    overwrite(runner.model, other)
    core.scheduler.forget()
    after = generate(core, prompts, GREEDY)
    assert graphs.num_captured == num_captured > 0
    assert_all_same(other, prompts, after, GREEDY.max_tokens)
    assert after != before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *((name, "") for name in ("mixtral", "deepseek_v3", "gpt_oss", "gemma2")),
        *(("llama", name) for name in ("gptq asymmetric", "mxfp4", "awq")),
        ("mixtral", "awq"),
    ],
)
def test_every_form_of_weights_is_overwritten(
    architecture: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After fused, packed or quantized weights are replaced, logits equal those of a model loaded with the new ones."""
    as_cuda(monkeypatch)
    base = make_checkpoint(tmp_path / "made", architecture)
    other = make_version(base, tmp_path / "other", 1)
    if name:
        base, other = (rewritten(each, tmp_path / f"coded-{each.name}", FORMATS[name])[0] for each in (base, other))
    model, fresh = (model_loader.load_model(Checkpoint.open(str(each)), "float32", CPU) for each in (base, other))
    layout = layout_of(model.caches, 16, "float32")
    before, wanted = (model_loader.probe_logits(each, layout, CPU) for each in (model, fresh))
    overwrite(model, other)
    assert torch.equal(model_loader.probe_logits(model, layout, CPU), wanted)
    assert not torch.equal(before, wanted)


def overwrite(model: CausalLM, folder: Path) -> None:
    assert isinstance(model, FusedCausalLM)
    model_loader.overwrite_weights(model, Checkpoint.open(str(folder)), "float32", CPU, SingleRank(), None)


@pytest.mark.slow
def test_scales_that_launches_contain_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs contain a static scale of activations as a number."""
    as_cuda(monkeypatch)
    base = make_checkpoint(tmp_path / "made", "llama", **SHALLOW)
    static = INT8_FORMATS["msmodelslim static"]
    folder, _ = rewritten(base, tmp_path / "base", static)
    other, _ = rewritten(make_version(base, tmp_path / "other", 1), tmp_path / "changed", static)
    model = model_loader.load_model(Checkpoint.open(str(folder)), "float32", CPU)
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    scales = {key: 2 * each for key, each in tensors.items() if key.endswith("input_scale")}
    assert scales
    save_file({**tensors, **scales}, file)
    with pytest.raises(CannotOverwrite, match=r"inputs\[0\] is"):
        overwrite(model, other)
