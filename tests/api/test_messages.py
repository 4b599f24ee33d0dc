"""Anthropic's unmodified Python client against the cluster: text, tools, thinking, streams, counts and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pd_cluster.text.tokenizer import Tokenizer
from tests.api.test_tools import ASKED
from tests.api.test_tools import WEATHER as SHOWN
from tests.support.cluster import LiveCluster
from tests.support.scripted_scenarios import FAMILIES

HELLO: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "hello"}]}
FUNCTION = SHOWN["function"]
WEATHER = {name: FUNCTION[name] for name in ("name", "description")} | {"input_schema": FUNCTION["parameters"]}
FAMILY = FAMILIES["qwen3"]


def client_of(cluster: LiveCluster, **more: Any) -> Any:
    import anthropic  # its import takes seconds

    return anthropic.Anthropic(**{"base_url": cluster.url, "api_key": "none", "max_retries": 0, "timeout": 60, **more})


@pytest.fixture(scope="module")
def ours(cluster: LiveCluster) -> Iterator[Any]:
    """Yields the client; asserts after the last test that the cluster holds nothing."""
    with client_of(cluster) as made:
        yield made
    cluster.assert_home()


class Speaker:
    """A client of a model with scripted scenarios."""

    def __init__(self, folder: Path, client: Any) -> None:
        self._folder = folder
        self.client = client

    def fields(self, scenario: str, tools: bool = False, **more: Any) -> dict[str, Any]:
        """Returns the request for a scenario. The prompt's length, tools included, selects the answer."""
        shown = {"tools": [SHOWN]} if tools else {}
        messages = FAMILY.ask(self._folder, scenario, ASKED, **shown)
        return {
            "model": "tiny",
            "max_tokens": 200,
            "messages": messages,
            **({"tools": [WEATHER]} if tools else {}),
            **more,
        }

    def message(self, scenario: str, tools: bool = False, **more: Any) -> Any:
        """Returns the message, after asserting that the streamed one is equal."""
        asked = {**self.fields(scenario, tools, **more), "temperature": 0}
        temperature = {"extra_body": {"temperature": asked.pop("temperature")}}
        whole = self.client.messages.create(**asked, **temperature)
        with self.client.messages.stream(**asked, **temperature) as stream:
            streamed = stream.get_final_message()
        assert without_ids(streamed) == without_ids(whole)
        return whole


def without_ids(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = message.model_dump(exclude={"id", "usage"}, exclude_none=True)
    for block in found["content"]:
        block.pop("id", None)
    return {**found, "output_tokens": message.usage.output_tokens, "of": message.usage.output_tokens_details}


@pytest.fixture(scope="module")
def speaker(scripted_model: Path, scripted: LiveCluster) -> Iterator[Speaker]:
    with client_of(scripted) as client:
        yield Speaker(scripted_model, client)
    scripted.assert_home()


# ---- text


def test_a_message_is_the_chats_answer(ours: Any, client: openai.OpenAI) -> None:
    """Prompt and tokens equal those of /v1/chat/completions, with and without streaming."""
    chat = client.chat.completions.create(**HELLO, temperature=0)  # type: ignore[call-overload]
    message = ours.messages.create(**HELLO, extra_body={"temperature": 0})
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == chat.choices[0].message.content
    assert message.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[chat.choices[0].finish_reason]
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
    assert usage.output_tokens == chat.usage.completion_tokens
    assert usage.output_tokens_details.thinking_tokens == 0
    with ours.messages.stream(**HELLO, extra_body={"temperature": 0}) as stream:
        texts = list(stream.text_stream)
    assert "".join(texts) == message.content[0].text
    assert len(texts) > 3


def test_the_order_of_events(cluster: LiveCluster) -> None:
    body = {**HELLO, "stream": True, "temperature": 0}
    answer = cluster.client.post(f"{cluster.url}/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.text.split("\n\n")
    assert end == ""
    lines = [event.split("\n") for event in events]
    data = [json.loads(line.removeprefix("data: ")) for _, line in lines]
    names = [each["type"] for each in data]
    assert [name for name, _ in lines] == [f"event: {name}" for name in names]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert answer.headers["request-id"] == data[0]["message"]["id"]


def test_a_system_prompt_blocks_and_turns(ours: Any, cluster: LiveCluster) -> None:
    """System prompt, blocks and turns become the chat's messages; adjacent ones of a role are merged."""
    text = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, text]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "content": "e"},
    ]
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    wanted = cluster.client.post(f"{cluster.url}/tokenize", json={"messages": chat}).json()["count"]
    fields = {"model": "tiny", "messages": turns, "system": [{"type": "text", "text": "s"}]}
    assert ours.messages.count_tokens(**fields).input_tokens == wanted
    assert total(ours.messages.create(**fields, max_tokens=1).usage) == wanted


