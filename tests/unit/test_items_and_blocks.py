"""Fields of items in /v1/responses and of blocks in /v1/messages have an effect, or are refused by their path."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.messages.messages_protocol import MessagesPrompt
from pd_cluster.service.schema.messages.messages_to_chat import chat_of as chat_of_messages
from pd_cluster.service.schema.request_parsing import checked
from pd_cluster.service.schema.responses.responses_items import items_of, listed
from pd_cluster.service.schema.responses.responses_protocol import ResponsesRequest
from pd_cluster.service.schema.responses.responses_to_chat import chat_of as chat_of_response

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "a"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "a"}
TEXT = {"type": "text", "text": "a"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
PROGRAM = {"type": "program", "caller_id": "p"}


def messages_of_response(*items: Any) -> list[dict[str, Any]]:
    request = checked({"input": [*items]}, ResponsesRequest, has_own_names=True)
    chat = chat_of_response(request, [], frozenset())
    return [message.model_dump(exclude_unset=True) for message in chat.messages]


def messages_of_turn(role: str, *blocks: Any, **fields: Any) -> list[dict[str, Any]]:
    turns = [{"role": role, "content": [*blocks], **fields}, {"role": "user", "content": "b"}]
    request = checked({"messages": turns}, MessagesPrompt, has_own_names=True)
    chat = chat_of_messages(request, frozenset(), False)
    return [message.model_dump(exclude_unset=True) for message in chat.messages]


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": kind, **fields}]}


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"type": "item_reference", "id": "rs_1"}, "an item of type 'item_reference' .*previous_response_id"),
        ({"id": "rs_1", "type": None}, "an item of type 'item_reference'"),
        ({"type": ["message"]}, "an item of type"),
        ({"role": "user"}, ".content: must be a string or a list of parts"),
        (part("input_image"), r".content\[0\].image_url: "),
        (part("input_text", text=5), r".content\[0\].text: 5: "),
        ({"role": "user", "content": ["a"]}, r".content\[0\]: a part of type None"),
        ({**CALL, "arguments": {}}, ".arguments: "),
    ],
)
def test_an_item_that_asks_for_more_is_refused(item: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=rf"^input\[1\](: )?{said}") as caught:
        messages_of_response({"role": "user", "content": "a"}, item)
    assert caught.value.param == "input"


def test_what_items_say_beside_changes_nothing() -> None:
    ids = {"id": "i", "status": "completed"}
    plain = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, CALL, OUTPUT]
    shown = {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
    more = [
        {**ids, "type": "message", "role": "user", "content": [shown], "phase": None},
        {**CALL, **ids, "caller": PROGRAM, "async": False, "namespace": None},
        {**OUTPUT, **ids, "caller": PROGRAM, "name": "f", "namespace": None},
    ]
    assert messages_of_response(*more) == messages_of_response(*plain)
    beside = {"annotations": [{"type": "url_citation"}], "logprobs": [{"token": "a"}]}
    said = [{"type": "output_text", "text": "a", **beside}]
    told = [{"role": "assistant", "content": said, "phase": "final_answer"}]
    assert messages_of_response(*told) == messages_of_response({"role": "assistant", "content": "a"})


def test_reasoning_that_can_be_read_is() -> None:
    """Uses the reasoning's text, otherwise its summary; ignores encrypted content beside them, which repeats it."""
    text, summary = [{"type": "reasoning_text", "text": "t"}], [{"type": "summary_text", "text": "s"}]
    for fields, wanted in (({"content": text, "summary": summary}, "t"), ({"content": None, "summary": summary}, "s")):
        (found,) = messages_of_response({"type": "reasoning", "encrypted_content": "x", **fields})
        assert found["reasoning_content"] == wanted
    assert messages_of_response({"type": "reasoning", "summary": []})[0]["reasoning_content"] == ""


