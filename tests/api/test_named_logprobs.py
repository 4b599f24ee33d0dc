"""Logprobs of tokens named by a request, in answers and prompts, against transformers; and label scores."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from pd_cluster.text.tokenizer import Tokenizer
from tests.support.checkpoints import reference_model
from tests.support.cluster import LiveCluster
from tests.support.sse import chunks_of

PROMPT = [7, 8, 9, 10, 11]
NAMED = [100, 20, 60]  # unsorted and unlikely tokens
EXACT = 2e-4
HELLO = [{"role": "user", "content": "hello"}]


def post(cluster: LiveCluster, path: str, **body: Any) -> httpx.Response:
    return cluster.client.post(f"{cluster.url}{path}", json=body)


def right(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def reference(model: Path, token_ids: list[int]) -> torch.Tensor:
    """Returns logprobs of the next token after each token, [num_tokens, vocab_size]."""
    with torch.inference_mode():
        return reference_model(model)(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def by_id(entries: list[dict[str, Any]]) -> dict[int, float]:
    return {int(each["token"].removeprefix("token_id:")): each["logprob"] for each in entries}


def test_an_answer_tells_the_tokens_that_are_named(cluster: LiveCluster, model: Path) -> None:
    """Named tokens' logprobs are right for the first token (from prefill) and the others (from decode)."""
    fields = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprob_token_ids": NAMED}
    shown = {"logprobs": 5, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = right(post(cluster, "/v1/completions", prompt=PROMPT, **shown, **fields))["choices"]
    expected = reference(model, [*PROMPT, *choice["token_ids"]])[len(PROMPT) - 1 :]
    sampling = {**fields, "logprobs": 1}
    (of_tokens,) = right(post(cluster, "/inference/v1/generate", token_ids=PROMPT, sampling_params=sampling))["choices"]
    assert of_tokens["token_ids"] == choice["token_ids"]
    for at, token_id in enumerate(choice["token_ids"]):
        wanted = {named: float(expected[at, named]) for named in (token_id, *NAMED)}
        found = of_tokens["logprobs"]["content"][at]["top_logprobs"]
        assert by_id(found) == pytest.approx(wanted, abs=EXACT)
        assert [*by_id(found)] == [token_id, *NAMED]
        same = {f"token_id:{each}": value for each, value in by_id(found).items()}
        assert choice["logprobs"]["top_logprobs"][at] == pytest.approx(same, abs=1e-6)


def test_a_chat_tells_them_whole_and_streamed(cluster: LiveCluster) -> None:
    fields = {
        "messages": HELLO,
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "logprob_token_ids": [5000 % 300, 42],
        "return_tokens_as_token_ids": True,
        "allowed_token_ids": [42],
    }
    (choice,) = right(post(cluster, "/v1/chat/completions", **fields))["choices"]
    whole = [by_id(each["top_logprobs"]) for each in choice["logprobs"]["content"]]
    assert [{*each} for each in whole] == [{42, 200}] * 3
    chunks = chunks_of(post(cluster, "/v1/chat/completions", **fields, stream=True))
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [by_id(each["top_logprobs"]) for each in streamed] == whole


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": "a", "logprob_token_ids": [5]}, "needs logprobs"),
        ({"prompt": "a", "logprobs": 1, "logprob_token_ids": [1 << 20]}, "not in the vocabulary"),
        ({"prompt": "a", "logprobs": 1, "logprob_token_ids": [5], "use_beam_search": True, "n": 2}, "beam search"),
        ({"prompt": "a", "logprobs": 1, "logprob_token_ids": [5], "echo": True, "max_tokens": 0}, "no output token"),
        ({"prompt": "a", "logprobs": 1, "logprob_token_ids": [5] * 129}, "at most 128"),
        ({"prompt": "a", "prompt_logprob_token_ids": [[5]]}, "/inference/v1/generate"),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, "prompts are never embeddings"),
        ({"prompt": "a", "return_token_offsets": True}, "/v1/completions/render"),
    ],
)
def test_refusals_name_the_field(cluster: LiveCluster, body: dict[str, Any], says: str) -> None:
    answer = post(cluster, "/v1/completions", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] in body
    assert error["message"].startswith(error["param"])
    assert says in error["message"]


