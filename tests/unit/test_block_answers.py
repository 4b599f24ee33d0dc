"""Answers of /v1/responses and /v1/messages from scripted tokens: failures before and after the first event, aborts."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter

from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.routing.router import Router
from pd_cluster.errors import InstanceLost, PdClusterError, Unavailable
from pd_cluster.service.answers.answer_logprobs import LogprobsFormat
from pd_cluster.service.generation.text_sequence import TokenLogprobs
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.settings.request_settings import ChatConfig
from pd_cluster.settings.response_settings import KeptResponses
from pd_cluster.types import FinishReason, Logprobs, PromptOutput, RequestSpec, TokenOutput
from tests.support.checkpoints import EOS_ID, TEMPLATE, make_tokenizer
from tests.support.full_disks import full_disk
from tests.support.kept import ids_in
from tests.support.public_port import Answer, ask, make_app
from tests.support.router_world import admission_of

A, B, C = make_tokenizer().encode("abc").ids
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
LOST = InstanceLost("its worker died")


@cache
def event_type() -> TypeAdapter[Any]:
    from openai.types.responses import ResponseStreamEvent  # imported here because it takes a second

    return TypeAdapter(ResponseStreamEvent)


class Script:
    """A router that yields these tokens, and then fails or ends."""

    def __init__(self, tokens: list[int], end: FinishReason | PdClusterError, logprobs: Logprobs | None = None) -> None:
        self.membership = SimpleNamespace(instances=[])
        self.stats, self.num_streams = RequestStats(), 0
        self.admission = admission_of(self.stats)
        self._tokens, self._end, self._logprobs = tokens, end, logprobs

    async def serve(self, order: RequestSpec, routed: Any, prompted: Any, *origin: Any) -> AsyncIterator[TokenOutput]:
        if not self._tokens and isinstance(self._end, PdClusterError):
            raise self._end
        names = [SimpleNamespace(name=name) for name in ("p", "d")]
        inbox = SimpleNamespace(put=None)
        routed(SimpleNamespace(prefill=names[0], decode=names[1], stop=lambda *_: None, inbox=inbox, weight_marks=[]))
        prompted(PromptOutput("r", 0, 4))
        for at, token_id in enumerate(self._tokens):
            is_last = at == len(self._tokens) - 1 and not isinstance(self._end, PdClusterError)
            reason = cast(FinishReason, self._end) if is_last else None
            yield TokenOutput("r", 0, 0, at, token_id, reason, logprobs=self._logprobs)
        if isinstance(self._end, PdClusterError):
            raise self._end


def app_of(folder: Path, script: Script, **settings: Any) -> FastAPI:
    http = HttpConfig(responses=KeptResponses(folder=str(folder / "kept")))
    return make_app(folder, http, router=cast(Router, script), **settings)[0]


def events_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200, answer.body
    events = answer.body.decode().split("\n\n")[:-1]
    return [json.loads(event.partition("\ndata: ")[2]) for event in events]


def kept(folder: Path) -> list[str]:
    return ids_in(folder / "kept")


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_after_the_first_events_is_told_in_band(tmp_path: Path, path: str) -> None:
    app = app_of(tmp_path, Script([A, B], LOST))
    events = events_of(ask(app, "POST", path, [], {**BODIES[path], "stream": True}))
    last = events[-1]
    if path == "/v1/responses":
        for event in events:
            event_type().validate_python(event)
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "its worker died"}
        assert last["response"]["output"][0]["content"][0]["text"] == "ab"
    else:
        error = {"type": "api_error", "message": "its worker died"}
        assert last == {"type": "error", "error": error, "request_id": None}
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "error", "status", "kind"),
    [
        ("/v1/responses", LOST, 500, "server_error"),
        ("/v1/messages", LOST, 500, "api_error"),
        ("/v1/responses", Unavailable("nobody is there"), 503, "service_unavailable"),
        ("/v1/messages", Unavailable("nobody is there"), 503, "overloaded_error"),
    ],
)
def test_a_failure_before_anything_is_a_status(
    tmp_path: Path, path: str, error: PdClusterError, status: int, kind: str
) -> None:
    app = app_of(tmp_path, Script([], error))
    for stream in (False, True):
        answer = ask(app, "POST", path, [], {**BODIES[path], "stream": stream})
        told = answer.json()["error"]
        assert (answer.status, told["message"], told["type"]) == (status, str(error), kind)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_response_is_kept_before_its_client_learns_of_it(tmp_path: Path, reason: FinishReason) -> None:
    """A response is stored before it is sent, whole or streamed, and the stored one equals the sent one."""
    app = app_of(tmp_path, Script([A, B, C], reason))
    whole = ask(app, "POST", "/v1/responses", [], BODIES["/v1/responses"]).json()
    streamed = events_of(ask(app, "POST", "/v1/responses", [], {**BODIES["/v1/responses"], "stream": True}))[-1]
    for response in (whole, streamed["response"]):
        assert response["status"] == {"stop": "completed", "length": "incomplete"}[reason]
        assert ask(app, "GET", f"/v1/responses/{response['id']}").json() == response
    assert len(kept(tmp_path)) == 2


def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    app = app_of(tmp_path, Script([A, B], "stop"))

    body = BODIES["/v1/responses"]
    with full_disk():
        assert ask(app, "POST", "/v1/responses", [], body).json()["store"] is False
        events = events_of(ask(app, "POST", "/v1/responses", [], {**body, "stream": True}))
    assert events[-1]["response"]["store"] is False
    assert kept(tmp_path) == []


def test_logprobs_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a text that is followed by a call in the middle of a stream."""
    built: list[int] = []
    chat = LogprobsFormat.chat

    def counted(self: LogprobsFormat, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        built.extend(entry.text_offset for entry in entries)
        return chat(self, entries)

    monkeypatch.setattr(LogprobsFormat, "chat", counted)
    tokens = make_tokenizer().encode('abcabc<tool_call>{"name": "look", "arguments": {}}</tool_call>').ids
    script = Script([*tokens, EOS_ID], "stop", Logprobs(-1.0, 1, [(A, -1.0), (B, -math.inf)]))
    app = app_of(tmp_path, script, chat=ChatConfig(tool_parser="hermes", template=TEMPLATE + "{{ tools }}"))
    body = {**BODIES["/v1/responses"], "tools": [LOOK], "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = events_of(ask(app, "POST", "/v1/responses", [], {**body, "stream": True}))
    assert built == [*range(6)]

    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call"]
    (part,) = output[0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "abcabc"
    brief = [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -9999.0}]
    full = [{**each, "bytes": [each["token"].encode()[0]]} for each in brief]
    assert part["logprobs"][0] == {**full[0], "top_logprobs": full}
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"][0] == {**brief[0], "top_logprobs": brief}
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for each in deltas for entry in each] == done["logprobs"]
    built.clear()
    assert ask(app, "POST", "/v1/responses", [], body).json()["output"][0]["content"] == [part]
    assert built == [*range(6)]


def test_an_answer_without_text_has_no_blocks(tmp_path: Path) -> None:
    app = app_of(tmp_path, Script([EOS_ID], "stop"))
    assert ask(app, "POST", "/v1/responses", [], BODIES["/v1/responses"]).json()["output"] == []
    message = ask(app, "POST", "/v1/messages", [], BODIES["/v1/messages"]).json()
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")
    events = events_of(ask(app, "POST", "/v1/messages", [], {**BODIES["/v1/messages"], "stream": True}))
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
