"""/v1/responses without input, its token count and its compact route, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from pd_cluster.service.schema.error_bodies import MAX_BODY_NBYTES
from pd_cluster.service.schema.responses.responses_protocol import ResponsesRequest
from pd_cluster.service.schema.responses.responses_to_chat import chat_of
from pd_cluster.settings.request_settings import ChatConfig
from tests.support.checkpoints import TEMPLATE
from tests.support.public_port import ask, make_app

COUNT, COMPACT = "/v1/responses/input_tokens", "/v1/responses/compact"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    return make_app(tmp_path, chat=ChatConfig(tool_parser="hermes", template=TEMPLATE + "{{ tools }}"))[0]


def counted(app: FastAPI, **body: Any) -> int:
    answer = ask(app, "POST", COUNT, [], body)
    assert answer.status == 200, answer.body
    told = answer.json()
    assert told["object"] == "response.input_tokens"
    return int(told["input_tokens"])


def test_an_input_that_is_missing_counts_as_an_empty_one(app: FastAPI) -> None:
    """The client's type allows a missing input or None."""
    several: list[dict[str, Any]] = [{}, {"instructions": "Be brief."}, {"tools": [LOOK]}, {"model": "tiny"}]
    for fields in several:
        empty = counted(app, **fields, input="")
        assert counted(app, **fields) == counted(app, **fields, input=None) == empty
        assert counted(app, **fields, input="hi") > empty > 0
    answer = ask(app, "POST", "/v1/responses", [], {"instructions": "Be brief."})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "input"), "a response needs an input"


def test_what_cannot_be_counted_is_refused_by_name(app: FastAPI) -> None:
    wrong: list[tuple[str, Any]] = [
        *(("conversation", "c"), ("personality", "friendly"), ("truncation", "auto"), ("input", [])),
        *(("previous_response_id", "r"), ("tool_choice", {"type": "shell"}), ("reasoning", {"mode": "pro"})),
        *(("tools", [{**LOOK, "async": True}]), ("tools", [{**LOOK, "allowed_callers": ["programmatic"]}])),
    ]
    for param, value in wrong:
        answer = ask(app, "POST", COUNT, [], {"input": "hi", param: value})
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
        assert answer.json()["error"]["message"].startswith(param)


def test_what_changes_nothing_is_counted_all_the_same(app: FastAPI) -> None:
    plain = counted(app, input="hi", tools=[LOOK])
    tool = {**LOOK, "async": False, "allowed_callers": ["direct"], "output_schema": {"type": "string"}}
    reasoning = {"mode": "standard", "context": "all_turns", "generate_summary": "auto"}
    assert counted(app, input="hi", tools=[tool], reasoning=reasoning, personality=None) == plain


def test_a_conversation_is_in_order() -> None:
    """The order is instructions, items of earlier responses, the request's own items."""
    earlier = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}]
    request = ResponsesRequest.model_validate({"instructions": "rules", "input": "third", "speculative": False})
    chat = chat_of(request, earlier, frozenset())
    messages = chat.messages
    assert chat.speculative is False
    assert [message.role for message in messages] == ["system", "user", "assistant", "user"]
    texts = [json.dumps(message.content) for message in messages]
    assert [word in text for word, text in zip(("rules", "first", "second", "third"), texts, strict=True)] == [True] * 4


def test_compact_reads_what_it_refuses(app: FastAPI) -> None:
    """The body is read before the refusal, so that the connection can take the next request."""
    for body in (b"", b"{", b'{"model": "tiny", "input": "hi"}'):
        answer = ask(app, "POST", COMPACT, [], body)
        assert answer.status == 400
        assert "compact: not supported" in answer.json()["error"]["message"]
        assert answer.num_received == 1
    answer = ask(app, "POST", COMPACT, [], b"x" * (MAX_BODY_NBYTES + 1))
    assert answer.status == 413, "it must not read more than the body limit"
