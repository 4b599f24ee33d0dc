"""Every example of the OpenAPI document, sent unchanged, gets 200 and an answer that matches the document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.cluster import LiveCluster
from tests.support.documented import answer_validator, document_of

WRITTEN = document_of()


def examples() -> Iterator[Any]:
    for path, methods in WRITTEN["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        for name, example in body.get("examples", {}).items():
            yield pytest.param(path, example["value"], id=f"{path.rpartition('/')[2]}-{name}")


def schema_of(path: str, method: str, status: int, media_type: str) -> dict[str, Any]:
    """Returns the schema of an answer, or of a stream event's data."""
    schema: dict[str, Any] = WRITTEN["paths"][path][method]["responses"][str(status)]["content"][media_type]["schema"]
    if media_type == "text/event-stream":
        data = schema["properties"]["data"]
        schema = data["contentSchema"] if "contentSchema" in data else data["anyOf"][1]["contentSchema"]
    return schema


def answer_of(answer: httpx.Response) -> tuple[str, list[Any]]:
    """Returns (media type, [answer], or all events of a stream)."""
    media_type = answer.headers["content-type"].partition(";")[0]
    if media_type != "text/event-stream":
        return media_type, [answer.json()]
    *events, last, end = answer.text.split("\n\n")
    assert end == ""
    if last.startswith("event: "):  # events have types, and the last one marks the end
        return media_type, [json.loads(event.partition("\ndata: ")[2]) for event in [*events, last]]
    assert last == "data: [DONE]"
    return media_type, [json.loads(event.removeprefix("data: ")) for event in events]


def test_the_server_gives_this_very_document(cluster: LiveCluster) -> None:
    assert cluster.client.get(f"{cluster.url}/openapi.json").json() == json.loads(json.dumps(WRITTEN))


@pytest.mark.parametrize(("path", "body"), list(examples()))
def test_an_example_is_answered_as_documented(cluster: LiveCluster, path: str, body: dict[str, Any]) -> None:
    answer = cluster.client.post(f"{cluster.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    media_type, found = answer_of(answer)
    assert (media_type == "text/event-stream") == body.get("stream", False)
    validator = answer_validator(WRITTEN, schema_of(path, "post", 200, media_type))
    for each in found:
        validator.validate(each)


@pytest.mark.parametrize("usage", [{}, {"stream": True, "stream_options": {"include_usage": True}}], ids=str)
def test_answers_with_everything_are_documented(cluster: LiveCluster, usage: dict[str, Any]) -> None:
    of_prompt = {} if usage else {"prompt_logprobs": 1}
    for path, more in (
        ("/v1/completions", {"prompt": "hi", "logprobs": 2, "return_token_ids": True, "n": 2, "temperature": 1}),
        ("/v1/completions", {"prompt": "hi", "echo": True, "logprobs": 0, "stop": ["e"], **of_prompt}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
        ),
    ):
        answer = cluster.client.post(f"{cluster.url}{path}", json={"max_tokens": 8, **more, **usage})
        assert answer.status_code == 200, answer.text
        media_type, found = answer_of(answer)
        for each in found:
            answer_validator(WRITTEN, schema_of(path, "post", 200, media_type)).validate(each)


def test_what_is_only_looked_at_is_documented(cluster: LiveCluster) -> None:
    for path in ("/v1/models", "/v1/models/{name}", "/health", "/ping", "/live", "/version", "/load"):
        url = cluster.url + path.replace("{name}", "tiny")
        answer = cluster.client.get(url)
        assert (answer.status_code, "server" in answer.headers) == (200, False)
        answer_validator(WRITTEN, schema_of(path, "get", 200, "application/json")).validate(answer.json())
        head = cluster.client.head(url)
        assert (head.status_code, head.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": []}, 400),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404),
        ("/v1/messages", {"messages": []}, 400),
        ("/v1/messages/count_tokens", "x" * (33 << 20), 413),
    ],
)
def test_errors_are_documented(cluster: LiveCluster, path: str, body: Any, status: int) -> None:
    assert str(status) in WRITTEN["paths"][path]["post"]["responses"]
    answer = cluster.client.post(f"{cluster.url}{path}", json=body)
    assert answer.status_code == status
    kind = "MessageError" if "messages" in path and status != 413 else "Error"  # the HTTP layer knows no paths
    answer_validator(WRITTEN, {"$ref": f"#/components/schemas/{kind}"}).validate(answer.json())


def test_an_undocumented_field_would_be_noticed() -> None:
    validator = answer_validator(WRITTEN, {"$ref": "#/components/schemas/Version"})
    assert validator.is_valid({"version": "1"})
    assert not validator.is_valid({"version": "1", "more": 1})
