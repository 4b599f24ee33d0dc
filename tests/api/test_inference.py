"""Tokens in and out, rendered prompts, batches of chats and /invocations, against the equivalent routes."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx
import pytest

from tests.support.asking import post, right
from tests.support.cluster import LiveCluster
from tests.support.sse import chunks_of

DIGIT_SCHEMA = {
    "type": "object",
    "properties": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["digit"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPT = [7, 8, 9, 10, 11]
HELLO = [{"role": "user", "content": "hello"}]


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


def test_tokens_are_those_of_a_completion(cluster: LiveCluster) -> None:
    expected = cluster.complete(PROMPT, 8, ignore_eos=True)
    body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": {**GREEDY, "max_tokens": 8, "logprobs": 2}}
    answer = right(post(cluster, "/inference/v1/generate", **body))
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (expected, "length")
    assert "text" not in choice
    assert answer["usage"]["completion_tokens"] == 8
    shown = choice["logprobs"]["content"]
    assert [each["token"] for each in shown] == [f"token_id:{token_id}" for token_id in expected]
    assert all(len(each["top_logprobs"]) == 2 for each in shown)
    options = {"include_usage": True}
    *events, last = chunks_of(post(cluster, "/inference/v1/generate", **body, stream=True, stream_options=options))
    assert [token_id for event in events for token_id in event["choices"][0]["token_ids"]] == expected
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 8)
    assert {event["request_id"] for event in [*events, last]} == {last["request_id"]}


def test_tokens_fill_the_context_unless_max_tokens_is_given(cluster: LiveCluster) -> None:
    """As in vLLM, tokens fill the context unless max_tokens is given; parameters mean the same as in completions."""
    answer = right(post(cluster, "/inference/v1/generate", token_ids=[7] * 240, sampling_params=GREEDY))
    assert answer["usage"]["completion_tokens"] == 16
    drawn = {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 6, "ignore_eos": True, "detokenize": False}
    answer = right(post(cluster, "/inference/v1/generate", token_ids=PROMPT, sampling_params=drawn))
    fields = {"temperature": 1.0, "seed": 3, "n": 3, "ignore_eos": True}
    assert [each["token_ids"] for each in answer["choices"]] == cluster.complete_choices(PROMPT, 6, **fields)
    found = right(
        post(
            cluster, "/inference/v1/generate", token_ids=PROMPT, sampling_params={"max_tokens": 1, "prompt_logprobs": 1}
        )
    )
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == len(PROMPT)


@pytest.mark.parametrize(
    "more",
    [
        {"stop": ["e"], "min_tokens": 2},
        {"logprobs": True, "top_logprobs": 1},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "d", "schema": DIGIT_SCHEMA}}},
        {"structured_outputs": {"choice": ["aa", "ab"]}},
        {"guided_json": DIGIT_SCHEMA, "guided_whitespace_pattern": ""},
    ],
    ids=["stop", "logprobs", "json", "choice", "compact"],
)
def test_a_rendered_chat_is_answered_as_the_chat_is(cluster: LiveCluster, more: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "temperature": 0, **more}
    rendered = right(post(cluster, "/v1/chat/completions/render", **body))
    assert rendered["token_ids"] == right(post(cluster, "/tokenize", messages=HELLO))["tokens"]
    assert re.fullmatch("chatcmpl-[0-9a-f]{24}", rendered["request_id"])
    answer = right(post(cluster, "/inference/v1/generate", **rendered))
    expected = right(post(cluster, "/v1/chat/completions", **body, return_token_ids=True))
    assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert answer["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    assert (answer["choices"][0]["logprobs"] is None) == ("logprobs" not in more)


def test_a_rendered_completion_is_answered_as_it_is(cluster: LiveCluster) -> None:
    body = {"prompt": ["one", "two, three"], "max_tokens": 6, "logprobs": 1, **GREEDY}
    rendered = right(post(cluster, "/v1/completions/render", **body))
    assert len({each["request_id"] for each in rendered if each["request_id"].startswith("cmpl-")}) == 2
    expected = right(post(cluster, "/v1/completions", **body, return_token_ids=True))["choices"]
    for each, choice in zip(rendered, expected, strict=True):
        assert each["token_ids"] == choice["prompt_token_ids"]
        answer = right(post(cluster, "/inference/v1/generate", **each))
        assert answer["choices"][0]["token_ids"] == choice["token_ids"]
    status, param, _ = error_of(post(cluster, "/v1/completions/render", prompt="a", echo=True))
    assert (status, param) == (400, "echo")


def test_a_guide_that_has_no_form_is_not_rendered(scripted: LiveCluster) -> None:
    """With reasoning, a guide constrains only the text after it, which has no rendered form."""
    body = {"messages": HELLO, "response_format": {"type": "json_object"}}
    status, param, message = error_of(post(scripted, "/v1/chat/completions/render", **body))
    assert (status, param) == (400, "tools")
    assert "/v1/chat/completions" in message
    assert right(post(scripted, "/v1/chat/completions/render", messages=HELLO))["token_ids"]


def test_a_batch_answers_each_conversation(cluster: LiveCluster) -> None:
    conversations = [HELLO, [{"role": "system", "content": "brief"}, *HELLO], [{"role": "user", "content": "7"}]]
    body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    found = right(post(cluster, "/v1/chat/completions/batch", messages=conversations, **body))
    alone = [right(post(cluster, "/v1/chat/completions", messages=each, **body)) for each in conversations]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert [c["message"] for c in found["choices"]] == [each["choices"][0]["message"] for each in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == sum(each["usage"][name] for each in alone)


@pytest.mark.parametrize(
    ("path", "prompt", "room"),
    [
        ("/v1/completions", {"prompt": "one"}, {"max_tokens": 9}),
        ("/v1/chat/completions", {"messages": HELLO}, {"max_tokens": 9}),
        ("/inference/v1/generate", {"token_ids": PROMPT}, {"sampling_params": {"max_tokens": 9, "ignore_eos": True}}),
    ],
)
def test_an_answer_tells_its_times(
    cluster: LiveCluster, path: str, prompt: dict[str, Any], room: dict[str, Any]
) -> None:
    """Whole and streamed answers have times that are consistent with each other and with the request's duration."""
    body = {**prompt, **room, "include_metrics": True, **({} if "inference" in path else GREEDY)}
    started_s = time.monotonic()
    found = [
        right(post(cluster, path, **body))["metrics"],
        chunks_of(post(cluster, path, **body, stream=True))[-1]["metrics"],
    ]
    took_ms = 1000 * (time.monotonic() - started_s)
    for metrics in found:
        assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"]
        assert 8 * metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"])
        assert metrics["tokens_per_second"] * metrics["mean_itl_ms"] == pytest.approx(1000)
    assert sum(each["time_to_first_token_ms"] + each["generation_time_ms"] for each in found) < took_ms
    assert "metrics" not in right(post(cluster, path, **prompt, **room))


