"""`LLM.embed` and `LLM.encode` in one process, in vLLM's shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pd_cluster import LLM, EmbeddingRequestOutput, PoolingParams, PoolingRequestOutput, SamplingParams
from pd_cluster.errors import RequestError
from pd_cluster.types import Pooling
from tests.support.checkpoints import make_checkpoint, make_tokenizer
from tests.support.vectors import reference_vector

PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 60))]
HIDDEN_SIZE = 64

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(model=str(path), max_model_len=128, block_size=16, num_blocks=64) as made:
        yield made


def test_texts_and_token_ids(llm: LLM, path: Path) -> None:
    text = "Once upon a time"
    (output,) = llm.embed(text, use_tqdm=False)
    assert isinstance(output, EmbeddingRequestOutput)
    ids = make_tokenizer().encode(text).ids
    assert (output.prompt, output.prompt_token_ids, output.finished) == (text, ids, True)
    assert output.outputs.hidden_size == len(output.outputs.embedding) == HIDDEN_SIZE
    assert math.hypot(*output.outputs.embedding) == pytest.approx(1)
    assert np.allclose(output.outputs.embedding, reference_vector(path, ids, Pooling()), atol=1e-5)
    found = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    for prompt, each in zip(PROMPTS, found, strict=True):
        assert np.allclose(each.outputs.embedding, reference_vector(path, prompt, Pooling()), atol=1e-5)


def test_parameters_for_each(llm: LLM, path: Path) -> None:
    params = [PoolingParams(dimensions=5), PoolingParams(normalize=False), PoolingParams(truncate_prompt_tokens=4)]
    outputs = llm.encode(PROMPTS, params, use_tqdm=False, pooling_task="embed")
    assert all(isinstance(output, PoolingRequestOutput) for output in outputs)
    expected = [Pooling(dimensions=5), Pooling(normalizes=False), Pooling()]
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[2][-4:]]
    assert [output.prompt_token_ids for output in outputs] == prompts
    for prompt, pooling, output in zip(prompts, expected, outputs, strict=True):
        reference = reference_vector(path, prompt, pooling)
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


def test_what_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(RequestError, match="SamplingParams with temperature; no token is sampled"):
        llm.embed(PROMPTS, SamplingParams(temperature=0))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="pooling_task: 'classify' is not supported"):
        llm.encode(PROMPTS, pooling_task="classify")
    with pytest.raises(RequestError, match="lora_request"):
        llm.embed(PROMPTS, lora_request="an adapter")  # type: ignore[arg-type]


def test_the_checkpoints_own_way(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    (folder / "1_Pooling").mkdir()
    file = folder / "1_Pooling" / "config.json"
    file.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with LLM(model=str(folder), max_model_len=128, num_blocks=64) as llm:
        for prompt, output in zip(PROMPTS, llm.embed(PROMPTS, use_tqdm=False), strict=True):
            expected = reference_vector(folder, prompt, Pooling(kind="mean"))
            assert np.allclose(output.outputs.embedding, expected, atol=1e-5)
    file.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with LLM(model=str(folder), max_model_len=128, num_blocks=64) as llm:
        (output,) = llm.embed([[1, 2]], use_tqdm=False)
        assert output.error_code == 400
        assert "pooling_mode max_tokens is not supported" in (output.error_msg or "")
        (answer,) = llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        assert answer.error_msg is None
