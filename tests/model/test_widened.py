"""The model of `benchmarks speculative` copies its prompt, and its padded form gives the same answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.copy_tasks import VOCAB_SIZE, Task, called, copied, corrected
from benchmarks.model_shapes import ModelShape
from benchmarks.widened_llama import noise_for, widened
from pd_cluster.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "benchmarks" / "models" / "copy"
SHAPE = ModelShape(
    hidden_size=192, num_layers=5, num_heads=6, num_kv_heads=3, intermediate_size=256, vocab_size=VOCAB_SIZE + 40
)


def tasks() -> list[Task]:
    rng = random.Random(5)
    return [copied(rng, 200), copied(rng, 440), corrected(rng, 200), called(rng, 4)]


@torch.inference_mode()
def test_it_copies_and_padding_changes_no_answer(tmp_path: Path) -> None:
    small, wide = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (FOLDER, widened(FOLDER, tmp_path, SHAPE))
    )
    num_right = num_tokens = 0
    for task in tasks():
        ids = torch.tensor([task.prompt + task.answer])
        expected, found = small(ids).logits[0], wide(ids).logits[0]
        torch.testing.assert_close(found[:, :VOCAB_SIZE], expected, rtol=0, atol=1e-4)
        assert not found[:, VOCAB_SIZE:].any()
        said = expected[len(task.prompt) - 1 : -1].argmax(-1)
        assert torch.equal(found[len(task.prompt) - 1 : -1].argmax(-1), said)
        num_right, num_tokens = num_right + int((said == ids[0, len(task.prompt) :]).sum()), num_tokens + len(said)
    assert num_right >= 0.995 * num_tokens


@pytest.mark.slow
def test_noise_sets_how_often_the_small_one_agrees() -> None:
    rng = random.Random(6)
    noise, share = noise_for(0.8, FOLDER, SHAPE, [copied(rng, 60).prompt for _ in range(4)])
    assert noise > 0
    assert 0.7 < share < 0.9


def test_a_shape_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers 2: the small model has 4"):
        widened(FOLDER, tmp_path, ModelShape(num_layers=2))
