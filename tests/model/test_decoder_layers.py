"""All decoder layers in one call give the bits of separate calls, and write the same pool."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.model.inputs.forward_batch import batch_of
from pd_cluster.model.kernels.cpu.decoder_layers import LAYERS_AT_ONCE, MOST_ROWS, DecoderLayers
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.runner.load_runner import load_runner
from pd_cluster.model.runner.model_runner import ModelRunner, RunnerOutput
from pd_cluster.native import float_products
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.model.test_company import wide
from tests.support.checkpoints import make_checkpoint

CASES: dict[str, dict[str, Any]] = {
    "int4_wo": {"quantization": "int4_wo"},
    "bfloat16, int8 pool": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "w4a8 of bfloat16": {"dtype": "bfloat16", "quantization": "w4a8"},
    "int8, bfloat16 pool": {"quantization": "int8", "kv_cache_dtype": "bfloat16"},
}
NUM_SEQS = (1, 2, 4, 5, 17, MOST_ROWS)
Chunks = list[tuple[Request, int]]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def runner_of(folder: Path, **settings: Any) -> tuple[ModelRunner, DecoderLayers]:
    runner = load_runner(EngineConfig(model=str(folder), num_blocks=3 * MOST_ROWS, max_model_len=200, **settings))
    assert isinstance(runner.model, FusedCausalLM)
    decoder = runner.model.decoder
    if decoder is None:
        pytest.skip("the kernels cannot be compiled here")
    assert isinstance(decoder, DecoderLayers)
    return runner, decoder


def sequences(runner: ModelRunner, num_seqs: int) -> Chunks:
    """Returns chunks of one token, for sequences of 1 to 40 tokens with scattered blocks."""
    rng = random.Random(num_seqs)
    blocks = rng.sample(range(runner.pool.num_blocks), 3 * num_seqs)
    found = []
    for at in range(num_seqs):
        num_tokens = 1 + at * 7 % 40
        order = RequestSpec([rng.randrange(1, 200) for _ in range(num_tokens)], Sampling())
        needed = runner.pool.layout.num_blocks_for(num_tokens)
        table = blocks[3 * at : 3 * at + needed]
        found.append((Request(str(at), order, num_computed_tokens=num_tokens - 1, tables=[table]), 1))
    return found


def computed(runner: ModelRunner, decoder: DecoderLayers | None, chunks: Chunks, **how: Any) -> RunnerOutput:
    assert isinstance(runner.model, FusedCausalLM)
    runner.model.decoder = decoder
    return runner.forward(chunks, **how)


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_parts(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, decoder = runner_of(wide(tmp_path / "model", "llama"), **CASES[name])
    runner.pool.data.copy_(torch.randint(0, 50, runner.pool.data.shape).to(runner.pool.data.dtype))
    start, calls = runner.pool.data.clone(), []
    called = DecoderLayers.__call__
    monkeypatch.setattr(DecoderLayers, "__call__", lambda *given: calls.append(1) or called(*given))
    for num_seqs in NUM_SEQS:
        chunks = sequences(runner, num_seqs)
        torch.set_num_threads(2)
        expected = computed(runner, None, chunks).logits
        written = runner.pool.data.clone()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            runner.pool.data.copy_(start)
            assert torch.equal(computed(runner, decoder, chunks).logits, expected), f"{num_seqs} rows, {threads}"
            assert torch.equal(runner.pool.data, written)
        alone = computed(runner, decoder, chunks[-1:]).logits
        assert torch.equal(alone[0], expected[-1]), f"a row among {num_seqs}"
        runner.pool.data.copy_(start)
    assert len(calls) == 3 * len(NUM_SEQS)


def test_norms_of_queries_and_layers_that_are_reported(tmp_path: Path) -> None:
    """Uses qwen3, with layers reported one by one, as when a prompt is sent while it is computed."""
    runner, decoder = runner_of(make_checkpoint(tmp_path / "model", "qwen3"), quantization="int8_wo")
    chunks = sequences(runner, 3)
    start = runner.pool.data.clone()
    expected = computed(runner, None, chunks).logits
    written = runner.pool.data.clone()
    runner.pool.data.copy_(start)
    seen: list[torch.Tensor] = []
    found = computed(
        runner, decoder, chunks, on_layer=lambda num: seen.append(runner.pool.data[:, :num].clone())
    ).logits
    assert torch.equal(found, expected)
    assert [each.shape[1] for each in seen] == list(range(1, runner.pool.layout.num_layers + 1))
    assert all(torch.equal(each, written[:, : each.shape[1]]) for each in seen)


def test_threads_that_change_between_layers(tmp_path: Path) -> None:
    """A call uses as many threads as torch has when it begins; core lending may change that between calls."""
    runner, decoder = runner_of(make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=10), quantization="w4a8")
    chunks = sequences(runner, 9)
    start = runner.pool.data.clone()
    expected = computed(runner, None, chunks).logits
    written = runner.pool.data.clone()
    batch = batch_of(runner.step_of(chunks), runner.pool, False)
    counts: list[int] = []

    def change() -> None:
        counts.append(1 + len(batch.layers_written) // LAYERS_AT_ONCE % 2)
        torch.set_num_threads(counts[-1])

    batch.after_layer = change
    assert isinstance(runner.model, FusedCausalLM)
    runner.model.decoder = decoder
    runner.pool.data.copy_(start)
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = runner.model(batch)
    assert torch.equal(found, expected)
    assert torch.equal(runner.pool.data, written)
    assert counts == [1, 1, 1, 2, 2, 2, 2, 1, 1, 1]
    assert batch.layers_written == list(range(10))


def test_what_it_does_not_take(tmp_path: Path) -> None:
    """One call does not support norms after each half, experts, oneDNN's float32, and steps with unread rows."""
    cases: dict[str, dict[str, Any]] = {"gemma2": {"quantization": "int8"}, "mixtral": {"quantization": "int8"}}
    if float_products.can_run():  # otherwise the kernels multiply float32
        cases["llama"] = {}
    for architecture, settings in cases.items():
        folder = make_checkpoint(tmp_path / architecture, architecture)
        runner = load_runner(EngineConfig(model=str(folder), num_blocks=16, max_model_len=100, **settings))
        assert isinstance(runner.model, FusedCausalLM)
        assert runner.model.decoder is None
    runner, decoder = runner_of(make_checkpoint(tmp_path / "llama8", "llama"), quantization="int8")
    (request, _), *_ = sequences(runner, 3)[2:]
    request.num_computed_tokens = 0
    whole = [(request, 15)]
    assert torch.equal(computed(runner, decoder, whole).logits, computed(runner, None, whole).logits)