def scores_of(answer: Any) -> Any:
    return np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))


def test_a_prompt_tells_the_tokens_that_are_named(cluster: LiveCluster, model: Path) -> None:
    rows, prompt = [[9], [10, 100], [11]], PROMPT
    sampling = {"max_tokens": 1, "prompt_logprobs": 1, "prompt_logprob_token_ids": rows, "prompt_logprob_start": 1}
    answer = right(post(cluster, "/inference/v1/generate", token_ids=prompt, sampling_params=sampling))
    scores, expected = scores_of(answer), reference(model, prompt)
    assert scores.shape == (3, 2)
    for at, row in enumerate(rows):
        assert scores[at, : len(row)] == pytest.approx([float(expected[at + 1, each]) for each in row], abs=EXACT)
        own = answer["prompt_logprobs"][at + 2][str(prompt[at + 2])]["logprob"]
        assert scores[at, 0] == pytest.approx(own, abs=1e-6)
    assert np.isneginf(scores[[0, 2], 1]).all()
    assert all(len(each) <= 2 for each in answer["prompt_logprobs"][1:]), "named tokens are listed separately"
    alone = {"max_tokens": 1, "prompt_logprob_token_ids": [[each] for each in prompt[1:]]}
    answer = right(post(cluster, "/inference/v1/generate", token_ids=prompt, sampling_params=alone))
    assert scores_of(answer).shape == (4, 1)
    assert "prompt_logprobs" not in answer


@pytest.mark.parametrize(
    ("more", "sampling", "says"),
    [
        ({}, {"prompt_logprob_token_ids": [[5], [6]]}, "4 scored tokens"),
        ({"stream": True}, {"prompt_logprob_token_ids": [[5]] * 4}, "stream"),
        ({}, {"prompt_logprob_token_ids": [[1 << 20]] * 4}, "not in the vocabulary"),
    ],
)
def test_rows_that_do_not_match_are_refused(
    cluster: LiveCluster, more: dict[str, Any], sampling: dict[str, Any], says: str
) -> None:
    answer = post(cluster, "/inference/v1/generate", token_ids=PROMPT, sampling_params=sampling, **more)
    assert answer.status_code == 400
    assert "prompt_logprob_token_ids" in answer.json()["error"]["message"]
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("item_first", [False, True])
def test_labels_are_as_likely_as_the_model_says(
    cluster: LiveCluster, model: Path, tokenizer: Tokenizer, item_first: bool
) -> None:
    query, items, labels = "Is it a city? ", ["Paris", "cats purr"], [30, 31, 32]
    body = {"query": query, "items": items, "label_token_ids": labels, "item_first": item_first}
    among = right(post(cluster, "/generative_scoring", **body))
    of_all = right(post(cluster, "/generative_scoring", **body, apply_softmax=False))
    num_tokens = 0
    for at, item in enumerate(items):
        parts = [tokenizer.encode(query), tokenizer.encode(item, False)]
        prompt = [token_id for part in (parts[::-1] if item_first else parts) for token_id in part]
        num_tokens += len(prompt)
        expected = reference(model, prompt)[-1]
        assert of_all["data"][at]["label_probs"] == pytest.approx(expected[labels].exp().tolist(), rel=1e-3)
        assert among["data"][at]["label_probs"] == pytest.approx(expected[labels].softmax(0).tolist(), rel=1e-3)
        assert among["data"][at]["score"] == among["data"][at]["label_probs"][0]
    assert among["usage"]["prompt_tokens"] == num_tokens
    ids = {"query": tokenizer.encode(query), "items": [tokenizer.encode(item, False) for item in items]}
    assert right(post(cluster, "/generative_scoring", **{**body, **ids}))["data"] == among["data"]


@pytest.mark.parametrize(
    ("field", "value"), [("items", []), ("label_token_ids", []), ("label_token_ids", [1 << 20]), ("query", 5)]
)
def test_label_scores_are_refused_by_name(cluster: LiveCluster, field: str, value: Any) -> None:
    body = {"query": "a", "items": ["b"], "label_token_ids": [5], field: value}
    answer = post(cluster, "/generative_scoring", **body)
    assert (answer.status_code, field in answer.json()["error"]["message"]) == (400, True)
