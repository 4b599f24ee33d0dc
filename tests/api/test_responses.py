"""OpenAI's client at /v1/responses; the client's own types validate answers and events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.test_tools import ASKED
from tests.api.test_tools import WEATHER as SHOWN
from tests.support.cluster import LiveCluster
from tests.support.scripted_scenarios import FAMILIES

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HELLO: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 12, "temperature": 0}
WEATHER: dict[str, Any] = {"type": "function", **SHOWN["function"]}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
FAMILY = FAMILIES["qwen3"]
VLLMS: dict[str, Any] = {
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 2.0,
    "logit_bias": {"5": 100.0},
    "stop_token_ids": [5],
    "skip_special_tokens": False,
    "structured_outputs": {"choice": ["yes", "no"]},
}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(cluster: LiveCluster) -> Iterator[None]:
    yield
    cluster.assert_home()


def events_of(cluster: LiveCluster, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a stream's events; asserts that each is valid for the client and has its own event name."""
    answer = cluster.client.post(f"{cluster.url}/v1/responses", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    *events, end = answer.text.split("\n\n")
    assert end == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        each = json.loads(data.removeprefix("data: "))
        assert name == f"event: {each['type']}"
        validate(each)
        found.append(each)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def validate(event: dict[str, Any]) -> None:
    """Validates by the client's types, which would accept unknown fields, so asserts that there are none."""
    made = EVENT.validate_python(event)
    assert made.type == event["type"]
    assert not unknown(made), unknown(made)


def unknown(model: Any) -> list[str]:
    """Returns fields, at any depth, that the client's types lack, except within free-form values such as schemas."""
    if isinstance(model, list):
        return [name for each in model for name in unknown(each)]
    if not hasattr(model, "model_extra"):
        return []
    own = [f"{type(model).__name__}.{name}" for name in model.model_extra or {} if name not in ("store",)]
    return own + [name for each in model.__dict__.values() for name in unknown(each)]


class Speaker:
    """A model with scripted scenarios."""

    def __init__(self, folder: Path, cluster: LiveCluster) -> None:
        self._folder, self.cluster = folder, cluster

    def fields(self, scenario: str, tools: bool = False, **more: Any) -> dict[str, Any]:
        messages = FAMILY.ask(self._folder, scenario, ASKED, **({"tools": [SHOWN]} if tools else {}))
        asked = {"model": "tiny", "input": messages, "temperature": 0, "max_output_tokens": 200}
        return {**asked, **({"tools": [WEATHER]} if tools else {}), **more}

    def response(self, scenario: str, tools: bool = False, **more: Any) -> Response:
        """Returns the response, after asserting that the streamed one's last event is equal."""
        body = self.fields(scenario, tools, **more)
        answer = self.cluster.client.post(f"{self.cluster.url}/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        whole = answer.json()
        events = events_of(self.cluster, body)
        assert without_ids(events[-1]["response"]) == without_ids(whole)
        added = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert added == events[-1]["response"]["output"]
        response = Response.model_validate(whole)
        assert not unknown(response), unknown(response)
        return response


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    times = ("id", "created_at", "completed_at", "usage", "output")
    usage = {name: response["usage"][name] for name in ("output_tokens", "output_tokens_details", "total_tokens")}
    return {**{name: value for name, value in response.items() if name not in times}, "output": output, "usage": usage}


@pytest.fixture(scope="module")
def speaker(scripted_model: Path, scripted: LiveCluster) -> Iterator[Speaker]:
    yield Speaker(scripted_model, scripted)
    scripted.assert_home()


# ---- text


def test_a_response_is_the_chats_answer(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    response = client.responses.create(**HELLO)
    assert response.output_text == chat.choices[0].message.content
    is_cut = chat.choices[0].finish_reason == "length"
    assert response.status == ("incomplete" if is_cut else "completed")
    assert response.id.startswith("resp_")
    assert chat.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    with client.responses.stream(**HELLO) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == response.output_text
    assert len(texts) > 3


def test_logprobs_of_a_text_are_the_chats(cluster: LiveCluster, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    options: Any = {"model": "tiny", "temperature": 0, "logprobs": True, "top_logprobs": 2}
    chat = client.chat.completions.create(messages=messages, max_tokens=12, **options)
    assert chat.choices[0].logprobs is not None
    wanted = [each.to_dict() for each in chat.choices[0].logprobs.content or []]
    if chat.choices[0].finish_reason == "stop":
        wanted.pop()  # the end token is not part of the text
    response = client.responses.create(**HELLO, **LOGPROBS)
    (item,) = response.output
    assert item.type == "message"
    part = item.content[0]
    assert part.type == "output_text"
    assert [each.to_dict() for each in part.logprobs or []] == wanted
    assert len(wanted) > 3
    assert response.top_logprobs == 2
    events = events_of(cluster, {**HELLO, **LOGPROBS})
    told = [entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert [(each["token"], each["logprob"]) for each in told] == [(each["token"], each["logprob"]) for each in wanted]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == told
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == wanted


def test_the_tokens_of_an_input_are_those_of_its_prompt(speaker: Speaker, client: openai.OpenAI) -> None:
    url, http = f"{speaker.cluster.url}/v1/responses", speaker.cluster.client
    for fields in ({"input": "hello"}, {"input": "hello", "instructions": "Be brief.", "tools": [WEATHER]}):
        told = http.post(f"{url}/input_tokens", json={"model": "tiny", **fields}).json()
        usage = http.post(url, json={"model": "tiny", "max_output_tokens": 1, **fields}).json()["usage"]
        assert told == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    count = client.responses.input_tokens.count
    assert count(model="tiny", instructions="Be brief.").input_tokens > count(model="tiny").input_tokens > 0
    with pytest.raises(openai.BadRequestError, match="personality: 'friendly'"):
        count(model="tiny", input="hello", personality="friendly")
    with pytest.raises(openai.BadRequestError, match="compact: not supported"):
        client.responses.compact(model="tiny", input="hello")


def test_the_order_of_events(cluster: LiveCluster) -> None:
    events = events_of(cluster, {**HELLO, "ignore_eos": True})
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    last = events[-1]["response"]
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["output"]] == ["incomplete"]


def test_items_are_the_chats_messages(speaker: Speaker) -> None:
    """Reasoning, text, a call and its output become one message of the model and one of the tool."""
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city":"Berlin"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
        {"role": "user", "content": "b"},
    ]
    function = {"name": "get_weather", "arguments": '{"city":"Berlin"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    chat = [
        {"role": "system", "content": "s\nd"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "look", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": "b"},
    ]
    url, http = speaker.cluster.url, speaker.cluster.client
    wanted = http.post(f"{url}/tokenize", json={"messages": chat, "tools": [SHOWN]}).json()["count"]
    body = {"input": items, "instructions": "s", "tools": [WEATHER], "max_output_tokens": 1}
    assert http.post(f"{url}/v1/responses", json=body).json()["usage"]["input_tokens"] == wanted


# ---- tools and reasoning


def test_a_call_after_text(speaker: Speaker) -> None:
    response = speaker.response("a call after content", tools=True)
    text, call = response.output
    assert text.type == "message"
    assert response.output_text.strip() == "I will look."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Berlin"})
    assert call.call_id != call.id
    assert response.status == "completed"


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
)
def test_a_forced_call_follows_the_schema(speaker: Speaker, choice: Any) -> None:
    other = {"type": "function", "name": "other", "parameters": {"type": "object", "properties": {}}}
    tools = [WEATHER] if choice == "required" else [other, WEATHER]
    body = {**HELLO, "max_output_tokens": 300, "tools": tools, "tool_choice": choice}
    whole = speaker.cluster.client.post(f"{speaker.cluster.url}/v1/responses", json=body).json()
    call = whole["output"][-1]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    if whole["status"] == "completed":
        assert json.loads(call["arguments"])["city"] in ("Berlin", "Paris")


def test_functions_of_a_namespace(speaker: Speaker) -> None:
    """The model sees namespace and function as one name; calls return them separately, and are accepted so."""
    sky = {"type": "namespace", "name": "sky", "description": "Above", "tools": [WEATHER]}
    url, http = f"{speaker.cluster.url}/v1/responses", speaker.cluster.client
    body = {**HELLO, "max_output_tokens": 300, "tools": [sky], "tool_choice": "required"}
    whole = http.post(url, json=body).json()
    call = whole["output"][-1]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "sky", "get_weather")
    response = Response.model_validate(whole)
    assert not unknown(response)
    assert whole["tools"] == [sky]
    events = events_of(speaker.cluster, body)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(item["namespace"], item["name"]) for item in added if item["type"] == "function_call"] == [
        ("sky", "get_weather")
    ]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    items = [{"role": "user", "content": "hello"}, call, output]
    flat = {**WEATHER, "name": "sky__get_weather"}
    known = [{**each, "namespace": None, "name": "sky__get_weather"} if each is call else each for each in items]
    counts = [
        http.post(url, json={**HELLO, "input": given, "tools": [tool], "max_output_tokens": 1}).json()["usage"]
        for given, tool in ((items, sky), (known, flat))
    ]
    assert counts[0]["input_tokens"] == counts[1]["input_tokens"]


def test_reasoning_is_an_item_of_its_own(speaker: Speaker) -> None:
    response = speaker.response("reasoning, content")
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text.strip() == "They ask for the sun."
    assert message.type == "message"
    assert response.output_text == "It shines."
    assert response.usage is not None
    num_reasoning = response.usage.output_tokens_details.reasoning_tokens
    assert len("They ask for the sun.") < num_reasoning <= response.usage.output_tokens - len("It shines.")
    kinds = [item.type for item in speaker.response("reasoning, a call", tools=True).output]
    assert kinds == ["reasoning", "function_call"]
    assert [item.type for item in speaker.response("reasoning, content", include_reasoning=False).output] == ["message"]


# ---- failures


REFUSED: dict[str, dict[str, Any]] = {  # beginning of the message -> request
    "input[0]": {"input": [{"type": "computer_call"}]},
    "input[0].content[0]": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    "input": {"input": "x" * 5000},
    "tools.0": {"tools": [{"type": "web_search"}]},
    "tool_choice": {"tool_choice": "required"},
    "text.format": {"text": {"format": {"type": "json_schema", "name": "a"}}},
    "background": {"background": True},
    "top_logprobs: needs include": {"top_logprobs": 2},
    "structured_outputs": {"structured_outputs": {"regex": "("}},
    "kv_transfer_params": {"kv_transfer_params": {"do_remote_decode": True}},
    "vllm_xargs": {"vllm_xargs": {"a": 1}},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(cluster: LiveCluster, named: str) -> None:
    for stream in (False, True):
        body = {**HELLO, **REFUSED[named], "stream": stream}
        answer = cluster.client.post(f"{cluster.url}/v1/responses", json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert [error["param"]] == [*REFUSED[named]]
        assert error["message"].startswith(named)


def test_vllms_parameters_mean_what_they_mean_in_a_chat(cluster: LiveCluster) -> None:
    def text(**fields: Any) -> Any:
        return cluster.ask("/v1/responses", {**HELLO, **fields})["output"][0]["content"][0]["text"]

    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}
    plain, found = text(), set()
    for name, value in VLLMS.items():
        given = text(**{name: value})
        of_chat = cluster.ask("/v1/chat/completions", {**chat, name: value})["choices"][0]["message"]["content"]
        assert given == of_chat, name
        found |= {name} if given != plain else set()
    assert found >= {"structured_outputs", "logit_bias", "repetition_penalty"}


def test_a_request_is_known_by_its_own_name(cluster: LiveCluster) -> None:
    """A client's request id is used, but the response's id stays the server's, because stored responses need it."""
    for given, name in (("mine", "resp_mine"), ("resp_yours", "resp_yours")):
        answer = cluster.client.post(f"{cluster.url}/v1/responses", json={**HELLO, "request_id": given})
        assert answer.json()["id"] != name
        assert cluster.client.get(f"{cluster.admin_url}/requests/{name}/timeline").status_code == 200


def test_nothing_is_kept_without_a_store(client: openai.OpenAI, cluster: LiveCluster) -> None:
    assert cluster.client.post(f"{cluster.url}/v1/responses", json=HELLO).json()["store"] is False
    for fields in ({"store": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**HELLO, **fields)  # type: ignore[call-overload]
        assert caught.value.param in fields
    client.responses.create(**HELLO, store=False)
