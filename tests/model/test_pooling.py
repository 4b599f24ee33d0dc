"""Vectors of prompts equal transformers' hidden states, and are the same bit for bit in any batch."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pd_cluster import LLM, EmbeddingRequestOutput, PoolingParams, PoolingRequestOutput, SamplingParams
from pd_cluster.devices.device import CPU
from pd_cluster.errors import RequestError
from pd_cluster.types import Pooling, Request, RequestSpec, Sampling
from tests.model.test_company import wide
from tests.support.checkpoints import CONFIGS, make_checkpoint, make_tokenizer, reference_model
from tests.support.engines import generate, make_core, random_prompt
from tests.support.more_checkpoints import MORE
from tests.support.ranks import ranks
from tests.support.vectors import embed_all, numbers, pooling_request, reference_vector, run_pooling

Checkpoints = Callable[[str], Path]

LAST, MEAN = Pooling(kind="last"), Pooling(kind="mean")
LOGITS = Pooling(kind="logits", token_ids=(9, 0, 258))
POOLINGS = [LAST, MEAN, Pooling(kind="last", normalizes=False), Pooling(kind="mean", dimensions=7)]
LENGTHS = (1, 2, 16, 17, 39, 40, 41, 100)
QUICK = ("llama", "gemma2", "mixtral", "gpt2", "opt")  # fused or not, normed or not, projected
TOLERANCE = 1e-5
LOOSE = {
    "granitemoe": 2e-5,
    "granitemoeshared": 4e-5,
    "minimax": 2e-5,
}  # their random experts amplify rounding; errors of 2.8e-5 were seen

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts_of(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, length) for length in lengths]


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """`tolerance` is relative to the vector's largest number, or to 1 if that is less."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * max(1.0, float(np.abs(expected).max()))


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted({*CONFIGS, *MORE})],
)
def test_numbers_are_transformers(tmp_path: Path, architecture: str) -> None:
    """Covers chunked prompts and one batch."""
    folder = make_checkpoint(tmp_path, architecture)
    core = make_core(folder, block_size=16, max_num_batched_tokens=40, num_blocks=64)
    prompts = prompts_of()
    for pooling in POOLINGS:
        together = embed_all(core, prompts, pooling)
        for prompt, vector in zip(prompts, together, strict=True):
            expected = reference_vector(folder, prompt, pooling)
            assert_close(np.frombuffer(vector, "<f4"), expected, LOOSE.get(architecture, TOLERANCE))
        if architecture in QUICK:  # others' tiny layers are not packed; test_company.py covers all
            assert [embed_all(core, [prompt], pooling)[0] for prompt in prompts] == together


def test_a_wide_model_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    folder = wide(tmp_path, "llama")
    prompts = prompts_of(2, (7, 1, 33, 16, 40, 2))
    core = make_core(folder, num_blocks=64, max_model_len=200, max_num_batched_tokens=24)
    for pooling in (LAST, MEAN):
        together = embed_all(core, prompts, pooling)
        assert [embed_all(core, [prompt], pooling)[0] for prompt in prompts] == together
        for prompt, vector in zip(prompts, together, strict=True):
            assert_close(np.frombuffer(vector, "<f4"), reference_vector(folder, prompt, pooling))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
def test_logits_are_transformers_and_the_same_in_any_company(tmp_path: Path, architecture: str) -> None:
    folder = wide(tmp_path, architecture) if architecture == "llama" else make_checkpoint(tmp_path, architecture)
    core = make_core(folder, block_size=16, max_num_batched_tokens=40, num_blocks=64, max_model_len=200)
    prompts = [*prompts_of(), prompts_of()[-1]]  # the last one finds the other's chunks in the prefix cache
    together = embed_all(core, prompts, LOGITS)
    assert [embed_all(core, [prompt], LOGITS)[0] for prompt in prompts] == together
    for prompt, vector in zip(prompts, together, strict=True):
        assert_close(np.frombuffer(vector, "<f4"), reference_logits(folder, prompt), 1e-4)


def reference_logits(folder: Path, prompt: list[int]) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = reference_model(folder)(torch.tensor([prompt])).logits[0, -1, [9, 0, 258]].numpy()
    return found


