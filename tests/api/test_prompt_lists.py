"""Several prompts in one request are each answered as if sent alone, and all end together."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pd_cluster.text.tokenizer import Tokenizer
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.cluster import LiveCluster
from tests.support.sse import chunks_of

PROMPTS = ["hello", "a longer prompt than the first", "x", "hello"]
SAMPLED = {"temperature": 1.0, "seed": 5, "max_tokens": 6}


def post(cluster: LiveCluster, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = cluster.ask("/v1/completions", {"temperature": 0, "max_tokens": 8, **fields})
    return body


def streamed(cluster: LiveCluster, **fields: Any) -> list[dict[str, Any]]:
    body = {"temperature": 0, "max_tokens": 8, "stream": True, **fields}
    return chunks_of(cluster.client.post(f"{cluster.url}/v1/completions", json=body))


def texts_of(events: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def test_each_is_answered_as_if_alone(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    together = post(cluster, prompt=PROMPTS)
    alone = [post(cluster, prompt=prompt) for prompt in PROMPTS]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in together["choices"]] == [each["choices"][0]["text"] for each in alone]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][count] == sum(each["usage"][count] for each in alone)
    as_ids = post(cluster, prompt=[tokenizer.encode(prompt) for prompt in PROMPTS])
    assert as_ids["choices"] == together["choices"]


def test_choices_are_numbered_prompt_by_prompt(cluster: LiveCluster) -> None:
    together = post(cluster, prompt=PROMPTS[:3], n=2, **SAMPLED)["choices"]
    alone = [choice for prompt in PROMPTS[:3] for choice in post(cluster, prompt=prompt, n=2, **SAMPLED)["choices"]]
    assert [choice["index"] for choice in together] == list(range(6))
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]


def test_the_stream_says_the_same(cluster: LiveCluster) -> None:
    whole = post(cluster, prompt=PROMPTS, n=2, **SAMPLED)
    events = streamed(cluster, prompt=PROMPTS, n=2, stream_options={"include_usage": True}, **SAMPLED)
    assert texts_of(events) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    finished = [c["index"] for event in events for c in event["choices"] if c["finish_reason"] is not None]
    assert sorted(finished) == list(range(8))
    assert len({event["id"] for event in events}) == 1
    assert {k: v for k, v in events[-1]["usage"].items() if k != "prompt_tokens_details"} == {
        k: v for k, v in whole["usage"].items() if k != "prompt_tokens_details"
    }


@pytest.mark.parametrize("as_ids", [False, True])
def test_each_echoes_its_own_prompt(cluster: LiveCluster, tokenizer: Tokenizer, as_ids: bool) -> None:
    prompts: Any = [tokenizer.encode(prompt) for prompt in PROMPTS] if as_ids else PROMPTS
    fields: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": 1}
    whole = post(cluster, **fields)["choices"]
    for prompt, choice in zip(PROMPTS, whole, strict=True):
        assert choice["text"].startswith(prompt)
        assert "".join(choice["logprobs"]["tokens"]).startswith(prompt)
        assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode(prompt)) + 8
        assert choice["logprobs"]["token_logprobs"][0] is None
    events = streamed(cluster, **fields)
    assert texts_of(events) == {choice["index"]: choice["text"] for choice in whole}
    for choice in whole:
        told = [c["logprobs"] for event in events for c in event["choices"] if c["index"] == choice["index"]]
        tokens = [token for logprobs in told if logprobs for token in logprobs["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]


def test_one_that_cannot_be_refuses_all(cluster: LiveCluster) -> None:
    body = {"prompt": ["a", [1] * MAX_MODEL_LEN], "max_tokens": 2}
    answer = cluster.client.post(f"{cluster.url}/v1/completions", json=body | {"prompt": [[1], [1] * MAX_MODEL_LEN]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    cluster.assert_home()


def test_many_at_once(cluster: LiveCluster) -> None:
    choices = post(cluster, prompt=[f"number {i}" for i in range(200)], max_tokens=2)["choices"]
    assert [choice["index"] for choice in choices] == list(range(200))
    assert choices[17]["text"] == post(cluster, prompt="number 17", max_tokens=2)["choices"][0]["text"]


def test_who_leaves_aborts_all(cluster: LiveCluster) -> None:
    body = {"prompt": PROMPTS, "n": 4, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with (
        httpx.Client(timeout=60, trust_env=False) as client,
        client.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer,
    ):
        next(answer.iter_lines())
    cluster.assert_home()
