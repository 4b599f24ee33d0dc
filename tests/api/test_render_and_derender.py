"""Rendering every API's prompts to tokens, and token ids to answers, against the routes that do both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.text.tokenizer import Tokenizer
from tests.support.cluster import LiveCluster
from tests.support.scripted_scenarios import FAMILIES
from tests.support.sse import chunks_of

HELLO = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
QWEN3 = FAMILIES["qwen3"]


def post(cluster: LiveCluster, path: str, **body: Any) -> httpx.Response:
    return cluster.client.post(f"{cluster.url}{path}", json=body)


def right(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def without_ids(answer: dict[str, Any]) -> str:
    """Returns choices and usage, without random ids and fields that only computed answers have."""
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or []:
            call["id"] = ""
    answer["usage"].pop("prompt_tokens_details", None)
    return json.dumps([answer["choices"], answer["usage"]], sort_keys=True)


def test_a_rendered_message_is_answered_as_the_message_is(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    fields = {"max_tokens": 8, "messages": HELLO, "system": "Be brief.", "temperature": 0}
    expected = right(post(cluster, "/v1/messages", **fields))
    rendered = right(post(cluster, "/v1/messages/render", **fields))
    assert rendered["request_id"].startswith("msg-")
    answer = right(post(cluster, "/inference/v1/generate", **rendered))
    (choice,) = answer["choices"]
    assert tokenizer.decode(choice["token_ids"]) == "".join(each["text"] for each in expected["content"])
    assert answer["usage"]["prompt_tokens"] == sum(
        expected["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )
    assert post(cluster, "/v1/messages/render", messages=HELLO).json()["type"] == "error", "expected Anthropic's shape"


def test_rendered_items_are_answered_as_they_are(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    fields = {"input": HELLO, "instructions": "Be brief.", "max_output_tokens": 8, "temperature": 0}
    expected = right(post(cluster, "/v1/responses", **fields))
    rendered = right(post(cluster, "/v1/responses/render", **fields))
    assert rendered["request_id"].startswith("resp-")
    (choice,) = right(post(cluster, "/inference/v1/generate", **rendered))["choices"]
    assert tokenizer.decode(choice["token_ids"]) == expected["output"][0]["content"][0]["text"]


def test_raw_messages_of_a_response(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    fields = {"input": HELLO, "max_output_tokens": 6, "temperature": 0}
    rendered = right(post(cluster, "/v1/responses/render", **fields))
    (choice,) = right(post(cluster, "/inference/v1/generate", **rendered))["choices"]
    answer = right(post(cluster, "/v1/responses", **fields, enable_response_messages=True))
    events = post(cluster, "/v1/responses", **fields, enable_response_messages=True, stream=True).text
    last = json.loads([line for line in events.splitlines() if line.startswith("data: ")][-1].removeprefix("data: "))
    for response in (answer, last["response"]):
        for name, ids in (("input_messages", rendered["token_ids"]), ("output_messages", choice["token_ids"])):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            assert response[name] == [{"type": "raw_message_tokens", "message": text, "tokens": ids}]
    assert "input_messages" not in right(post(cluster, "/v1/responses", **fields))
    error = refused(post(cluster, "/v1/responses", **fields, enable_response_messages=True, include_reasoning=False))
    assert error["param"] == "enable_response_messages"


def test_tokens_say_where_they_stand(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    texts = ["Zürich is ☀ nice", "b"]
    for each, text in zip(
        right(post(cluster, "/v1/completions/render", prompt=texts, return_token_offsets=True)), texts, strict=True
    ):
        ids, offsets = each["token_ids"], each["token_offsets"]
        assert len(offsets) == len(ids)
        assert {place for first, stop in offsets for place in range(first, stop)} == set(range(len(text)))
        for token_id, (first, stop) in zip(ids, offsets, strict=True):
            assert len(tokenizer.token_bytes(token_id)) < 2 or tokenizer.decode([token_id]) == text[first:stop]
    cut = {"prompt": texts[0], "truncate_prompt_tokens": 4, "return_token_offsets": True, "max_tokens": 1}
    (short,) = right(post(cluster, "/v1/completions/render", **cut))
    (whole,) = right(post(cluster, "/v1/completions/render", prompt=texts[0], return_token_offsets=True))
    assert short["token_offsets"] == whole["token_offsets"][-4:]
    chat = right(post(cluster, "/v1/chat/completions/render", messages=HELLO, return_token_offsets=True))
    places = chat["token_offsets"]
    assert len(places) == len(chat["token_ids"])
    assert places == sorted(places)
    (of_ids,) = right(post(cluster, "/v1/completions/render", prompt=[5, 6], return_token_offsets=True))
    assert of_ids["token_offsets"] is None
    right(post(cluster, "/inference/v1/generate", **chat))


@pytest.mark.parametrize("more", [{}, {"stop": ["e"], "min_tokens": 2}, {"logprobs": 1}])
def test_text_of_generated_tokens(cluster: LiveCluster, more: dict[str, Any]) -> None:
    fields = {**GREEDY, "max_tokens": 12, **more}
    (expected,) = right(post(cluster, "/v1/completions", prompt=[7, 8, 9], **fields))["choices"]
    body = {"token_ids": [7, 8, 9], "sampling_params": fields, "output_mode": "text"}
    answer = right(post(cluster, "/inference/v1/generate", **body))
    (choice,) = answer["choices"]
    assert (answer["output_mode"], choice["text"]) == ("text", expected["text"])
    chunks = chunks_of(post(cluster, "/inference/v1/generate", **body, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected["text"]
    if "logprobs" in more:
        assert [each["token"] for each in choice["logprobs"]["content"]] == expected["logprobs"]["tokens"]
    error = refused(post(cluster, "/inference/v1/generate", **{**body, "output_mode": "derender"}))
    assert (error["param"], "/v1/chat/completions/derender" in error["message"]) == ("output_mode", True)


SCENARIOS = [each for each in QWEN3.answers if each not in ("a function's tag",)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_derendered_chat_is_the_chat(scripted: LiveCluster, scripted_model: Path, scenario: str) -> None:
    """Token ids are parsed into calls, reasoning and content as in the original chat."""
    asked = QWEN3.ask(scripted_model, scenario, [{"role": "user", "content": "How is the weather?"}], tools=[WEATHER])
    chat = {"messages": asked, "tools": [WEATHER], "temperature": 0, "max_tokens": 80}
    expected = right(post(scripted, "/v1/chat/completions", **chat))
    rendered = right(post(scripted, "/v1/chat/completions/render", **chat))
    generated = right(post(scripted, "/inference/v1/generate", **rendered))
    body = {"generate_response": generated, "chat_request": chat}
    answer = right(post(scripted, "/v1/chat/completions/derender", **body))
    assert answer["id"] == generated["request_id"]
    assert without_ids(answer) == without_ids(expected)


@pytest.mark.parametrize(
    "more", [{}, {"n": 2, "temperature": 1.0, "seed": 3}, {"stop": ["e"]}, {"logprobs": True, "top_logprobs": 2}]
)
def test_a_derendered_chat_keeps_its_parameters(cluster: LiveCluster, more: dict[str, Any]) -> None:
    chat = {"messages": HELLO, "max_tokens": 12, "temperature": 0, **more}
    expected = right(post(cluster, "/v1/chat/completions", **chat))
    rendered = right(post(cluster, "/v1/chat/completions/render", **chat))
    body = {"generate_response": right(post(cluster, "/inference/v1/generate", **rendered)), "chat_request": chat}
    assert without_ids(right(post(cluster, "/v1/chat/completions/derender", **body))) == without_ids(expected)


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1.0, "seed": 3}, {"logprobs": 2}])
def test_derendered_completions_are_the_completions(cluster: LiveCluster, more: dict[str, Any]) -> None:
    text = {"prompt": ["The sea", "Stones"], "max_tokens": 10, "temperature": 0, **more}
    expected = right(post(cluster, "/v1/completions", **text))
    prompts = right(post(cluster, "/v1/completions/render", **text))
    generated = [right(post(cluster, "/inference/v1/generate", **each)) for each in prompts]
    body = {"generate_responses": generated, "completion_request": text}
    answer = right(post(cluster, "/v1/completions/derender", **body))
    assert without_ids(answer) == without_ids(expected)
    counted = right(post(cluster, "/v1/completions/derender", **body, prompt_tokens=[1, 2]))
    assert counted["usage"]["prompt_tokens"] == 3


OF_THREE = {"request_id": "r", "choices": [{"index": 0, "token_ids": [5, 6, 7], "finish_reason": "length"}]}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"stream": True}, 'output_mode "text"'),
        ({"chat_request": None}, "chat_request"),
        ({"generate_response": {"choices": []}}, "generate_response"),
        ({"generate_response": {"choices": [{"index": 0, "token_ids": [1 << 20]}]}}, "ids must be in 0 to"),
        ({"generate_response": {"choices": [{"index": 1, "token_ids": [5]}]}}, "indices must be 0 to 0"),
        ({"generate_response": {"choices": [{"index": 0, "token_ids": [5] * 300}]}}, "at most 256"),
        ({"generate_response": {**OF_THREE, "output_mode": "text"}}, "output_mode"),
        ({"prompt_token_ids": [1 << 20]}, "prompt_token_ids"),
    ],
)
def test_derender_refuses_by_name(cluster: LiveCluster, more: dict[str, Any], says: str) -> None:
    body = {"generate_response": OF_THREE, "chat_request": {"messages": HELLO}, **more}
    assert says in refused(post(cluster, "/v1/chat/completions/derender", **body))["message"]


@pytest.mark.parametrize(
    ("method", "path", "way_out"),
    [
        ("POST", "/cohere/v2/chat", "/v1/chat/completions"),
        ("POST", "/adapters", "admin port"),
        ("DELETE", "/adapters/a/b", "admin port"),
        ("POST", "/v1/load_lora_adapter", "admin port"),
        ("POST", "/inference/v1/abort_requests", "admin port"),
    ],
)
def test_routes_that_are_not_here_say_where_to_go(cluster: LiveCluster, method: str, path: str, way_out: str) -> None:
    answer = cluster.client.request(method, f"{cluster.url}{path}", json={})
    assert answer.status_code == 404
    assert path in answer.json()["error"]["message"]
    assert way_out in answer.json()["error"]["message"]
