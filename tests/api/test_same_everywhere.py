"""transformers, `LLM` (one process and split), `pipeline` and the HTTP API give equal tokens, greedy and sampled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import LLM, GenerationConfig, SamplingParams, TurbomindEngineConfig, pipeline
from pd_cluster.text.tokenizer import Tokenizer
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.checkpoints import reference_greedy
from tests.support.cluster import LiveCluster

pytestmark = pytest.mark.usefixtures("one_preloader")

PROMPTS = ["hello", "a longer prompt than the first", "x"]
NUM_TOKENS = 12
DRAWN = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}
SEED = 11

Answers = Callable[[bool], list[list[int]]]


@contextlib.contextmanager
def of_llm(model: Path, number: int) -> Iterator[Answers]:
    with LLM(str(model), max_model_len=MAX_MODEL_LEN, num_blocks=128, prefill=number, decode=number) as llm:

        def answers(is_drawn: bool) -> list[list[int]]:
            fields: dict[str, Any] = {**DRAWN, "seed": SEED} if is_drawn else {"temperature": 0}
            params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **fields)
            found = llm.generate(PROMPTS, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in found]

        yield answers


@contextlib.contextmanager
def of_pipeline(model: Path) -> Iterator[Answers]:
    with pipeline(str(model), backend_config=TurbomindEngineConfig(session_len=MAX_MODEL_LEN)) as pipe:

        def answers(is_drawn: bool) -> list[list[int]]:
            fields: dict[str, Any] = {**DRAWN, "random_seed": SEED} if is_drawn else {"top_k": 1}
            config = GenerationConfig(max_new_tokens=NUM_TOKENS, ignore_eos=True, **fields)
            return [list(each.token_ids) for each in pipe(PROMPTS, gen_config=config, do_preprocess=False)]

        yield answers


@pytest.fixture(scope="module")
def over_http(cluster: LiveCluster) -> Answers:
    def answers(is_drawn: bool) -> list[list[int]]:
        fields = {**DRAWN, "seed": SEED} if is_drawn else {}
        return [cluster.complete(prompt, NUM_TOKENS, ignore_eos=True, **fields) for prompt in PROMPTS]

    return answers


@pytest.mark.parametrize("who", [pytest.param("LLM split", marks=pytest.mark.slow), "pipeline"])
def test_the_same_tokens(over_http: Answers, model: Path, tokenizer: Tokenizer, who: str) -> None:
    makers = {"LLM split": of_llm(model, 1), "pipeline": of_pipeline(model)}
    with makers[who] as answers:
        greedy, drawn = answers(False), answers(True)
    assert (greedy, drawn) == (over_http(False), over_http(True))
    for prompt, token_ids in zip(PROMPTS, greedy, strict=True):
        reference = reference_greedy(model, tokenizer.encode(prompt), NUM_TOKENS)
        assert token_ids[: len(reference)] == reference[: len(token_ids)]