@pytest.mark.parametrize(
    ("path", "prompt", "of_answer"),
    [
        ("/v1/completions", {"prompt": [41] * 40}, {"max_tokens": 6}),
        ("/v1/chat/completions", {"messages": HELLO * 12}, {"max_tokens": 6}),
        ("/inference/v1/generate", {"token_ids": [43] * 40}, {"sampling_params": {"max_tokens": 6, "temperature": 0}}),
    ],
)
def test_a_handle_leads_to_the_cache_of_its_prompt(
    cluster: LiveCluster, path: str, prompt: dict[str, Any], of_answer: dict[str, Any]
) -> None:
    """As with a router that splits requests: one request computes the prompt, another uses its handle to generate."""
    greedy = {} if "inference" in path else {"temperature": 0}
    first = {"sampling_params": {"max_tokens": 1, "temperature": 0}} if "inference" in path else {"max_tokens": 1}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
    found = right(post(cluster, path, **prompt, **greedy, **first, kv_transfer_params=asked))
    handle = found["kv_transfer_params"]
    assert "prefill-0" not in json.dumps(handle)
    answer = right(post(cluster, path, **prompt, **greedy, **of_answer, kv_transfer_params=handle))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    plain = right(post(cluster, path, **prompt, **greedy, **of_answer))
    assert answer["choices"] == plain["choices"]
    streamed = chunks_of(post(cluster, path, **prompt, **greedy, **of_answer, kv_transfer_params=handle, stream=True))
    assert streamed[-1]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
    assert "handle" not in json.dumps(plain)


@pytest.mark.parametrize(("form", "stream"), [("TEXT", False), ("json", True)])
def test_load_balancers_learn_how_busy_the_cluster_is(cluster: LiveCluster, form: str, stream: bool) -> None:
    body = {"prompt": "one", "max_tokens": 2, "stream": stream}
    headers = {"endpoint-load-metrics-format": form}
    answer = cluster.client.post(f"{cluster.url}/v1/completions", json=body, headers=headers)
    kind, _, told = answer.headers["endpoint-load-metrics"].partition(" ")
    assert kind == form.upper()
    if kind == "JSON":
        numbers = json.loads(told)["named_metrics"]
    else:
        pairs = [each.removeprefix("named_metrics.").split("=") for each in told.split(", ")]
        numbers = {name: float(value) for name, value in pairs}
    assert set(numbers) == {"kv_cache_usage_perc", "num_requests_waiting"}
    assert 0 <= numbers["kv_cache_usage_perc"] <= 1
    for other in ({}, {"endpoint-load-metrics-format": "protobuf"}):
        answer = cluster.client.post(f"{cluster.url}/v1/completions", json=body, headers=other)
        assert "endpoint-load-metrics" not in answer.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "temperature": 0}),
        ("/rerank", {"query": "one", "documents": ["two", "three"]}),
    ],
)
def test_an_invocation_is_what_its_fields_say(cluster: LiveCluster, path: str, body: dict[str, Any]) -> None:
    found, expected = right(post(cluster, "/invocations", **body)), right(post(cluster, path, **body))
    for answer in (found, expected):
        for name in ("id", "created", "usage"):
            answer.pop(name, None)
    assert found == expected
    assert error_of(post(cluster, "/invocations", something=1))[0] == 400
    streamed = post(cluster, "/invocations", prompt="one", max_tokens=4, temperature=0, stream=True)
    assert "".join(event["choices"][0]["text"] for event in chunks_of(streamed))