def test_beside_requests_that_generate(checkpoint: Checkpoints) -> None:
    """Pooling and generating requests in one step, with prompt logprobs and several sequences, are independent."""
    core = make_core(checkpoint("llama"), block_size=16, max_num_batched_tokens=40, num_blocks=96)
    prompts = prompts_of(3, (50, 3, 33, 60))
    samplings = [
        Sampling(max_tokens=9, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=9, temperature=0.0, ignore_eos=True, prompt_logprobs=2),
        Sampling(max_tokens=9, n=3, seed=5, ignore_eos=True),
        Sampling(max_tokens=5, n=2, beam_width=3, temperature=0.0, ignore_eos=True),
    ]

    def generating() -> list[Request]:
        pairs = enumerate(zip(prompts, samplings, strict=True))
        return [Request(f"g{at}", RequestSpec(prompt, each), arrival_s=at + 0.5) for at, (prompt, each) in pairs]

    def pooling() -> list[Request]:
        kinds = [LAST, MEAN, MEAN, LAST]
        pairs = enumerate(zip(prompts, kinds, strict=True))
        return [pooling_request(f"p{at}", prompt, each, float(at)) for at, (prompt, each) in pairs]

    alone = generating()
    run_pooling(core, alone)
    vectors = {name: pooled.vector for name, pooled in run_pooling(core, pooling()).items()}
    mixed = generating()
    found = run_pooling(core, [*pooling(), *mixed])
    assert {name: pooled.vector for name, pooled in found.items()} == vectors
    assert [request.output_token_ids for request in mixed] == [request.output_token_ids for request in alone]
    assert mixed[1].prompt_logprobs == alone[1].prompt_logprobs


def test_the_prefix_cache_serves_the_last_token_and_not_a_mean(checkpoint: Checkpoints) -> None:
    folder = checkpoint("llama")
    core = make_core(folder, block_size=16, num_blocks=64, max_num_batched_tokens=64)
    (prompt,) = prompts_of(4, (90,))
    generate(core, [prompt], Sampling(max_tokens=1, temperature=0.0))  # leaves cached blocks from other chunks
    for pooling, num_cached in ((LAST, 64), (MEAN, 0)):  # two chunks of 32
        first, again = (run_pooling(core, [pooling_request("r", prompt, pooling)])["r"] for _ in range(2))
        assert first.num_cached_tokens == 0
        assert again.vector == first.vector
        assert again.num_cached_tokens == num_cached
        assert_close(numbers(again), reference_vector(folder, prompt, pooling))


@pytest.mark.parametrize("swap_space_gib", [0.0, 0.01], ids=["computed again", "swapped"])
def test_preempted_in_the_middle_of_a_mean(checkpoint: Checkpoints, swap_space_gib: float) -> None:
    """An older sequence grows until the pooled prompt is preempted; its vector does not change."""
    core = make_core(
        checkpoint("llama"),
        block_size=16,
        num_blocks=7,
        max_model_len=112,
        max_num_batched_tokens=4,
        swap_space_gib=swap_space_gib,
        preemption_mode="swap" if swap_space_gib else "recompute",
    )
    (prompt, other) = prompts_of(5, (60, 30))
    expected = run_pooling(core, [pooling_request("p", prompt, MEAN)])["p"].vector
    greedy = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    before = core.scheduler.num_preemptions
    found = run_pooling(core, [Request("g", RequestSpec(other, greedy)), pooling_request("p", prompt, MEAN, 1.0)])
    assert core.scheduler.num_preemptions > before
    assert found["p"].vector == expected


def test_an_abort_in_the_middle_holds_nothing(checkpoint: Checkpoints) -> None:
    core = make_core(checkpoint("llama"), block_size=16, num_blocks=64, max_num_batched_tokens=16)
    request = pooling_request("p", prompts_of(6, (60,))[0], MEAN)
    core.scheduler.add(request)
    core.step()
    assert request in core.pooler.sums
    core.scheduler.finish(request)
    del request
    core.step()
    assert not core.pooler.sums
    assert core.scheduler.blocks.num_held == 0


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_two_ranks(checkpoint: Checkpoints, architecture: str) -> None:
    folder = checkpoint(architecture)
    prompts = prompts_of(7, (1, 16, 41, 90))
    with ranks(folder, 2, block_size=16, max_num_batched_tokens=40, num_blocks=64, device=CPU) as core:
        for pooling in (LAST, MEAN):
            together = embed_all(core, prompts, pooling)
            for prompt, vector in zip(prompts, together, strict=True):
                assert_close(np.frombuffer(vector, "<f4"), reference_vector(folder, prompt, pooling))
            if architecture == "llama":  # fused: every product is packed
                assert [embed_all(core, [prompt], pooling)[0] for prompt in prompts] == together
        for prompt, vector in zip(prompts, embed_all(core, prompts, LOGITS), strict=True):
            assert_close(np.frombuffer(vector, "<f4"), reference_logits(folder, prompt), 1e-4)


