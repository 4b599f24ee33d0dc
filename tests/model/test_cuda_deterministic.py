"""`--deterministic` on CUDA: refusals, and rows on a GPU; test_cuda_ops.py has interpreted tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU, Device
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError
from pd_cluster.model.kernels.attention_backend import check_deterministic
from pd_cluster.model.language_model.fuse_model import why_not_deterministic
from pd_cluster.model.loading.model_loader import check_rows, logn_of
from pd_cluster.model.loading.transformers_modules import load_plain
from pd_cluster.model.parallel.parallel_layers import SpanningNorm
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.types import Request, RequestSpec, Sampling, TokenOutput
from tests.support.engines import make_core, random_prompt, run

pytest.importorskip("triton")

LOGPROBS = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=3)
DRAWN = Sampling(max_tokens=40, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True, logprobs=3)
ON_GPU = ("llama", "qwen3", "mixtral", "gemma2", "gpt_oss", "qwen2_moe", "glm4", "olmo2", "deepseek_v3", "glm_moe_dsa")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


# ---- refusals


def test_npus_and_other_backends_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--deterministic: NPUs' operators .*HCCL_DETERMINISTIC"):
        check_deterministic("auto", Device("npu"))
    for backend in ("flashinfer", "sdpa"):
        with pytest.raises(ConfigError, match=rf"--deterministic: not with --attention-backend {backend}.*use triton"):
            check_deterministic(backend, Device("cuda"))
    check_deterministic("triton", Device("cuda"))


def test_a_cpu_takes_the_setting_and_says_so(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        runner: Any = make_core(
            checkpoint("llama"), device="cpu", num_blocks=20, max_model_len=64, deterministic=True
        ).runner
    assert "has no effect on a CPU" in caplog.text
    assert runner.model.ops.name != "deterministic Triton"
    assert runner.numerics.deterministic


def test_models_that_are_not_fused_are_refused_by_name(checkpoint: Callable[[str], Path]) -> None:
    why = "OPTForCausalLM's layers are not fused"
    folder = Checkpoint.open(str(checkpoint("opt")))
    model = load_plain(folder, "float32", CPU)
    assert why_not_deterministic(model) == why
    with pytest.raises(ConfigError, match=rf"--deterministic: {why}.*remove"):
        check_rows(model, folder, logn_of(folder))
    folder = Checkpoint.open(str(checkpoint("llama")))
    model = load_plain(folder, "float32", CPU)
    check_rows(model, folder, logn_of(folder))
    model.config.hidden_act = "relu"
    assert why_not_deterministic(model) == "LlamaForCausalLM's activation relu has no kernel"


def test_norms_over_several_ranks_are_refused(checkpoint: Callable[[str], Path]) -> None:
    """They are refused, because torch sums their squares in an order that depends on the number of rows."""
    folder = Checkpoint.open(str(checkpoint("olmo2")))
    model: Any = load_plain(folder, "float32", CPU)
    assert why_not_deterministic(model) == ""
    attention = model.model.layers[0].self_attn
    attention.q_norm = SpanningNorm(attention.q_norm, 32, 1, SingleRank())
    with pytest.raises(ConfigError, match=r"--deterministic: Olmo2ForCausalLM's norms .* span several ranks"):
        check_rows(model, folder, logn_of(folder))


# ---- on a GPU


def answers(core: EngineCore, prompts: list[list[int]], sampling: Sampling) -> list[list[object]]:
    requests = [Request(f"r{i}", RequestSpec(prompt, sampling), arrival_s=float(i)) for i, prompt in enumerate(prompts)]
    found = run(core, requests)
    return [[_told(token) for token in found[request.request_id][0]] for request in requests]


def _told(token: TokenOutput) -> object:
    assert token.logprobs is not None
    return token.token_id, token.logprobs.logprob, token.logprobs.top


@needs_gpu
@pytest.mark.parametrize("sampling", [LOGPROBS, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("architecture", ON_GPU)
def test_an_answer_has_the_same_bits_in_any_company_on_the_gpu(
    architecture: str, dtype: str, sampling: Sampling, checkpoint: Callable[[str], Path]
) -> None:
    """Tokens and logprobs are equal alone, batched, eager, in other chunks, and recomputed after a preemption."""

    def engine(**settings: object) -> EngineCore:
        usual = {"num_blocks": 400, "max_model_len": 208, "enable_prefix_caching": False, "deterministic": True}
        return make_core(checkpoint(architecture), device="cuda", dtype=dtype, **{**usual, **settings})

    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (60, 50, 40, 30)]
    core = engine()
    alone = [answers(core, [prompt], sampling)[0] for prompt in prompts]
    assert answers(core, prompts, sampling) == alone
    assert answers(engine(enforce_eager=True), prompts, sampling) == alone
    assert answers(engine(max_num_batched_tokens=24), prompts, sampling) == alone
    tight = engine(num_blocks=14)
    assert answers(tight, prompts, sampling) == alone
    assert tight.scheduler.num_preemptions > 0