def test_a_prefill_is_continued(ours: Any, client: openai.OpenAI) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "one, two,"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    chat = client.chat.completions.create(
        **{**HELLO, "messages": messages},  # type: ignore[arg-type]
        temperature=0,
        extra_body=extra,
    )
    message = ours.messages.create(**{**HELLO, "messages": messages}, extra_body={"temperature": 0})
    assert message.content[0].text == chat.choices[0].message.content


def test_a_stop_sequence(ours: Any) -> None:
    plain = ours.messages.create(**HELLO, extra_body={"temperature": 0})
    assert plain.stop_sequence is None
    stop = plain.content[0].text[3:5]
    message = ours.messages.create(**HELLO, stop_sequences=[stop], extra_body={"temperature": 0})
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == plain.content[0].text.partition(stop)[0]


# ---- cache usage


def marked(text: str, ttl: str | None = None) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})}


def usage_of(ours: Any, **fields: Any) -> Any:
    """Returns a message's usage, after asserting that a stream has the same at its start and end."""
    asked = {"model": "tiny", "max_tokens": 3, "extra_body": {"temperature": 0}, **fields}
    whole = ours.messages.create(**asked).usage
    *events, last = [event for event in ours.messages.create(**asked, stream=True) if getattr(event, "type", "")]
    found = [events[0].message.usage, next(event.usage for event in events if event.type == "message_delta")]
    assert last.type == "message_stop"
    for each in found:
        assert total(each) == total(whole)
        assert each.cache_read_input_tokens >= whole.cache_read_input_tokens  # the second time the prompt is cached
    assert found[0].model_dump()["cache_creation"] == found[1].model_dump()["cache_creation"]
    return whole


def total(usage: Any) -> int:
    assert sum(usage.model_dump()["cache_creation"].values()) == usage.cache_creation_input_tokens
    found: int = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    return found


def num_until(tokenizer: Tokenizer, cluster: LiveCluster, chat: list[dict[str, Any]], text: str) -> tuple[int, int]:
    """Returns a chat prompt's number of tokens up to the end of `text`, and in total."""
    ids = cluster.client.post(f"{cluster.url}/tokenize", json={"messages": chat}).json()["tokens"]
    return next(at for at in range(len(ids)) if text in tokenizer.decode(ids[:at], False)), len(ids)


def test_usage_counts_reads_writes_and_the_rest(ours: Any, cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    """Tokens up to the last cache_control count as read or written; the following ones as input."""
    system, asked = "read all of this first, " * 2, "then say what it was"
    chat = [{"role": "system", "content": system + "now"}, {"role": "user", "content": asked}]
    end, num_tokens = num_until(tokenizer, cluster, chat, system + "now")
    turns = [{"role": "user", "content": asked}]
    usage = usage_of(ours, system=[marked(system + "now")], messages=turns)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, end)
    assert total(usage) == num_tokens
    again = usage_of(ours, system=[marked(system + "now")], messages=turns)
    assert again.cache_read_input_tokens > 0
    assert again.cache_creation_input_tokens == max(0, end - again.cache_read_input_tokens)
    plain = usage_of(ours, system=system + "else", messages=turns)
    assert plain.cache_creation_input_tokens == 0
    assert plain.input_tokens == total(plain) - plain.cache_read_input_tokens > 0


