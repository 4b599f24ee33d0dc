"""Invalid input gives one clear error, disturbs no other client, and leaves nothing behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pd_cluster.service.schema.parse import HANDLE
from pd_cluster.service.schema.protocol import NOT_YET
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.api_cases import nothing_left
from tests.support.canary import Canary
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.cluster import LiveCluster

HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 4}
COMPLETION: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 4}
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(cluster: LiveCluster) -> Iterator[None]:
    """A stream goes on beside all of these requests, and its text stays the same."""
    with nothing_left(cluster), Canary(cluster).singing():
        yield


def post(cluster: LiveCluster, route: str, body: object) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return cluster.client.post(f"{cluster.url}/v1/{route}", content=content)


def refused(answer: httpx.Response, status: int = 400, param: str | None = None) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert "\n" not in error["message"]
    assert 0 < len(error["message"]) < 500
    return str(error["message"])


# ---- bodies

NOT_JSON = {
    "empty": b"",
    "cut off": b'{"prompt": "hel',
    "text": b"hello",
    "two objects": b"{}{}",
    "a comma too many": b'{"prompt": "a",}',
    "single quotes": b"{'prompt': 'a'}",
    "NaN": b'{"prompt": "a", "messages": [], "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "messages": [], "top_p": Infinity}',
    "a huge float": b'{"prompt": "a", "temperature": 1e999}',
    "an int of 5000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "a surrogate in UTF-8": b'{"prompt": "\xed\xa0\x80"}',
    "a lone surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "a list": b"[]",
    "a string": b'"hello"',
    "null": b"null",
    "deep": b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "deep and unknown": b'{"prompt": "a", "messages": [], "x": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_001,
    "a million arrays": b'{"prompt": "a", "x": [' + b"[]," * 1_000_000 + b"[]]}",
}


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
@pytest.mark.parametrize("name", NOT_JSON)
def test_bodies_that_are_no_requests(cluster: LiveCluster, route: str, name: str) -> None:
    assert "body" in refused(post(cluster, route, NOT_JSON[name]))


def test_a_body_over_the_limit(cluster: LiveCluster) -> None:
    body = b'{"prompt": "' + b"x" * (33 * MIB) + b'"}'
    answer = post(cluster, "completions", body)
    assert "32 MiB" in refused(answer, 413)
    assert answer.headers["connection"] == "close"  # no other request may follow what was not read


def test_an_endless_body_is_cut_off(cluster: LiveCluster) -> None:
    """It has no Content-Length; the answer comes although the body has not ended."""

    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * MIB

    answer = cluster.client.post(f"{cluster.url}/v1/completions", content=parts())
    refused(answer, 413)


def test_a_body_under_the_limit_is_refused_for_what_it_is(cluster: LiveCluster) -> None:
    answer = post(cluster, "completions", b'{"prompt": "' + b"hello you " * (3 * MIB) + b'"}')
    assert str(MAX_MODEL_LEN) in refused(answer, 400, "prompt")


def test_the_largest_bodies(cluster: LiveCluster) -> None:
    for content in (
        b'{"prompt": [' + b"1," * (15 * MIB) + b"1]}",
        b'{"prompt": [' + b"1," * (4 * MIB) + b'"a"]}',
        b'{"prompt": "a", "tools": [' + b"[]," * (10 * MIB) + b"[]]}",
    ):
        assert post(cluster, "completions", content).status_code == 400


def test_content_types_do_not_matter(cluster: LiveCluster) -> None:
    """Except for that which a web page may send anywhere without asking."""
    for content_type in ("text/plain", "text/plain; charset=utf-8", "application/x-www-form-urlencoded", ""):
        answer = cluster.client.post(
            f"{cluster.url}/v1/completions",
            content=json.dumps(COMPLETION).encode(),
            headers={"Content-Type": content_type},
        )
        assert answer.status_code == (400 if content_type.startswith("text/plain") else 200)
    plain = {"Content-Type": "text/plain"}
    answer = cluster.client.post(f"{cluster.url}/v1/completions", content=b"{}", headers=plain)
    assert refused(answer).startswith("Content-Type: text/plain")


# ---- routes


@pytest.mark.parametrize("route", ["/", "/v1", "/v1/nothing", "/v1/completions/x", "/generate", "/%ff%00", "/v1/../x"])
def test_unknown_routes(cluster: LiveCluster, route: str) -> None:
    for method in ("GET", "POST"):
        refused(cluster.client.request(method, f"{cluster.url}{route}"), 404)


@pytest.mark.parametrize(
    ("method", "route"),
    [("GET", "/v1/completions"), ("PUT", "/v1/chat/completions"), ("POST", "/v1/models"), ("DELETE", "/health")],
)
def test_wrong_methods(cluster: LiveCluster, method: str, route: str) -> None:
    answer = cluster.client.request(method, f"{cluster.url}{route}")
    refused(answer, 405)
    assert answer.headers["allow"]


def test_the_admin_port_s_routes_are_not_public(cluster: LiveCluster) -> None:
    refused(cluster.client.get(f"{cluster.url}/instances"), 404)
    refused(cluster.client.get(f"{cluster.admin_url}/v1/models"), 404)


# ---- fields

WRONG: list[tuple[str, Any]] = [
    ("model", 3),
    ("max_tokens", "sixteen"),
    ("max_tokens", 1.5),
    ("max_tokens", []),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", MAX_MODEL_LEN + 1),
    ("max_tokens", 10**300),
    ("temperature", "hot"),
    ("temperature", -1),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 2),
    ("top_p", "x"),
    ("top_k", -5),
    ("top_k", 10**30),
    ("top_k", 2**63),
    ("seed", 1.5),
    ("seed", 10**30),
    ("seed", 2**63),
    ("kv_transfer_params", {"remote_host": "10.0.0.1"}),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 65),
    ("stop_token_ids", [10**30]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "a"),
    ("stop_token_ids", [1] * 100_000),
    ("ignore_eos", "no"),
    ("skip_special_tokens", 1),
    ("stream", "yes"),
    ("stream_options", []),
    ("return_token_ids", "x"),
    ("n", 2),  # greedy
    ("n", "one"),
    ("n", 0),
    ("n", 129),
    ("n", 10**30),
    ("best_of", 2),
    ("best_of", 0),
    ("best_of", 10**6),
    ("use_beam_search", True),
    ("presence_penalty", 2.1),
    ("presence_penalty", "one"),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", 10**400),
    ("repetition_penalty", 0),
    ("repetition_penalty", 2.5),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", [5]),
    ("logit_bias", {str(at): 1 for at in range(30_000)}),
    ("logprobs", 1.5),
    ("logprobs", "five"),
    ("logprobs", -2),
    ("top_logprobs", 5),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", True),
    ("min_p", 1.1),
    ("min_p", -0.1),
    ("min_tokens", 5),
    ("min_tokens", -1),
    ("min_tokens", 10**30),
    ("bad_words", "a"),
    ("bad_words", [""]),
    ("bad_words", ["a"] * 129),
    ("bad_words", ["a" * 300]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCAB_SIZE]),
    ("allowed_token_ids", [-1]),
    ("include_stop_str_in_output", "x"),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("cache_salt", "x" * 100_000),
    ("request_id", "a b"),
    ("request_id", ""),
    ("tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("documents", [{"text": "of which this model's template knows nothing"}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "xml"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("guided_json", '{"type": "objec"}'),
    ("guided_regex", "a("),
    ("guided_choice", []),
    ("structured_outputs", {"json": {"type": 5}}),
    ("suffix", "x"),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", MAX_MODEL_LEN),
    ("truncate_prompt_tokens", 10**30),
    ("chat_template", "{% if %}"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_fields_are_named(cluster: LiveCluster, name: str, value: Any, stream: bool) -> None:
    for route, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        message = refused(post(cluster, route, {**body, "stream": stream, name: value}), 400, name)
        assert name in message
        if name in NOT_YET and name != HANDLE:
            assert "not supported yet" in message


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        ("completions", {"n": 3, "best_of": 2, "temperature": 1}, "best_of"),
        ("completions", {"best_of": 2, "temperature": 1, "stream": True}, "best_of"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_fields_that_do_not_go_together(cluster: LiveCluster, route: str, fields: dict[str, Any], param: str) -> None:
    refused(post(cluster, route, {**(CHAT if route.startswith("chat") else COMPLETION), **fields}), 400, param)


@pytest.mark.parametrize("name", NOT_YET)
def test_values_that_ask_for_nothing_are_accepted(cluster: LiveCluster, name: str) -> None:
    for value in (None, *NOT_YET[name]):
        for route, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
            answer = post(cluster, route, {**body, "max_tokens": 1, name: value})
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [[]],
        [""],
        1,
        {},
        [1, "a"],
        [1.5],
        [True],
        [None],
        ["a", ""],
        [[1], []],
        ["a", [1]],
        [-1],
        [VOCAB_SIZE],
        [10**30],
        [1] * MAX_MODEL_LEN,
        "x" * MAX_MODEL_LEN,
        "x" * 100_000,
        [1] * 900_000,
        [[1] * 900_000],
    ],
    ids=lambda prompt: str(prompt)[:12],
)
def test_wrong_prompts(cluster: LiveCluster, prompt: Any) -> None:
    assert "prompt" in refused(post(cluster, "completions", {**COMPLETION, "prompt": prompt}), 400, "prompt")


def test_a_missing_prompt(cluster: LiveCluster) -> None:
    refused(post(cluster, "completions", {"max_tokens": 3}), 400, "prompt")


IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest/meta-data"}}


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        {},
        "hello",
        [1],
        [{}],
        [{"role": "user", "content": 1}],
        [{"role": "x" * 65, "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": [IMAGE]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": "x" * MAX_MODEL_LEN}],
        [{"role": "user", "content": "x" * (5 * MIB)}],
        [{"role": "user", "content": "x"}] * 10_000,
    ],
    ids=lambda messages: str(messages)[:40],
)
def test_wrong_messages(cluster: LiveCluster, messages: Any) -> None:
    assert "messages" in refused(post(cluster, "chat/completions", {**CHAT, "messages": messages}), 400, "messages")


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
def test_template_variables_do_not_replace_fields(cluster: LiveCluster, name: str) -> None:
    body = {**CHAT, "chat_template_kwargs": {name: 1}}
    assert name in refused(post(cluster, "chat/completions", body), 400, "chat_template_kwargs")


@pytest.mark.parametrize("name", ["self", "messages2", "cls", "enable_thinking", "raise_exception", "__class__"])
def test_other_template_variables_are_harmless(cluster: LiveCluster, name: str) -> None:
    plain = post(cluster, "chat/completions", CHAT).json()["choices"]
    answer = post(cluster, "chat/completions", {**CHAT, "chat_template_kwargs": {name: {"a": [1]}}})
    assert answer.json()["choices"] == plain


def test_deep_extras_of_a_message_are_harmless(cluster: LiveCluster) -> None:
    deep: list[Any] = []
    for _ in range(58):
        deep = [deep]
    answer = post(cluster, "chat/completions", {**CHAT, "messages": [{**HELLO[0], "extra": deep}]})
    assert answer.json()["choices"] == post(cluster, "chat/completions", CHAT).json()["choices"]


@pytest.mark.parametrize("name", ["gpt-4", "", "../tiny", "x" * 100_000, "tiny\x00"], ids=lambda name: name[:8])
def test_unknown_models(cluster: LiveCluster, name: str) -> None:
    for route, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        message = refused_model(post(cluster, route, {**body, "model": name}))
        assert "does not exist here" in message


def refused_model(answer: httpx.Response) -> str:
    assert answer.json()["error"]["code"] == "model_not_found"
    return refused(answer, 404, "model")


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


@pytest.mark.parametrize("name", FOREIGN)
def test_unknown_fields_do_nothing(cluster: LiveCluster, name: str) -> None:
    for route, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
        plain = post(cluster, route, body)
        answer = post(cluster, route, {**body, name: FOREIGN[name]})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain.json()["choices"]
        assert answer.headers["x-pd-served-by"] == plain.headers["x-pd-served-by"]
        assert answer.json()["id"] != FOREIGN[name]


def test_two_requests_may_have_the_same_request_id(cluster: LiveCluster) -> None:
    body = {**COMPLETION, "request_id": "same", "max_tokens": 60, "ignore_eos": True}
    expected = post(cluster, "completions", body).json()["choices"]
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(post(cluster, "completions", body).json()["choices"]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [expected] * 4


def test_strange_but_good_text(cluster: LiveCluster) -> None:
    for text in ("\x00", "\u202e\ufeff", "😀" * 10, "<eos><bos>", "\\ud800", "{{ 7 * 7 }}{% raw %}"):
        for route, body in (
            ("completions", {**COMPLETION, "prompt": text}),
            ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]}),
        ):
            answer = post(cluster, route, body)
            assert answer.status_code == 200, answer.text
