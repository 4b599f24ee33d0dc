"""Invalid and hostile input gives one clear error in time, disturbs no other client, and leaves nothing held.

tests/unit/test_protocol*.py tests each field's invalid values; this file tests one of each kind over HTTP.
"""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pd_cluster.service.schema.completion_protocol import NOT_YET
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.api_cases import nothing_left
from tests.support.canary import Canary
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.cluster import LiveCluster

DEADLINE_S = 20.0
HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 4}
COMPLETION: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 4}
BODIES = {"completions": COMPLETION, "chat/completions": CHAT}
MIB = 1 << 20
MAX_DEPTH = 64


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(cluster: LiveCluster) -> Iterator[None]:
    """A stream that is repeated beside all these requests must keep its text; nothing stays held."""
    with nothing_left(cluster), Canary(cluster).singing():
        yield


def post(
    cluster: LiveCluster, route: str, body: Mapping[str, Any] | bytes, headers: dict[str, str] | None = None
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = route if route.startswith("/") else f"/v1/{route}"
    began_s = time.monotonic()
    answer = cluster.client.post(f"{cluster.url}{path}", content=content, headers=headers)
    assert time.monotonic() - began_s < DEADLINE_S
    return answer


def refused(answer: httpx.Response, status: int = 400, param: str | None = None) -> str:
    """Returns the message of an error in OpenAI's format."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert "\n" not in error["message"]
    assert 0 < len(error["message"]) < 500
    return str(error["message"])


def nested(depth: int, of: str) -> str:
    opening, closing = {"arrays": ("[", "]"), "objects": ('{"a":', "}")}[of]
    return opening * depth + ("0" if of == "objects" else "") + closing * depth


# ---- bodies

NOT_JSON = {
    "empty": b"",
    "cut off": b'{"prompt": "hel',
    "two objects": b"{}{}",
    "NaN": b'{"prompt": "a", "messages": [], "temperature": NaN}',
    "NaN where nobody looks": b'{"prompt": "a", "messages": [], "unknown": [[[1e400, NaN]]]}',
    "a huge float": b'{"prompt": "a", "temperature": 1e999}',
    "an int of 5000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "a lone surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
    "a surrogate as a name": b'{"prompt": "a", "messages": [], "\\ud800": 1}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "a list": b"[]",
    "deep": b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "deep and unknown": b'{"prompt": "a", "messages": [], "x": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
    "a million arrays": b'{"prompt": "a", "x": [' + b"[]," * 1_000_000 + b"[]]}",
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_bodies_that_are_no_requests(cluster: LiveCluster, name: str) -> None:
    for route in BODIES:
        assert "body" in refused(post(cluster, route, NOT_JSON[name]))


@pytest.mark.parametrize("of", ["arrays", "objects"])
def test_how_deep_a_body_may_be(cluster: LiveCluster, of: str) -> None:
    """The body itself is level 1. Schemas within strings are limited as well."""
    for route, body in BODIES.items():
        good = json.dumps(body).encode()[:-1]
        assert post(cluster, route, good + f', "x": {nested(MAX_DEPTH - 1, of)}}}'.encode()).status_code == 200
        refused(post(cluster, route, good + f', "x": {nested(MAX_DEPTH, of)}}}'.encode()))
    refused(post(cluster, "completions", {**COMPLETION, "guided_json": nested(100_000, of)}), 400, "guided_json")


def test_bodies_over_the_limit(cluster: LiveCluster) -> None:
    """Covers whole, endless and announced bodies over the limit, and a compressed one, which is not unpacked."""
    answer = post(cluster, "completions", b'{"prompt": "' + b"x" * (33 * MIB) + b'"}')
    assert "32 MiB" in refused(answer, 413)
    assert answer.headers["connection"] == "close"  # no other request may follow an unread body
    refused(cluster.client.post(f"{cluster.url}/v1/completions", content=(b" " * MIB for _ in range(40))), 413)
    for num_bytes in ((32 << 20) + 1, 10**15):  # the body is never sent
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", cluster.launch.port), timeout=DEADLINE_S) as connection:
            connection.sendall(head.encode())
            assert connection.recv(100).split(b" ")[1] == b"413"
    packed = gzip.compress(b'{"prompt": "' + b"x" * (64 << 20) + b'"}')
    assert "JSON" in refused(post(cluster, "completions", packed, {"Content-Encoding": "gzip"}))


def test_bodies_under_the_limit_are_refused_for_what_they_are(cluster: LiveCluster) -> None:
    answer = post(cluster, "completions", b'{"prompt": "' + b"hello you " * (3 * MIB) + b'"}')
    assert str(MAX_MODEL_LEN) in refused(answer, 400, "prompt")
    for content in (b'{"prompt": [' + b"1," * (4 * MIB) + b'"a"]}', b'{"tools": [' + b"[]," * (10 * MIB) + b"[]]}"):
        assert post(cluster, "completions", content).status_code == 400


def test_content_types_do_not_matter(cluster: LiveCluster) -> None:
    """Any content type is accepted except those that a web page may send anywhere without a CORS preflight."""
    for content_type in ("text/plain; charset=utf-8", "application/x-www-form-urlencoded", ""):
        answer = post(cluster, "completions", COMPLETION, {"Content-Type": content_type})
        assert answer.status_code == (400 if content_type.startswith("text/plain") else 200)
    plain = {"Content-Type": "text/plain"}
    assert refused(post(cluster, "completions", b"{}", plain)).startswith("Content-Type: text/plain")


SAID = [{"role": "user", "content": "a"}]
OTHERS: dict[str, tuple[dict[str, Any], str]] = {  # route -> (valid body, its prompt field)
    "/v1/responses": ({"input": "a", "tools": []}, "input"),
    "/v1/messages": ({"messages": SAID, "max_tokens": 4, "tools": []}, "messages"),
    "/inference/v1/generate": ({"token_ids": [5], "sampling_params": {"max_tokens": 2}}, "token_ids"),
    "/v1/chat/completions/batch": ({"messages": [SAID], "max_tokens": 2}, "messages"),
    "/v1/completions/render": ({"prompt": "a", "max_tokens": 2}, "prompt"),
}


@pytest.mark.parametrize("path", OTHERS)
def test_hostile_bodies_of_other_routes(cluster: LiveCluster, path: str) -> None:
    """test_hostile_everywhere.py has more hostile bodies, for every route."""
    body, name = OTHERS[path]
    good, field = json.dumps(body).encode(), name.encode()
    assert post(cluster, path, good).status_code == 200
    for content in (
        b"[]",
        good[:-1] + b', "unknown": NaN}',
        good[:-1] + f', "{name}": {nested(100_000, "objects")}}}'.encode(),
        good[:-1] + b', "%s": [%s]}' % (field, b",".join([b"{}"] * 40_000)),
        good[:-1] + b', "%s": [%s]}' % (field, b",".join([b"5"] * 900_000)),
        good[:-1] + b', "%s": [{"role": "user", "content": "%s"}]}' % (field, b"x" * (20 << 20)),
    ):
        answer = post(cluster, path, content)
        assert answer.status_code in (400, 413), answer.text[:300]
        assert 0 < len(answer.json()["error"]["message"]) < 500


# ---- routes


def test_unknown_routes(cluster: LiveCluster) -> None:
    for route in ("/", "/v1/nothing", "/v1/completions/x", "/generate", "/%ff%00", "/v1/../x", "/instances"):
        for method in ("GET", "POST"):
            refused(cluster.client.request(method, f"{cluster.url}{route}"), 404)
    refused(cluster.client.get(f"{cluster.admin_url}/v1/models"), 404)
    for method, route in (("GET", "/v1/completions"), ("POST", "/v1/models"), ("DELETE", "/health")):
        answer = cluster.client.request(method, f"{cluster.url}{route}")
        refused(answer, 405)
        assert answer.headers["allow"]


# ---- fields

TEMPLATES = (
    "{% if %}",
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
)
ANY_TEXT: dict[str, Any] = {"type": "any_text"}
for _ in range(25):
    ANY_TEXT = {"type": "or", "elements": [ANY_TEXT]}
WRONG: list[tuple[str, Any]] = [
    *(("model", 3), ("max_tokens", "sixteen"), ("max_tokens", 0), ("max_tokens", MAX_MODEL_LEN + 1)),
    *(("temperature", -1), ("temperature", 10**400), ("top_k", 2**63), ("seed", 1.5), ("ignore_eos", "no")),
    *(("stop", ["a", ""]), ("stop", ["a"] * 65), ("stop_token_ids", [-1]), ("stop_token_ids", [1] * 100_000)),
    *(("n", 2), ("n", 129), ("n", 10**9), ("best_of", 10**6), ("use_beam_search", True), ("presence_penalty", 2.1)),
    *(("logit_bias", {str(VOCAB_SIZE): 1}), ("logit_bias", {str(at): 1 for at in range(30_000)}), ("logprobs", -2)),
    *(("prompt_logprobs", 21), ("min_tokens", 5), ("bad_words", ["a" * 300]), ("allowed_token_ids", [VOCAB_SIZE])),
    *(("cache_salt", "x" * 100_000), ("request_id", "a b"), ("truncate_prompt_tokens", MAX_MODEL_LEN)),
    *(("guided_choice", [f"{at:x}" for at in range(50_000)]), ("guided_regex", "a{1000000000}")),
    *(("guided_regex", r"(a+)\1"), ("guided_json", {"$ref": "file:///etc/passwd"}), ("suffix", "x")),
    ("response_format", {"type": "structural_tag", "format": ANY_TEXT}),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("kv_transfer_params", {"remote_host": "10.0.0.1"}),
    *(("chat_template", template) for template in TEMPLATES),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: str(value)[:20])
def test_wrong_fields_are_named(cluster: LiveCluster, name: str, value: Any) -> None:
    for route, body in (("completions", {**COMPLETION, "stream": True}), ("chat/completions", CHAT)):
        assert name in refused(post(cluster, route, {**body, name: value}), 400, name)


def test_values_that_ask_for_nothing_are_accepted(cluster: LiveCluster) -> None:
    for name, values in NOT_YET.items():
        for value in (None, *values):
            for route, body in BODIES.items():
                answer = post(cluster, route, {**body, "max_tokens": 1, name: value})
                assert answer.status_code == 200, answer.text


PROMPTS: list[Any] = [
    *(None, "", [], [[]], {}, [1, "a"], ["a", ""], [-1], [VOCAB_SIZE], [10**30], [1] * MAX_MODEL_LEN),
    *("x" * MAX_MODEL_LEN, [[1] * 900_000], ["a"] * 1025),
]


def test_wrong_prompts(cluster: LiveCluster) -> None:
    for prompt in PROMPTS:
        assert "prompt" in refused(post(cluster, "completions", {**COMPLETION, "prompt": prompt}), 400, "prompt")
    refused(post(cluster, "completions", {"max_tokens": 3}), 400, "prompt")
    many = {"prompt": ["a"] * 1024, "n": 128, "temperature": 1, "max_tokens": 4}
    assert post(cluster, "completions", many).json()["error"]["param"] in ("n", "prompt")


IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}
MESSAGES: list[Any] = [
    *(None, [], {}, [{}], [{"role": "user", "content": 1}], [{"role": "x" * 65, "content": "x"}]),
    [{"role": "user", "content": [IMAGE]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": "x" * MAX_MODEL_LEN}],
    [{"role": "user", "content": "x" * (5 * MIB)}],
    [{"role": "user", "content": "x"}] * 10_000,
]


def test_wrong_messages(cluster: LiveCluster) -> None:
    for messages in MESSAGES:
        answer = post(cluster, "chat/completions", {**CHAT, "messages": messages})
        assert "messages" in refused(answer, 400, "messages")


def test_template_variables_do_not_replace_fields_and_others_are_harmless(cluster: LiveCluster) -> None:
    body = {**CHAT, "chat_template_kwargs": {"add_generation_prompt": 1}}
    assert "add_generation_prompt" in refused(post(cluster, "chat/completions", body), 400, "chat_template_kwargs")
    plain = post(cluster, "chat/completions", CHAT).json()["choices"]
    for name in ("self", "messages2", "raise_exception", "__class__"):
        answer = post(cluster, "chat/completions", {**CHAT, "chat_template_kwargs": {name: {"a": [1]}}})
        assert answer.json()["choices"] == plain


def test_unknown_models(cluster: LiveCluster) -> None:
    for name in ("gpt-4", "", "../tiny", "x" * 100_000, "tiny\x00"):
        for route, body in BODIES.items():
            answer = post(cluster, route, {**body, "model": name})
            refused(answer, 404, "model")
            assert answer.json()["error"]["code"] == "model_not_found"


# ---- fields that could be dangerous

FOREIGN: dict[str, Any] = {
    "request_id": "r-0",
    "transfer_id": "r-0-0",
    "attempt": 7,
    "host": "10.0.0.1",
    "peer": "decode-0@1",
    "prefill": "prefill-7",
    "deadline_s": 1e-9,
    "arrival_s": -1,
    "self": 1,
    "model_config": {"extra": "forbid"},
    "prompt_token_ids": [1, 2, 3],
    "__class__": "x",
}


def test_unknown_fields_do_nothing(cluster: LiveCluster) -> None:
    for route, body in BODIES.items():
        plain = post(cluster, route, body)
        for name, value in FOREIGN.items():
            answer = post(cluster, route, {**body, name: value})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"] == plain.json()["choices"]
            assert answer.headers["x-pd-served-by"] == plain.headers["x-pd-served-by"]
            assert answer.json()["id"] != value


def test_two_requests_may_have_the_same_request_id(cluster: LiveCluster) -> None:
    body = {**COMPLETION, "request_id": "same", "max_tokens": 60, "ignore_eos": True}
    expected = post(cluster, "completions", body).json()["choices"]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: post(cluster, "completions", body).json()["choices"], range(4)))
    assert answers == [expected] * 4


def test_strange_but_good_text(cluster: LiveCluster) -> None:
    for text in ("\x00", "\u202e\ufeff", "😀" * 10, "<eos><bos>", "\\ud800", "{{ 7 * 7 }}{% raw %}"):
        bodies = {**COMPLETION, "prompt": text}, {**CHAT, "messages": [{"role": "user", "content": text}]}
        for route, body in zip(BODIES, bodies, strict=True):
            assert post(cluster, route, body).status_code == 200