def test_usage_counts_writes_by_their_ttl(ours: Any, cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "an hour of this\nminutes of that\nand none of these"}]
    ends = [num_until(tokenizer, cluster, chat, text)[0] for text in ("an hour of this", "minutes of that")]
    texts = [marked("an hour of this", "1h"), marked("minutes of that"), {"type": "text", "text": "and none of these"}]
    usage = usage_of(ours, messages=[{"role": "user", "content": texts}])
    written = usage.cache_creation
    assert usage.cache_read_input_tokens == 0
    assert [written.ephemeral_1h_input_tokens, usage.cache_creation_input_tokens] == ends
    assert total(usage) == num_until(tokenizer, cluster, chat, "none of these")[1]
    automatic = {"extra_body": {"temperature": 0, "cache_control": {"type": "ephemeral", "ttl": "1h"}}}
    turns = [{"role": "user", "content": "all, but for the end of the turn"}]
    usage = usage_of(ours, messages=turns, **automatic)
    assert usage.cache_creation_input_tokens == num_until(tokenizer, cluster, turns, "end of the turn")[0]
    assert usage.cache_creation.ephemeral_1h_input_tokens == usage.cache_creation_input_tokens
    body = {**HELLO, "cache_control": {"type": "ephemeral", "ttl": "2h"}}
    answer = cluster.client.post(f"{cluster.url}/v1/messages", json=body)
    assert (answer.status_code, "cache_control.ttl: '2h'" in answer.text) == (400, True)


def test_usage_of_tools_and_results(speaker: Speaker) -> None:
    """A cache_control on a tool, a call or a result is located in the rendered prompt."""
    call = {"type": "tool_use", "id": "t", "name": WEATHER["name"], "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "sun and wind"}
    end = {"cache_control": {"type": "ephemeral"}}
    written = []
    for at in range(3):
        tool = WEATHER | (end if at == 0 else {})
        turns = [
            *ASKED,
            {"role": "assistant", "content": [call | (end if at == 1 else {})]},
            {"role": "user", "content": [result | (end if at == 2 else {}), {"type": "text", "text": "so?"}]},
        ]
        asked = {"model": "tiny", "max_tokens": 2, "messages": turns, "tools": [tool]}
        usage = speaker.client.messages.create(**asked, extra_body={"cache_salt": str(at)}).usage
        assert usage.cache_read_input_tokens == 0
        written.append(usage.cache_creation_input_tokens)
        assert usage.input_tokens > 0
    assert 0 < written[0] < written[1] < written[2] < total(usage)


def test_openais_cached_tokens_and_cache_fields(client: openai.OpenAI, cluster: LiveCluster) -> None:
    asked: dict[str, Any] = {**HELLO, "messages": [{"role": "user", "content": "kept for a day or for a moment"}]}
    found = []
    for retention in ("24h", "in-memory", "in_memory"):
        more: Any = {"prompt_cache_key": "one", "extra_body": {"prompt_cache_retention": retention}}
        usage = client.chat.completions.create(**asked, **more).usage
        details = usage.prompt_tokens_details if usage else None
        assert details is not None
        found.append(details.cached_tokens)
    assert found[0] == 0
    assert 0 < found[1] == found[2]
    options = {"include_usage": True}
    *_, last = client.chat.completions.create(**asked, stream=True, stream_options=options, prompt_cache_key="one")
    assert last.usage.prompt_tokens_details.cached_tokens == found[1]
    body = {**asked, "prompt_cache_retention": "2d"}
    assert cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body).status_code == 400


# ---- tools and thinking


def test_a_call_after_text(speaker: Speaker) -> None:
    assert [block.type for block in speaker.message("reasoning, a call", tools=True).content] == [
        "thinking",
        "tool_use",
    ]
    message = speaker.message("a call after content", tools=True)
    text, call = message.content
    assert text.text.strip() == "I will look."
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Berlin"})
    assert call.id
    assert message.stop_reason == "tool_use"


def test_an_eager_tools_input_comes_in_pieces(speaker: Speaker) -> None:
    fields = speaker.fields("two calls", tools=True)
    for is_eager in (False, True):
        tools = [{**WEATHER, "eager_input_streaming": is_eager}]
        with speaker.client.messages.stream(**{**fields, "tools": tools}, extra_body={"temperature": 0}) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            inputs = [block.input for block in stream.get_final_message().content]
        assert inputs[0] == {"city": "Berlin"}
        assert (len(pieces) > 2 * len(inputs)) == is_eager