# ---- `LLM.embed` and `LLM.encode`, in vLLM's shapes


LLM_PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 60))]
HIDDEN_SIZE = 64


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoints) -> Iterator[LLM]:
    with LLM(model=str(checkpoint("llama")), max_model_len=128, block_size=16, num_blocks=64) as made:
        yield made


def test_texts_and_token_ids(llm: LLM, checkpoint: Checkpoints) -> None:
    text = "Once upon a time"
    (output,) = llm.embed(text, use_tqdm=False)
    assert isinstance(output, EmbeddingRequestOutput)
    ids = make_tokenizer().encode(text).ids
    assert (output.prompt, output.prompt_token_ids, output.finished) == (text, ids, True)
    assert output.outputs.hidden_size == len(output.outputs.embedding) == HIDDEN_SIZE
    assert math.hypot(*output.outputs.embedding) == pytest.approx(1)
    assert np.allclose(output.outputs.embedding, reference_vector(checkpoint("llama"), ids, Pooling()), atol=1e-5)
    found = llm.embed([{"prompt_token_ids": prompt} for prompt in LLM_PROMPTS], use_tqdm=False)
    for prompt, each in zip(LLM_PROMPTS, found, strict=True):
        assert np.allclose(each.outputs.embedding, reference_vector(checkpoint("llama"), prompt, Pooling()), atol=1e-5)


def test_parameters_for_each(llm: LLM, checkpoint: Checkpoints) -> None:
    params = [PoolingParams(dimensions=5), PoolingParams(normalize=False), PoolingParams(truncate_prompt_tokens=4)]
    outputs = llm.encode(LLM_PROMPTS, params, use_tqdm=False, pooling_task="embed")
    assert all(isinstance(output, PoolingRequestOutput) for output in outputs)
    expected = [Pooling(dimensions=5), Pooling(normalizes=False), Pooling()]
    prompts = [LLM_PROMPTS[0], LLM_PROMPTS[1], LLM_PROMPTS[2][-4:]]
    assert [output.prompt_token_ids for output in outputs] == prompts
    for prompt, pooling, output in zip(prompts, expected, outputs, strict=True):
        reference = reference_vector(checkpoint("llama"), prompt, pooling)
        assert output.outputs.data.dtype == np.float32
        assert np.allclose(output.outputs.data, reference, atol=1e-5 * max(1.0, float(np.abs(reference).max())))


def test_errors_are_their_own_outputs(llm: LLM) -> None:
    params = [PoolingParams(dimensions=HIDDEN_SIZE + 1), PoolingParams(), PoolingParams()]
    wide, long, good = llm.embed([[1, 2], [3] * 129, [4]], params, use_tqdm=False)
    assert (wide.error_code, wide.outputs.embedding) == (400, [])
    assert wide.error_msg == "dimensions 65: this model's vectors have 64; ask for fewer"
    assert long.error_code == 400
    (huge,) = llm.embed([[1]], PoolingParams(dimensions=2**70), use_tqdm=False)  # more than a message can have
    assert (huge.error_code, huge.error_msg) == (400, f"dimensions: {2**70}; must be in 1 to 2147483647")
    assert "129 tokens; this model's maximum context length is 128" in (long.error_msg or "")
    assert (good.error_msg, good.outputs.hidden_size) == (None, HIDDEN_SIZE)
    (whole,) = llm.embed([[3] * 128], use_tqdm=False)  # as long as the context: nothing is generated
    assert whole.error_msg is None


def test_the_checkpoints_own_way(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "1_Pooling").mkdir()
    file = folder / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with LLM(model=str(folder), max_model_len=128, num_blocks=64) as llm:
        for prompt, output in zip(LLM_PROMPTS, llm.embed(LLM_PROMPTS, use_tqdm=False), strict=True):
            expected = reference_vector(folder, prompt, Pooling(kind="mean"))
            assert np.allclose(output.outputs.embedding, expected, atol=1e-5)
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with LLM(model=str(folder), max_model_len=128, num_blocks=64) as llm:
        (output,) = llm.embed([[1, 2]], use_tqdm=False)
        assert output.error_code == 400
        assert "pooling_mode max_tokens is not supported" in (output.error_msg or "")
        (answer,) = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        assert answer.error_msg is None


def test_what_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(RequestError, match="SamplingParams with temperature; no token is sampled"):
        llm.embed([1], SamplingParams(temperature=0))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="pooling_task: 'classify' is not supported"):
        llm.encode([1], pooling_task="classify")
    with pytest.raises(RequestError, match="lora_request"):
        llm.embed([1], lora_request="an adapter")  # type: ignore[arg-type]
