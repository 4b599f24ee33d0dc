"""Hostile bodies: each is refused within seconds, in OpenAI's shape, while a canary streams on the same cluster.

Cases of test_bad_input.py are not repeated.
"""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.api_cases import nothing_left
from tests.support.canary import Canary
from tests.support.cluster import LiveCluster

DEADLINE_S = 20.0
HUGE = 10**9
MAX_DEPTH = 64
ROUTES = ["completions", "chat/completions"]
BODY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
PROMPTS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "hello"},
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(cluster: LiveCluster) -> Iterator[None]:
    with nothing_left(cluster), Canary(cluster).singing():
        yield


def refused(cluster: LiveCluster, route: str, content: bytes, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """The error, which came in time. Its message is short, and on one line."""
    began_s = time.monotonic()
    path = route if route.startswith("/") else f"/v1/{route}"
    answer = cluster.client.post(f"{cluster.url}{path}", content=content, headers=headers, timeout=60)
    took_s = time.monotonic() - began_s
    assert answer.status_code in (400, 413), answer.text[:300]
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 500
    assert "\n" not in error["message"]
    assert took_s < DEADLINE_S
    return error


def with_fields(route: str, text: str = "", **fields: Any) -> bytes:
    """A good body with these fields; `text` is more JSON of them, for what json.dumps would not write."""
    body = json.dumps({**BODY, **PROMPTS[route], **fields}).encode()
    return body if not text else body[:-1] + b", " + text.encode() + b"}"


def nested(depth: int, of: str) -> str:
    opening, closing = {"arrays": ("[", "]"), "objects": ('{"a":', "}")}[of]
    return opening * depth + ("0" if of == "objects" else "") + closing * depth


# ---- numbers and text that are none


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "text",
    [
        '"logit_bias": {"5": NaN}',
        '"logit_bias": {"5": -Infinity}',
        '"chat_template_kwargs": {"x": Infinity}',
        '"guided_json": {"type": "number", "maximum": NaN}',
        '"unknown": [[[1e400, NaN]]]',
        '"stop": ["a\\ud800"]',
        '"guided_choice": ["\\udfff"]',
        '"guided_regex": "\\udc00a"',
        '"bad_words": ["\\ud83d"]',
        '"\\ud800": 1',
        '"guided_json": {"\\ud800": {}}',
    ],
)
def test_what_is_no_number_and_no_text(cluster: LiveCluster, route: str, text: str) -> None:
    assert "JSON" in refused(cluster, route, with_fields(route, text))["message"]


# ---- depth


