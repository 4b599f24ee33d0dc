"""Folders of quantizers: the numbers that their bits stand for, on one rank and on several, to transformers' tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pd_cluster.types import Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.quantized import FORMATS, awq_words, rewritten, words_of
from tests.support.ranks import ranks

GREEDY = Sampling(max_tokens=10, temperature=0.0)
SIZES = {"hidden_size": 64, "intermediate_size": 96}
PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 17, 40)]


def test_the_words_are_those_of_the_formats() -> None:
    """Golden words: codes 0 to 7, of AWQ in its own order, and a dense stream of three bits."""
    eight = [list(range(8))]
    assert awq_words(eight).tolist() == [[0x75316420]]
    assert words_of(eight, 4).tolist() == [[0x76543210]]
    assert words_of([[1, 2, 3, 4]], 8).tolist() == [[0x04030201]]
    expected = torch.tensor([0x88FAC688, 0xC688FAC6, 0xFAC688FA], dtype=torch.int64)
    assert (words_of([list(range(8)) * 4], 3)[0].long() & 0xFFFFFFFF).tolist() == expected.tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_the_numbers(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2", **SIZES)
    quantized, plain = rewritten(folder, tmp_path, FORMATS[name])
    outputs = generate(make_core(quantized, max_num_batched_tokens=32, num_blocks=64), PROMPTS, GREEDY)
    assert_all_same(plain, PROMPTS, outputs, GREEDY.max_tokens)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["awq", "gptq desc_act", "packed asymmetric", "fp8 blocks", "mxfp4"])
def test_ranks_hold_their_shares(tmp_path: Path, name: str, num_ranks: int) -> None:
    """96 inputs of down_proj are six groups of 16, three for each of two ranks; or three of 32, which are cut."""
    folder = make_checkpoint(tmp_path / "model", "qwen2", **SIZES)
    quantized, plain = rewritten(folder, tmp_path, FORMATS[name])
    with ranks(quantized, num_ranks, max_num_batched_tokens=32, num_blocks=64) as core:
        assert_all_same(plain, PROMPTS, generate(core, PROMPTS, GREEDY), GREEDY.max_tokens)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "phi3", "glm4", "gemma2", "glm4_moe", "deepseek_v3"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    """Experts, layers that are joined in the files, rows that rope reorders, what latents are multiplied with."""
    widths = {"kv_lora_rank": 64, "q_lora_rank": 32, "v_head_dim": 24} if architecture == "deepseek_v3" else {}
    folder = make_checkpoint(tmp_path / "model", architecture, **widths)
    quantized, plain = rewritten(folder, tmp_path, FORMATS["packed 4"])
    outputs = generate(make_core(quantized, max_num_batched_tokens=32, num_blocks=64), PROMPTS, GREEDY)
    assert_all_same(plain, PROMPTS, outputs, GREEDY.max_tokens)
