"""Details that vLLM's clients rely on: room for answers, chunks, null fields, roles and parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pd_cluster.text.tokenizer import Tokenizer
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.cluster import LiveCluster
from tests.support.scripted_scenarios import FAMILIES
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


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_field_that_the_client_sent_is_named(cluster: LiveCluster, name: str) -> None:
    answer = post(cluster, "chat/completions", messages=[HELLO], **{name: MAX_MODEL_LEN + 1})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (name, "context_length_exceeded")
    assert error["message"].startswith(f"{name}: {MAX_MODEL_LEN + 1};")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_usage_so_far_grows_with_every_chunk(cluster: LiveCluster, route: str) -> None:
    """The last text and the finish_reason come together."""
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
OPENAI_HAS = {"logprobs", "finish_reason", "usage"}  # where it has nothing to say, too


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asking"),
    [
        ("v1/chat/completions", {"messages": [HELLO], "max_tokens": 2}),
        ("v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 2}}),
        ("tokenize", {"prompt": "a"}),
    ],
)
def test_no_field_that_was_not_asked_for(cluster: LiveCluster, path: str, asking: dict[str, Any], stream: bool) -> None:
    body = {**asking, "stream": stream} if path != "tokenize" else asking
    answer = cluster.client.post(f"{cluster.url}/{path}", json=body)
    answer.raise_for_status()
    assert set(NULL.findall(answer.text)) <= OPENAI_HAS
    assert "tool_calls" not in answer.text  # there are none


def test_empty_stream_options_of_a_completion_ask_for_nothing(cluster: LiveCluster) -> None:
    chunks = chunks_of(post(cluster, "completions", prompt="a", max_tokens=2, stream=True, stream_options={}))
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(("role", "status"), [("function", 200), ("narrator", 400), ("user<|end|><|system|>", 400)])
def test_roles_are_those_of_the_api_and_of_the_template(cluster: LiveCluster, role: str, status: int) -> None:
    answer = post(cluster, "chat/completions", messages=[{"role": role, "content": "x"}, HELLO], max_tokens=2)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["message"].startswith(f"messages[0].role: {role!r} is no role of this model")


def test_parts_may_be_texts_and_thoughts(cluster: LiveCluster) -> None:
    parts = ["a", {"type": "thinking", "thinking": "b"}, {"type": "text", "text": "c"}]
    one, other = (
        post(cluster, "chat/completions", messages=[{"role": "user", "content": content}], max_tokens=8, **GREEDY)
        for content in (parts, "a\nb\nc")
    )
    assert one.json()["choices"] == other.json()["choices"]


def test_the_right_side_is_cut(cluster: LiveCluster) -> None:
    ids = list(range(20, 60))
    for side, kept in (("right", ids[:5]), ("left", ids[-5:])):
        body = {"prompt": ids, "truncate_prompt_tokens": 5, "truncation_side": side, "return_token_ids": True}
        (choice,) = post(cluster, "completions", max_tokens=1, **body).json()["choices"]
        assert choice["prompt_token_ids"] == kept


def test_harmless_fields_of_openai_s_client(client: openai.OpenAI, cluster: LiveCluster) -> None:
    """They say nothing about the answer, and the log nothing about them."""
    extra: Any = {"service_tier": "auto", "store": True, "metadata": {"a": "b"}, "safety_identifier": "x"}
    answer = client.chat.completions.create(model="tiny", messages=[HELLO], max_tokens=2, verbosity="low", **extra)  # type: ignore[list-item]
    assert answer.choices[0].finish_reason
    log = cluster.log_file("scheduler").read_text()
    assert not any(name in log for name in ("'service_tier'", "'verbosity'", "'safety_identifier'"))


def test_the_token_client(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    """Text to tokens and back; a conversation's are those of its prompt."""
    text = "A robot may not"
    found = cluster.client.post(f"{cluster.url}/tokenize", json={"model": "tiny", "prompt": text}).json()
    assert (found["tokens"], found["count"]) == (tokenizer.encode(text), len(text))
    assert found["max_model_len"] == MAX_MODEL_LEN
    body = {"model": "tiny", "tokens": found["tokens"]}
    assert cluster.client.post(f"{cluster.url}/detokenize", json=body).json() == {"prompt": text}
    talk: list[Any] = [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Who won in 2020?"},
        {"role": "assistant", "content": "The Dodgers."},
        {"role": "user", "content": "Where was it?"},
    ]
    rendered = "".join(f"<|{message['role']}|>{message['content']}" for message in talk) + "<|assistant|>"
    counted = cluster.client.post(f"{cluster.url}/tokenize", json={"model": "tiny", "messages": talk}).json()
    assert counted["tokens"] == tokenizer.encode(rendered)


def test_tokens_of_a_text_as_the_vocabulary_writes_them(cluster: LiveCluster) -> None:
    body = {"prompt": "a b", "return_token_strs": True}
    answer = cluster.ask("/tokenize", body)
    assert len(answer["token_strs"]) == answer["count"]
    assert "Ġ" in "".join(answer["token_strs"])


def test_reasoning_tokens_are_counted(scripted: LiveCluster, scripted_model: Path) -> None:
    """In a whole answer and at the end of a stream."""
    messages = FAMILIES["qwen3"].ask(scripted_model, "reasoning, content", [{"role": "user", "content": "Well?"}])
    said: Any = {"messages": messages, "max_tokens": 300, "temperature": 0}
    whole = scripted.client.post(f"{scripted.url}/v1/chat/completions", json=said).json()
    reasoning = whole["choices"][0]["message"]["reasoning"]
    assert reasoning
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    tokens = scripted.client.post(
        f"{scripted.url}/tokenize", json={"prompt": reasoning, "add_special_tokens": False}
    ).json()
    assert counted == tokens["count"]
    streamed = {**said, "stream": True, "stream_options": {"include_usage": True}}
    *_, last = chunks_of(scripted.client.post(f"{scripted.url}/v1/chat/completions", json=streamed))
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}
