"""Logprobs of named tokens equal transformers', with chunks, preemptions and several sequences."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster import LLM, SamplingParams
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import reference_model
from tests.support.engines import make_core, random_prompt, run

Checkpoints = Callable[[str], Path]
NAMED = (100, 20, 60)
EXACT = 2e-4

pytestmark = pytest.mark.usefixtures("one_thread")


def test_they_are_those_of_the_model(checkpoint: Checkpoints) -> None:
    folder, rng = checkpoint("llama"), random.Random(3)
    few = {"num_blocks": 14, "max_model_len": 128}  # too few for all at once
    core = make_core(folder, block_size=16, max_num_batched_tokens=40, **few)
    requests = []
    for at, length in enumerate((70, 3, 90)):
        prompt = random_prompt(rng, length)
        rows = tuple(tuple(rng.sample(range(256), at + 1)) for _ in prompt[1:])
        sampling = Sampling(
            max_tokens=12,
            n=2,
            temperature=1.0,
            seed=at,
            ignore_eos=True,
            logprobs=0,
            logprob_token_ids=NAMED,
            prompt_logprobs=at % 2,
            prompt_logprob_token_ids=rows,
        )
        requests.append(Request(f"r{at}", RequestSpec(prompt, sampling), arrival_s=float(at)))
    found = run(core, requests)
    for request in requests:
        sampling, prompt = request.sampling, request.prompt_token_ids
        for tokens in found[request.request_id].values():
            expected = logprobs_after(folder, [*prompt, *(each.token_id for each in tokens)])
            for at, token in enumerate(tokens, len(prompt) - 1):
                assert token.logprobs is not None
                assert dict(token.logprobs.top) == pytest.approx({n: float(expected[at, n]) for n in NAMED}, abs=EXACT)
                assert [each for each, _ in token.logprobs.top] == [*NAMED]
        assert len(request.prompt_logprobs) == len(prompt)
        for at, (told, row) in enumerate(
            zip(request.prompt_logprobs[1:], sampling.prompt_logprob_token_ids, strict=True)
        ):
            assert told is not None
            named = told.top[sampling.prompt_logprobs or 0 :]
            assert named == [(each, pytest.approx(float(expected[at, each]), abs=EXACT)) for each in row]


def logprobs_after(folder: Path, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference_model(folder)(torch.tensor([token_ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("is_chat", [False, True])
def test_llm_returns_them(checkpoint: Checkpoints, is_chat: bool) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprob_token_ids=[*NAMED, NAMED[0]])
    folder = checkpoint("llama")
    with LLM(str(folder), num_blocks=64, max_model_len=128) as llm:
        given: dict[str, Any] = {"sampling_params": params, "use_tqdm": False}
        if is_chat:
            template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
            (output,) = llm.chat([{"role": "user", "content": "abc"}], chat_template=template, **given)
        else:
            (output,) = llm.generate(prompt_token_ids=[[5, 6, 7]], **given)
        answer = output.outputs[0]
        expected = logprobs_after(folder, [*output.prompt_token_ids, *answer.token_ids])
        for at, (token_id, told) in enumerate(
            zip(answer.token_ids, answer.logprobs, strict=True), len(output.prompt_token_ids) - 1
        ):
            assert set(told) == {*NAMED, token_id}
            assert {each: told[each].logprob for each in told} == pytest.approx(
                {each: float(expected[at, each]) for each in told}, abs=EXACT
            )
        wrong = SamplingParams(max_tokens=4, logprob_token_ids=[1 << 20])
        (refused,) = llm.generate(prompt_token_ids=[[5]], sampling_params=wrong, use_tqdm=False)
        assert refused.error_code == 400
        assert refused.error_msg.startswith("logprob_token_ids: ")
