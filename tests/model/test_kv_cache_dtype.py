"""`--kv-cache-dtype`: engines over pools of codes give the tokens of transformers with a cache of the same numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster import LLM, SamplingParams
from pd_cluster.errors import ConfigError
from pd_cluster.kv.layout import CODE_BITS
from pd_cluster.settings.engine import KV_CACHE_DTYPES
from tests.support.checkpoints import make_checkpoint, reference_model
from tests.support.coded_cache import CacheOf, generated
from tests.support.engines import random_prompt
from tests.support.spread import spread
from tests.support.watched import watching

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 17, 40)]
FUSED = ["llama", "qwen3", "gemma2", "gpt_oss", "phi3", "mixtral"]
UNFUSED = ["gpt2", "gpt_neox", "opt"]


def expected(folder: Path, dtype: str) -> list[list[int]]:
    return generated(folder, dtype, PROMPTS, 10)


def tokens_of(folder: Path, dtype: str, **settings: Any) -> list[list[int]]:
    with LLM(str(folder), max_model_len=128, kv_cache_dtype=dtype, **({"num_blocks": 64} | settings)) as llm:
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(("dtype", "architecture"), spread(["bfloat16", *CODE_BITS], [*FUSED, *UNFUSED]))
def test_tokens_are_transformers_with_such_a_cache(tmp_path: Path, architecture: str, dtype: str) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    assert tokens_of(folder, dtype) == expected(folder, dtype)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((architecture, dtype) for architecture in ("llama", "gpt2") for dtype in ("bfloat16", *CODE_BITS)),
        *(("deepseek_v3", dtype) for dtype in ("bfloat16", "int8", "fp8_e4m3")),  # a scale for each plane
    ],
)
def test_logits_are_transformers_with_such_a_cache(tmp_path: Path, architecture: str, dtype: str) -> None:
    """Far nearer to them than to those of a plain cache, so the codes' effect is there."""
    folder = make_checkpoint(tmp_path / "model", architecture)
    with torch.inference_mode():
        ours, plain = (
            reference_model(folder)(torch.tensor([PROMPTS[2]]), past_key_values=CacheOf(each)).logits.log_softmax(-1)
            for each in (dtype, "float32")
        )
    wanted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(folder), max_model_len=128, num_blocks=64, kv_cache_dtype=dtype, max_num_batched_tokens=16) as llm:
        (output,) = llm.generate(prompt_token_ids=PROMPTS[2], sampling_params=wanted, use_tqdm=False)
    found = torch.tensor([next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]])
    at = torch.tensor(PROMPTS[2][1:])[:, None]
    own, other = ((found - each[0, :-1].gather(1, at)[:, 0]).abs().mean() for each in (ours, plain))
    assert own < other / 5


@pytest.mark.parametrize(("dtype", "mode"), spread(list(CODE_BITS), ["recompute", "swap"]))
def test_preempted_requests_go_on_as_they_were(tmp_path: Path, dtype: str, mode: str) -> None:
    """Blocks for one request and a half: in chunks of a few tokens, behind prefixes, again and again."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    tight = {"num_blocks": 6, "block_size": 8, "max_model_len": 48, "max_num_batched_tokens": 12}
    prompts = [[*PROMPTS[1], *tail] for tail in ([], [5], PROMPTS[2][:7])]
    wanted = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    found = []
    for settings in ({"num_blocks": 64}, {**tight, "preemption_mode": mode, "growth_tokens": 0}):
        with LLM(str(folder), kv_cache_dtype=dtype, **({"max_model_len": 48} | settings)) as llm:
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=wanted, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]


def test_a_narrower_pool_holds_more(tmp_path: Path) -> None:
    """Of the same memory: 4 bytes a number, or one and a scale for 16 of them."""
    folder = make_checkpoint(tmp_path / "model", "llama")
    sizes = {}
    for dtype in ("auto", "int8"):
        with watching() as made, LLM(str(folder), max_model_len=64, kv_cache_dtype=dtype, kv_cache_memory_gib=0.001):
            pool = made[0].runner.pool
            sizes[dtype] = (pool.num_blocks, pool.layout.dtype, pool.layout.planes[0].width)
    (plain, *names), (narrow, *others) = sizes["auto"], sizes["int8"]
    assert (names, others) == (["float32", 16], ["int8", 16])
    assert narrow == pytest.approx(plain * 4 * 16 / (16 + 4), rel=0.05)


@pytest.mark.parametrize(("name", "meaning"), KV_CACHE_DTYPES.items())
def test_names_of_other_engines(tmp_path: Path, name: str, meaning: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    assert tokens_of(folder, name) == tokens_of(folder, meaning)


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'fp8_e5m2': expected one of auto, bfloat16, int8"):
        tokens_of(make_checkpoint(tmp_path / "model", "llama"), "fp8_e5m2")
