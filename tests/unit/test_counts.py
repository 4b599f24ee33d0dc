"""Routes that count a prompt's tokens refuse the same requests as the computing routes, with the same messages."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI

from pd_cluster.settings.request_settings import ChatConfig
from tests.support.checkpoints import TEMPLATE
from tests.support.public_port import MAX_MODEL_LEN, ask, make_app

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNTS = {RESPONSES: "/v1/responses/input_tokens", MESSAGES: "/v1/messages/count_tokens"}
GOOD: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    chat = ChatConfig(tool_parser="hermes", template=TEMPLATE + "{{ tools }}")
    return make_app(tmp_path_factory.mktemp("counts"), chat=chat)[0]


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "see"}, "tools": [LOOK]}, "tool_choice"),
        (RESPONSES, {"tools": [LOOK, LOOK]}, "tools"),
        (RESPONSES, {"include": LOGPROBS, "top_logprobs": 21}, "top_logprobs"),
        (RESPONSES, {"logit_bias": {"5000": 1}}, "logit_bias"),
        (RESPONSES, {"max_output_tokens": MAX_MODEL_LEN + 1}, "max_output_tokens"),
        (RESPONSES, {"store": True}, "store"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "see"}, "tools": [TOOL]}, "tool_choice"),
        (MESSAGES, {"tools": [TOOL, TOOL]}, "tools"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"container": "c"}, "container"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences"),
    ],
)
def test_what_is_refused_is_not_counted(app: FastAPI, route: str, fields: dict[str, Any], param: str) -> None:
    body = GOOD[route] | fields
    made, counted = (ask(app, "POST", path, [], body) for path in (route, COUNTS[route]))
    assert (made.status, counted.status) == (400, 400), counted.body
    assert made.json() == counted.json()
    assert param in counted.json()["error"]["message"]


@pytest.mark.parametrize("route", COUNTS)
def test_what_is_valid_is_counted(app: FastAPI, route: str) -> None:
    """Valid requests are counted; to compute them would be a 503, because there is no instance."""
    assert ask(app, "POST", route, [], GOOD[route]).status == 503
    told = ask(
        app, "POST", COUNTS[route], [], {**GOOD[route], "max_tokens": None} if route == MESSAGES else GOOD[route]
    )
    assert (told.status, told.json()["input_tokens"] > 0) == (200, True)


@pytest.mark.parametrize("route", COUNTS)
def test_a_prompt_beyond_the_context_is_counted(app: FastAPI, route: str) -> None:
    """Clients count tokens of a too long prompt in order to shorten it."""
    long = "hello " * MAX_MODEL_LEN
    body = {"input": long} if route == RESPONSES else GOOD[route] | {"messages": [{"role": "user", "content": long}]}
    assert "too long" in ask(app, "POST", route, [], body).json()["error"]["message"]
    assert ask(app, "POST", COUNTS[route], [], body).json()["input_tokens"] > MAX_MODEL_LEN
