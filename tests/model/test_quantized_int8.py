"""Int8 weights with int8 activations: exact sums, rows that do not depend on each other, folders.

test_quantized_ranks.py has several ranks.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.model.causal_lm import FusedCausalLM
from pd_cluster.model.declared import layout_of
from pd_cluster.model.loader import load_model, probe_logits
from pd_cluster.model.quantized.int8 import Int8Linear
from pd_cluster.types import Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import generate, make_core, random_prompt
from tests.support.quantized import INT8_FORMATS, W8A8, rewritten

GREEDY = Sampling(max_tokens=10, temperature=0.0)
PROMPTS = [random_prompt(random.Random(1), n) for n in (1, 17, 40)]
WIDTHS = [(64, 48), (1000, 130), (4096, 64), (16384, 16)]


def expected(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Integers of 64 bits, row by row."""
    rows = []
    for row in x:
        step = row.abs().max() / 127
        taken = (row * (127 / row.abs().max())).round() if step > 0 else row
        products = (taken.long() * codes.long()).sum(-1)
        rows.append(products.float() * step * scales)
    return torch.stack(rows)


@pytest.mark.parametrize(("num_inputs", "num_outputs"), WIDTHS)
def test_sums_are_exact_and_rows_are_apart(num_inputs: int, num_outputs: int) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8)
    scales = torch.rand(num_outputs) / 100
    x = torch.randn(200, num_inputs)
    x[3] = 0
    x[5] *= 1e20
    linear = Int8Linear(codes, scales)
    found = linear(x)
    assert torch.equal(found, expected(x, codes, scales))
    for num_rows in (1, 2, 3, 16, 17, 64):
        assert torch.equal(linear(x[:num_rows]), found[:num_rows])


def test_numbers_that_are_none_stay_in_their_row() -> None:
    linear = Int8Linear(torch.ones(4, 8, dtype=torch.int8), torch.ones(4), torch.ones(4))
    x = torch.ones(3, 8)
    x[1, 2] = float("nan")
    found = linear(x)
    assert found[1].isnan().all()
    assert found[[0, 2]].tolist() == [[9.0] * 4] * 2


def test_one_scale_and_zero_point_of_the_file() -> None:
    """The sheet's example: x [1, -1] at scale 0.5 and zero point 3 is [5, 1]."""
    linear = Int8Linear(torch.tensor([[2, 3]], dtype=torch.int8), torch.ones(1), inputs=torch.tensor([0.5, 3.0]))
    assert linear(torch.tensor([[1.0, -1.0]])).tolist() == [[-1.0]]


MOST = {"msmodelslim static": 0.8}  # one scale for all layers, which fits none well


@pytest.mark.parametrize("name", INT8_FORMATS)
def test_logits_are_near_those_of_the_weights_alone(tmp_path: Path, name: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    logits = []
    for each in rewritten(folder, tmp_path, INT8_FORMATS[name]):
        model = load_model(Checkpoint.open(str(each)), "float32", CPU)
        assert isinstance(model, FusedCausalLM)
        logits.append(probe_logits(model, layout_of(model.caches, 16, "float32"), CPU))
    error = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
    assert 0 < error < MOST.get(name, 0.05)  # activations really lose bits


def test_alone_in_a_batch_and_in_chunks(tmp_path: Path) -> None:
    quantized, _ = rewritten(make_checkpoint(tmp_path / "model", "qwen3"), tmp_path, W8A8)
    together = generate(make_core(quantized, max_num_batched_tokens=8, num_blocks=64), PROMPTS, GREEDY)
    alone = make_core(quantized, num_blocks=64)
    assert [generate(alone, [prompt], GREEDY)[0] for prompt in PROMPTS] == together
