"""The smallest request of each API, and the result or error of parsing a body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest, GenerateRequest, GenerationRequest
from pd_cluster.service.schema.messages.messages_protocol import MessagesRequest
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.service.schema.responses.responses_protocol import ResponsesRequest

HELLO = [{"role": "user", "content": "hello"}]
MINIMAL: dict[type[GenerationRequest], dict[str, Any]] = {
    CompletionRequest: {"prompt": "hello"},
    ChatCompletionRequest: {"messages": HELLO},
    GenerateRequest: {"prompt": "hello"},
}
OTHERS: list[tuple[Any, dict[str, Any]]] = [
    (ResponsesRequest, {"input": "a"}),
    (MessagesRequest, {"messages": HELLO, "max_tokens": "7"}),
]
kinds = pytest.mark.parametrize("kind", MINIMAL)


def parsed(kind: type[GenerationRequest] = CompletionRequest, **fields: Any) -> Any:
    return parse(json.dumps({**MINIMAL[kind], **fields}).encode(), kind)


def refused(body: bytes, kind: type[GenerationRequest] = CompletionRequest) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body, kind)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return caught.value