def test_what_another_server_hid_is_left_out() -> None:
    """Another server's encrypted reasoning is omitted without an error, because clients must send it back."""
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert messages_of_response(question, hidden, answer) == messages_of_response(question, answer)
    redacted = {"type": "redacted_thinking", "data": "x"}
    assert messages_of_turn("assistant", redacted, TEXT) == messages_of_turn("assistant", TEXT)


def test_items_without_a_type_are_listed_with_it() -> None:
    request = checked({"input": [{"role": "user", "content": "a", "type": None}]}, ResponsesRequest)
    (found,) = listed(items_of(request))
    assert (found["type"], found["content"]) == ("message", [{"type": "input_text", "text": "a"}])


@pytest.mark.parametrize(
    ("role", "block", "said"),
    [
        ("user", {"type": "redacted_thinking", "data": "x"}, ": a block of type 'redacted_thinking' .*not allowed"),
        ("user", {"type": "made_up"}, ": a block of type 'made_up' is not supported here; send its text"),
        ("assistant", IMAGE, ": a block of type 'image' .*not allowed here"),
        ("user", {**IMAGE, "source": {"type": "file", "file_id": "f"}}, ".source: a source of type 'file' .*not kept"),
        (
            "user",
            {**IMAGE, "transformations": {"oversized_image": "error"}},
            ".transformations.oversized_image: 'error'",
        ),
        (
            "user",
            {**RESULT, "content": [{"type": "tool_reference"}]},
            r".content\[0\]: a block of type 'tool_reference'",
        ),
        ("user", {**RESULT, "content": 5}, ".content: must be"),
    ],
)
def test_a_block_that_asks_for_more_is_refused(role: str, block: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=rf"^messages\[0\].content\[1\]{said}") as caught:
        messages_of_turn(role, TEXT, block)
    assert caught.value.param == "messages"


def test_what_blocks_say_beside_changes_nothing() -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    for role, plain, more in (
        ("user", TEXT, {"citations": None}),
        ("user", IMAGE, {"transformations": {"oversized_image": "downsize"}}),
        ("user", RESULT, {"toolset_name": None, "is_error": False}),
        ("assistant", TEXT, {"citations": [{"type": "char_location"}]}),
        ("assistant", USE, {"caller": {"type": "code_execution_20250825"}, "toolset_name": None}),
        ("assistant", {"type": "thinking", "thinking": "a"}, {"signature": "x"}),
    ):
        assert messages_of_turn(role, {**plain, **cached, **more}) == messages_of_turn(role, plain)


@pytest.mark.parametrize(("field", "given"), [("clear_at", "next_user_message"), ("output_config", {"effort": "low"})])
def test_a_turns_own_settings_are_refused(field: str, given: Any) -> None:
    with pytest.raises(RequestError, match=rf"^messages\.0\.{field}: "):
        messages_of_turn("system", TEXT, **{field: given})
    empty = dict.fromkeys(given) if isinstance(given, dict) else None
    assert messages_of_turn("system", TEXT, **{field: empty}) == messages_of_turn("system", TEXT)
    assert messages_of_turn("system", TEXT, clear_at="never", output_config={})


def test_vllms_fields_of_messages_are_those_of_a_chat() -> None:
    turns = [{"role": "user", "content": "a"}]
    given = {"cache_salt": "s", "chat_template_kwargs": {"enable_thinking": False, "lang": "de"}, "speculative": False}
    given["vllm_xargs"] = {"a": 1}
    wanted = {"messages": turns, **given, "thinking": {"type": "disabled"}}
    request = checked(wanted, MessagesPrompt, has_own_names=True)
    chat = chat_of_messages(request, frozenset({"enable_thinking"}), True)
    assert {name: getattr(chat, name) for name in given} == given
    for name in ("kv_transfer_params", "ec_transfer_params"):
        with pytest.raises(RequestError, match=name):
            checked({"messages": turns, name: {"a": 1}}, MessagesPrompt, has_own_names=True)