def test_results_go_back_to_the_model(speaker: Speaker) -> None:
    """A whole turn with a tool gives the same prompt as in a chat."""
    thinking = {"type": "thinking", "thinking": "I need a tool.", "signature": "unsigned"}
    call = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Berlin"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}
    turns = [
        *ASKED,
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "I will look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    function = {"name": "get_weather", "arguments": '{"city":"Berlin"}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    chat = [
        *ASKED,
        {"role": "assistant", "content": "I will look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "user", "content": "And?"},
    ]
    url, body = str(speaker.client.base_url).rstrip("/"), {"messages": chat, "tools": [SHOWN]}
    with httpx.Client(trust_env=False) as plain:
        wanted = plain.post(f"{url}/tokenize", json=body).raise_for_status().json()["count"]
    counted = speaker.client.messages.count_tokens(model="tiny", messages=turns, tools=[WEATHER])
    assert counted.input_tokens == wanted


def test_thinking_is_a_block_of_its_own(speaker: Speaker) -> None:
    message = speaker.message("reasoning, content")
    thinking, text = message.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", "They ask for the sun.")
    assert thinking.signature
    assert (text.text, message.stop_reason) == ("It shines.", "end_turn")
    num_thinking = message.usage.output_tokens_details.thinking_tokens
    assert len("They ask for the sun.") < num_thinking < message.usage.output_tokens - len("It shines.") + 1


def test_thinking_that_is_switched(speaker: Speaker) -> None:
    enabled = {"type": "enabled", "budget_tokens": 1024}
    omitted = speaker.message("reasoning, content", thinking={"type": "adaptive", "display": "omitted"})
    assert [(block.type, getattr(block, "thinking", None)) for block in omitted.content] == [
        ("thinking", ""),
        ("text", None),
    ]
    shown = speaker.client.messages.create(
        **speaker.fields("reasoning, content", thinking=enabled), extra_body={"temperature": 0}
    )
    assert [block.type for block in shown.content] == ["thinking", "text"]
    disabled = {"thinking": {"type": "disabled"}}
    counts = [
        speaker.client.messages.count_tokens(model="tiny", messages=ASKED, **more).input_tokens
        for more in ({}, disabled)
    ]
    assert counts[0] < counts[1]  # the template closes the thinking itself


# ---- errors


def test_errors_have_the_clients_classes(ours: Any, cluster: LiveCluster) -> None:
    import anthropic

    for fields, kind, name in (
        ({"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
    ):
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                ours.messages.create(**{**HELLO, **fields}, stream=stream)
            assert caught.value.type == name
            assert caught.value.body["type"] == "error"
    for path, status in (("messages", 405), ("messages/count_tokens", 405)):
        answer = cluster.client.get(f"{cluster.url}/v1/{path}")
        assert (answer.status_code, answer.json()["type"]) == (status, "error")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
SHOWING = [  # an image in a result, refused only by models without image support
    *ASKED,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]},
]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": SHOWING}, "messages[2].content[0].content[0]: this model takes no images"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": []}]}, "messages[1]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: 'web_search_20250305'"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {}}]}}, "context_management"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "output_config.format"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(cluster: LiveCluster, fields: dict[str, Any], named: str) -> None:
    answer = cluster.client.post(f"{cluster.url}/v1/messages", json={**HELLO, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(named)


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_clients_learn_that_no_conversation_is_kept(cluster: LiveCluster, thread: dict[str, Any]) -> None:
    """With these error details Anthropic's tool runner, which requests a thread by default, continues without one."""
    answer = cluster.client.post(f"{cluster.url}/v1/messages", json={**HELLO, "thread": thread})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith("thread: this server keeps no conversations")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_what_agents_send_beside_it(cluster: LiveCluster) -> None:
    """Thinking is never omitted, so requests to keep it all are accepted; a tool's description may be long."""
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}
    tool = {"name": "t", "description": "d" * 40_000, "input_schema": {"type": "object"}}
    greedy = {**HELLO, "temperature": 0}
    plain = cluster.client.post(f"{cluster.url}/v1/messages", json=greedy).json()
    body = {**greedy, "context_management": kept, "tools": [tool], "tool_choice": {"type": "none"}}
    answer = cluster.client.post(f"{cluster.url}/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == plain["content"]
    assert "citations" not in answer.json()["content"][0]  # the AI SDK rejects null


@pytest.mark.parametrize("route", ["messages", "messages/count_tokens"])
def test_what_newer_clients_ask_for_is_refused_by_name(cluster: LiveCluster, route: str) -> None:
    for fields in ({"compaction": {"type": "summarize"}}, {"output_config": {"task_budget": {"total": 20_000}}}):
        answer = cluster.client.post(f"{cluster.url}/v1/{route}", json={**HELLO, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(next(iter(fields)))