@pytest.mark.parametrize("of", ["arrays", "objects"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["unknown", "guided_json", "response_format", "logit_bias", "stop"])
def test_100_000_deep(cluster: LiveCluster, route: str, name: str, of: str) -> None:
    refused(cluster, route, with_fields(route, f'"{name}": {nested(100_000, of)}'))


@pytest.mark.parametrize("of", ["arrays", "objects"])
def test_100_000_deep_in_a_string(cluster: LiveCluster, of: str) -> None:
    for fields in ({"guided_json": nested(100_000, of)}, {"structured_outputs": {"json": nested(100_000, of)}}):
        refused(cluster, "completions", with_fields("completions", **fields))


@pytest.mark.parametrize("of", ["arrays", "objects"])
@pytest.mark.parametrize("route", ROUTES)
def test_one_deeper_than_allowed(cluster: LiveCluster, route: str, of: str) -> None:
    """The body itself is the first level."""
    good = with_fields(route, f'"unknown": {nested(MAX_DEPTH - 1, of)}')
    assert cluster.client.post(f"{cluster.url}/v1/{route}", content=good).status_code == 200
    refused(cluster, route, with_fields(route, f'"unknown": {nested(MAX_DEPTH, of)}'))


# ---- the other APIs' routes


SAID = [{"role": "user", "content": "a"}]
OTHERS: dict[str, tuple[dict[str, Any], str]] = {  # a good body, and the field that prompts come in
    "/v1/responses": ({"input": "a", "tools": []}, "input"),
    "/v1/messages": ({"messages": SAID, "max_tokens": 4, "tools": []}, "messages"),
    "/v1/messages/count_tokens": ({"messages": SAID, "max_tokens": 4, "tools": []}, "messages"),
    "/inference/v1/generate": ({"token_ids": [5], "sampling_params": {"max_tokens": 2}}, "token_ids"),
    "/v1/chat/completions/batch": ({"messages": [SAID], "max_tokens": 2}, "messages"),
    "/v1/chat/completions/render": ({"messages": SAID, "max_tokens": 2}, "messages"),
    "/v1/completions/render": ({"prompt": "a", "max_tokens": 2}, "prompt"),
    "/invocations": ({"prompt": "a", "max_tokens": 2}, "prompt"),
}


@pytest.mark.parametrize("path", OTHERS)
def test_hostile_bodies_of_other_routes(cluster: LiveCluster, path: str) -> None:
    body, name = OTHERS[path]
    good = json.dumps(body).encode()
    assert cluster.client.post(cluster.url + path, content=good).status_code == 200
    field = name.encode()
    contents = [
        b"",
        b"[]",
        b'"a"',
        b"\xff",
        good[:-1],
        good[:-1] + b', "unknown": NaN}',
        good[:-1] + b', "unknown": "\\ud800"}',
        good[:-1] + f', "unknown": {nested(100_000, "arrays")}}}'.encode(),
        good[:-1] + f', "{name}": {nested(100_000, "objects")}}}'.encode(),
        good[:-1] + f', "{name}": {nested(MAX_DEPTH - 1, "arrays")}}}'.encode(),
        good[:-1] + b', "%s": [%s]}' % (field, b",".join([b"{}"] * 40_000)),
        good[:-1] + b', "%s": [%s]}' % (field, b",".join([b"5"] * 900_000)),
        good[:-1] + b', "%s": [%s]}' % (field, b",".join([b'"5"'] * 300_000)),
        good[:-1] + b', "%s": [%s]}' % (field, b",".join([b"[5]"] * 40_000)),
        good[:-1] + b', "%s": [%s]}' % (field, b",".join([json.dumps(SAID).encode()] * 20_000)),
        good[:-1] + b', "%s": [{"role": "user", "content": "%s"}]}' % (field, b"x" * (20 << 20)),
    ]
    if "tools" in body:
        contents += [
            good[:-1] + b', "tools": [%s]}' % b",".join([b'{"type": "function"}'] * 40_000),
            json.dumps({**body, "tools": [hostile_tool(path, at) for at in range(129)]}).encode(),
            json.dumps({**body, "tools": [hostile_tool(path, 0), hostile_tool(path, 0)]}).encode(),
        ]
    else:
        handle = {"kv_transfer_params": {"remote_host": "10.0.0.1", "remote_port": 1}}
        contents += [good[:-1] + b', "%s": "%s"}' % (field, b"x" * (20 << 20)), json.dumps({**body, **handle}).encode()]
    for content in contents:
        refused(cluster, path, content)


def test_hostile_parameters_of_tokens(cluster: LiveCluster) -> None:
    many = {f"unknown {at}": at for at in range(40_000)}
    for params in (
        {"max_tokens": "9" * 100_000},
        {"temperature": "1" * 30 + "x"},
        {"stop_token_ids": ["1e999"] * 1000},
        {"logprobs": 10**9},
        {"prompt": "a"},
        {"structured_outputs": {"json": nested(100_000, "objects")}},
        {**many, "n": 10**6},
        [],
        "x" * (1 << 20),
    ):
        refused(cluster, "/inference/v1/generate", json.dumps({"token_ids": [5], "sampling_params": params}).encode())


@pytest.mark.parametrize("route", ROUTES)
def test_hostile_structural_tags(cluster: LiveCluster, route: str) -> None:
    deep: dict[str, Any] = {"type": "any_text"}
    for _ in range(25):
        deep = {"type": "or", "elements": [deep]}
    number = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tags = [{"type": "tag", "begin": f"<{at}>", "content": number, "end": ">"} for at in range(2000)]
    for form in (
        deep,
        {"type": "or", "elements": [number] * 2000},
        {"type": "triggered_tags", "triggers": ["<"], "tags": tags},
        {"type": "regex", "pattern": "(a"},
        {"type": "grammar", "grammar": "start: start"},
        {"type": "json_schema", "json_schema": {"$ref": "file:///etc/passwd"}},
    ):
        asked = {"type": "structural_tag", "format": form}
        refused(cluster, route, with_fields(route, response_format=asked))


def hostile_tool(route: str, number: int) -> dict[str, Any]:
    if route == "/v1/responses":
        return {"type": "function", "name": f"f{number}", "parameters": {"$ref": "file:///etc/passwd"}}
    return {"name": f"f{number}", "input_schema": {"$ref": "file:///etc/passwd"}}


# ---- numbers of things


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "name",
    [
        *("n", "best_of", "max_tokens", "min_tokens", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("truncate_prompt_tokens", "temperature", "repetition_penalty", "min_p"),
    ],
)
def test_a_thousand_million(cluster: LiveCluster, route: str, name: str) -> None:
    if name == "temperature":  # any is allowed; the smallest that JSON can say is none
        assert refused(cluster, route, with_fields(route, **{name: -HUGE}))["param"] == name
        return
    others = {"logprobs": True} if name == "top_logprobs" and route != "completions" else {}
    if name == "top_logprobs" and route == "completions":
        return  # not a field of this route
    error = refused(cluster, route, with_fields(route, **others, **{name: HUGE}))
    assert error["param"] in (name, "logprobs")


@pytest.mark.parametrize("route", ROUTES)
def test_17_stop_strings(cluster: LiveCluster, route: str) -> None:
    stops = [f"stop {at}" for at in range(17)]
    assert refused(cluster, route, with_fields(route, stop=stops))["param"] == "stop"
    answer = cluster.client.post(f"{cluster.url}/v1/{route}", content=with_fields(route, stop=stops[:16]))
    assert answer.status_code == 200


@pytest.mark.parametrize("prompt", [["a"] * 1025, [[1]] * 1025, [""] * 1025], ids=["texts", "ids", "empty"])
def test_1025_prompts(cluster: LiveCluster, prompt: Any) -> None:
    error = refused(cluster, "completions", with_fields("completions", prompt=prompt))
    assert error["param"] == "prompt"
    assert "1025" in error["message"]


def test_many_prompts_with_many_choices_each(cluster: LiveCluster) -> None:
    fields = {"prompt": ["a"] * 1024, "n": 128, "temperature": 1}
    assert refused(cluster, "completions", with_fields("completions", **fields))["param"] in ("n", "prompt")


@pytest.mark.parametrize("route", ROUTES)
def test_fifty_thousand_of_everything(cluster: LiveCluster, route: str) -> None:
    for name in ("bad_words", "stop", "guided_choice"):
        many = [f"{at:x}" for at in range(50_000)]
        assert refused(cluster, route, with_fields(route, **{name: many}))["param"] == name


# ---- guides


REGEXES = {
    "too often": "a{1000000000}",
    "too often, nested": "(((a{1,1000}){1,1000}){1,1000}){1,1000}",
    "a long one": "(x|y)" * 60_000,
    "a look behind": "(?<=a)b",
    "a reference": r"(a+)\1",
    "unclosed": "(" * 50_000,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "a cycle": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
    "a foreign reference": {"$ref": "http://169.254.169.254/latest/meta-data"},
    "a file": {"$ref": "file:///etc/passwd"},
    "many alternatives of many": {
        "allOf": [{"anyOf": [{"required": [f"p{a}{b}"]} for a in range(20)]} for b in range(20)],
    },
    "no schema": {"type": "nothing"},
}


@pytest.mark.parametrize("name", REGEXES)
def test_hostile_regexes(cluster: LiveCluster, name: str) -> None:
    assert (
        refused(cluster, "completions", with_fields("completions", guided_regex=REGEXES[name]))["param"]
        == "guided_regex"
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_hostile_schemas(cluster: LiveCluster, name: str) -> None:
    schema = SCHEMAS[name]
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for fields in ({"guided_json": schema}, {"response_format": wanted}):
        error = refused(cluster, "chat/completions", with_fields("chat/completions", **fields))
        assert error["param"] in fields


# ---- templates and bytes


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content.format(messages) }}{% include '/etc/passwd' %}",
    ],
)
def test_a_template_of_a_client_s_own(cluster: LiveCluster, template: str) -> None:
    """This server renders such templates (--trust-request-chat-template), as long as they behave."""
    body = with_fields("chat/completions", chat_template=template)
    assert refused(cluster, "chat/completions", body)["param"] == "chat_template"


def test_a_compressed_body_is_not_unpacked(cluster: LiveCluster) -> None:
    packed = gzip.compress(b'{"prompt": "' + b"x" * (64 << 20) + b'"}')
    assert "JSON" in refused(cluster, "completions", packed, {"Content-Encoding": "gzip"})["message"]


@pytest.mark.parametrize("num_bytes", [(32 << 20) + 1, 10**15])
def test_a_length_over_the_limit_is_refused_before_the_body(cluster: LiveCluster, num_bytes: int) -> None:
    """Nothing of the body is sent, or ever will be."""
    url = urlsplit(cluster.url)
    assert url.hostname is not None
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes}\r\n\r\n"
    with socket.create_connection((url.hostname, url.port or 80), timeout=DEADLINE_S) as connection:
        connection.sendall(head.encode())
        assert connection.recv(100).split(b" ")[1] == b"413"
