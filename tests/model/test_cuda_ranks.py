"""A model on two GPUs: NCCL sums, also in graphs, steps launched ahead, and KV cache between ranks.

On CPU the same tests run over gloo.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pd_cluster import LLM, SamplingParams
from tests.support.engines import DEVICE, assert_same, random_prompt

MAX_TOKENS = 40
ON_GPUS = DEVICE == "cuda"

pytestmark = [
    pytest.mark.skipif(ON_GPUS and torch.cuda.device_count() < 2, reason="there is one GPU only"),
    *([] if ON_GPUS else [pytest.mark.slow]),  # tests/model/test_ranks_ahead.py tests the same in one process
]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eagerly"])
@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_two_ranks_generate_what_transformers_does(
    checkpoint: Callable[[str], Path], architecture: str, enforce_eager: bool
) -> None:
    folder = checkpoint(architecture)
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 16, 41, 70, 9)]
    device = {"device": DEVICE} if ON_GPUS else {}
    with LLM(
        model=str(folder),
        tensor_parallel_size=2,
        prefill=1,  # on the same two GPUs
        decode=1,
        dtype="float32",
        max_model_len=256,
        num_blocks=128,
        enforce_eager=enforce_eager,
        **device,
    ) as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(folder, prompt, list(answer.outputs[0].token_ids), MAX_TOKENS)
