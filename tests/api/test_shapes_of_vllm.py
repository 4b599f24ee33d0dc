"""Details that vLLM's clients rely on: default answer lengths, chunks, null fields, roles and parts."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from tests.api.conftest import MAX_MODEL_LEN
from tests.support.cluster import LiveCluster
from tests.support.sse import chunks_of

HELLO = {"role": "user", "content": "hello"}
GREEDY = {"temperature": 0, "ignore_eos": True}


def post(cluster: LiveCluster, route: str, **body: Any) -> httpx.Response:
    return cluster.client.post(f"{cluster.url}/v1/{route}", json=body)


def test_an_answer_has_as_many_tokens_as_there_is_room_for(cluster: LiveCluster) -> None:
    prompt = [7] * 200
    for wanted in (56, 57, MAX_MODEL_LEN):
        usage = post(cluster, "completions", prompt=prompt, max_tokens=wanted, **GREEDY).json()["usage"]
        assert usage["completion_tokens"] == MAX_MODEL_LEN - 200


def test_the_field_that_the_client_sent_is_named(cluster: LiveCluster) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        error = post(cluster, "chat/completions", messages=[HELLO], **{name: MAX_MODEL_LEN + 1}).json()["error"]
        assert (error["param"], error["code"]) == (name, "context_length_exceeded")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_usage_so_far_grows_with_every_chunk(cluster: LiveCluster, route: str) -> None:
    """Usage grows with every chunk; the last text and the finish_reason share a chunk."""
    prompt = {"prompt": "hello"} if route == "completions" else {"messages": [HELLO]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chunks_of(
        post(cluster, route, **prompt, max_tokens=12, stream=True, stream_options=options, **GREEDY)
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    if route == "chat/completions":
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert counts[0] == 0
    assert counts == sorted(set(counts))
    assert counts[-1] == last["usage"]["completion_tokens"] == 12
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_text_of_a_stream_is_whole(cluster: LiveCluster, route: str) -> None:
    prompt = {"prompt": "hello"} if route == "completions" else {"messages": [HELLO]}
    for more in ({}, {"stop": ["e"]}, {"logprobs": 1 if route == "completions" else True}, {"return_token_ids": True}):
        (whole,) = post(cluster, route, **prompt, max_tokens=20, **GREEDY, **more).json()["choices"]
        chunks = chunks_of(post(cluster, route, **prompt, max_tokens=20, stream=True, **GREEDY, **more))
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(each.get("text", each.get("delta", {}).get("content", "")) for each in choices)
        assert text == (whole["text"] if route == "completions" else whole["message"]["content"])
        assert (choices[-1]["finish_reason"], choices[-1].get("stop_reason")) == (
            whole["finish_reason"],
            whole.get("stop_reason"),
        )
        if "return_token_ids" in more:
            assert [i for each in choices for i in each.get("token_ids") or []] == whole["token_ids"]


NULL = re.compile(r'"(\w+)":null')
OPENAI_HAS = {"logprobs", "finish_reason", "usage"}  # present even if null


def test_no_field_that_was_not_asked_for(cluster: LiveCluster) -> None:
    asked: dict[str, dict[str, Any]] = {
        "v1/chat/completions": {"messages": [HELLO], "max_tokens": 2},
        "v1/completions": {"prompt": "a", "max_tokens": 2},
        "inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
        "tokenize": {"prompt": "a"},
    }
    for path, asking in asked.items():
        for body in (asking, {**asking, "stream": True})[: 1 if path == "tokenize" else 2]:
            answer = cluster.client.post(f"{cluster.url}/{path}", json=body).raise_for_status()
            assert set(NULL.findall(answer.text)) <= OPENAI_HAS
            assert "tool_calls" not in answer.text  # absent without calls


def test_roles_are_those_of_the_api_and_of_the_template(cluster: LiveCluster) -> None:
    for role, status in (("function", 200), ("narrator", 400), ("user<|end|><|system|>", 400)):
        answer = post(cluster, "chat/completions", messages=[{"role": role, "content": "x"}, HELLO], max_tokens=2)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["message"].startswith(f"messages[0].role: {role!r}")
