"""The public port's small routes: models, tokens, probes, version, the document's page, and unknown routes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import __version__
from pd_cluster.api.routes.tokens.token_routes import FEW_TOKENS, MAX_TOKENS
from pd_cluster.settings.http_settings import HttpConfig
from tests.support.checkpoints import TEMPLATE
from tests.support.public_port import MAX_MODEL_LEN, NAMES, Answer, ask, make_app, make_special_tokenizer

RUST = make_special_tokenizer()
Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    app, _ = make_app(tmp_path_factory.mktemp("asked"))
    return lambda *question: ask(app, *question)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Returns the app with USE_OPENAI=0."""
    app, _ = make_app(tmp_path_factory.mktemp("plain"), openai=False)
    return lambda *question: ask(app, *question)


def post(asked: Ask, path: str, **fields: Any) -> Answer:
    return asked("POST", path, [], fields)


def error_of(answer: Answer) -> tuple[int, str, str | None, str | None]:
    """Returns (status, type, param, code)."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status, error["type"], error["param"], error["code"]


# ---- models


def test_a_model_by_each_of_its_names(asked: Ask) -> None:
    models = {name: asked("GET", f"/v1/models/{name}").json() for name in [*NAMES, "/models/tiny"]}
    for name, model in models.items():
        assert (model["id"], model["object"], model["root"]) == (name, "model", "/models/tiny")
        assert model["max_model_len"] == MAX_MODEL_LEN
    listed = asked("GET", "/v1/models").json()
    assert listed["data"] == [models[name] for name in NAMES]
    assert asked("GET", "/v1/models/").json() == listed
    answer = asked("GET", "/v1/models/gpt-4o")
    assert error_of(answer) == (404, "invalid_request_error", "model", "model_not_found")
    assert "tiny, org/tiny" in answer.json()["error"]["message"]


# ---- tokens


@pytest.mark.parametrize("special", [True, False])
def test_a_text_as_tokens_and_back(asked: Ask, special: bool) -> None:
    for text in ("", "hello", "caf\xe9 \U0001f600", "<|user|>hello"):
        fields = {"add_special_tokens": special, "return_token_strs": True, "model": "tiny"}
        answer = post(asked, "/tokenize", prompt=text, **fields).json()
        ids = RUST.encode(text, add_special_tokens=special).ids
        assert (ids[:1] == [257]) == special
        assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), MAX_MODEL_LEN)
        assert len(answer["token_strs"]) == len(ids)
        if text.isascii():
            assert "".join(answer["token_strs"]).endswith(text)
        if not special:  # an empty list decodes to an empty text
            assert post(asked, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}


def test_a_conversation_as_its_template_writes_it(asked: Ask) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = post(asked, "/tokenize", messages=messages).json()
    assert answer["tokens"] == RUST.encode("<|user|>hello<|assistant|>", add_special_tokens=False).ids
    assert set(answer) == {"count", "max_model_len", "tokens"}
    shorter = post(asked, "/tokenize", messages=messages, add_generation_prompt=False).json()
    assert shorter["count"] < answer["count"]
    text = "a" * 5 * MAX_MODEL_LEN
    answer = post(asked, "/tokenize", prompt=text, add_special_tokens=False).json()
    assert answer["tokens"] == RUST.encode(text, add_special_tokens=False).ids
    assert answer["count"] > max(FEW_TOKENS, MAX_MODEL_LEN)
    assert post(asked, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}


def test_what_cannot_be_tokenized_names_the_field(asked: Ask) -> None:
    chat = [{"role": "user", "content": "a"}]
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": chat}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [0] * (MAX_TOKENS + 1)}, "tokens"),
    ]
    for path, fields, param in wrong:
        assert error_of(post(asked, path, **fields))[:3] == (400, "invalid_request_error", param)
    for fields in ({"prompt": "a"}, {"messages": chat}, {"tokens": [1]}):
        path = "/detokenize" if "tokens" in fields else "/tokenize"
        assert error_of(post(asked, path, **fields, model="gpt-4o"))[0::3] == (404, "model_not_found")
    for body in (b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"messages": ' + b"[" * 40_000):
        for path in ("/tokenize", "/detokenize"):
            assert error_of(asked("POST", path, [], body))[:2] == (400, "invalid_request_error")


def test_the_tokenizer_is_shown_where_the_operator_says_so(asked: Ask, tmp_path: Path) -> None:
    """The shown info has the template in effect, and no paths of this machine."""
    own = {"tokenizer_class": "Tiny", "name_or_path": "/secret", "vocab_file": "/secret/v", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    app, _ = make_app(tmp_path, shows_tokenizer=True)
    shown = ask(app, "GET", "/tokenizer_info").json()
    assert shown == {"tokenizer_class": "Tiny", "eos_token": "<eos>", "chat_template": TEMPLATE}
    assert asked("GET", "/tokenizer_info").status == 404


# ---- probes and the like


def test_head_is_get_without_a_body_and_ping_is_health(asked: Ask) -> None:
    for path in ("/health", "/ping", "/live", "/metrics", "/version", "/v1/models", "/v1/models/tiny"):
        get, head = asked("GET", path), asked("HEAD", path)
        assert (head.status, head.headers["content-type"]) == (get.status, get.headers["content-type"]), path
    health = asked("GET", "/health")
    assert (health.status, health.json()["status"]) == (503, "unavailable")
    assert asked("GET", "/ping").body == asked("POST", "/ping").body == health.body


def test_the_plain_server_has_its_own_routes_only(plain: Ask) -> None:
    assert plain("GET", "/version").json() == {"version": __version__}
    assert plain("GET", "/metrics").status == 200
    assert plain("POST", "/ping").status == plain("GET", "/health").status == 503
    for path in ("/tokenize", "/detokenize", "/v1/models", "/v1/models/tiny", "/v1/completions"):
        assert error_of(plain("POST", path, [], {"prompt": "a", "tokens": [1]}))[0] == 404


def test_an_unknown_path(asked: Ask) -> None:
    for path in ("/", "/v1", "/v1/audio/speech", "/instances", "/v1/chat/completions/x"):
        answer = asked("POST", path)
        assert error_of(answer) == (404, "invalid_request_error", None, "unknown_url")
        assert path in answer.json()["error"]["message"]
    for path, way_out in (  # routes of other servers
        *(("/v1/batches", "run-batch"), ("/v1/files", "run-batch"), ("/v1/messages/batches", "run-batch")),
        ("/v1/audio/transcriptions", "audio is not supported"),
    ):
        answer = asked("POST", path, [], {})
        assert error_of(answer) == (404, "invalid_request_error", None, "unknown_url")
        assert way_out in answer.json()["error"]["message"]


def test_a_wrong_method_is_told_the_right_ones(asked: Ask) -> None:
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", {"POST"}),
        ("POST", "/v1/models/tiny", {"GET", "HEAD"}),
        ("OPTIONS", "/tokenize", {"POST"}),
    ):
        answer = asked(method, path)
        assert error_of(answer) == (405, "invalid_request_error", None, "method_not_supported")
        assert set(answer.headers["allow"].split(", ")) == allowed


# ---- the document's page


def test_the_page_asks_nobody_else_and_can_be_left_out(asked: Ask, tmp_path: Path) -> None:
    page = asked("GET", "/docs").body.decode()
    assert not re.findall(r"(?:https?:)?//[^\s/]", re.sub(r"<!--.*?-->", "", page))
    files = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(files) == 3
    for file in files:
        answer = asked("GET", file)
        assert (answer.status, len(answer.body) > 1000) == (200, True), file
    assert asked("GET", "/openapi.json").json()["openapi"].startswith("3.1")
    assert asked("GET", "/redoc").status == 404
    app, _ = make_app(tmp_path, HttpConfig(has_docs=False))
    for path in ("/docs", "/openapi.json", "/redoc", "/static-offline-docs/swagger-ui.css"):
        assert ask(app, "GET", path).status == 404, path
    assert ask(app, "GET", "/v1/models").status == 200


# ---- x-request-id


def test_answers_name_the_request(asked: Ask, tmp_path: Path) -> None:
    assert "x-request-id" not in asked("GET", "/health", [("x-request-id", "mine")]).headers
    app, _ = make_app(tmp_path, HttpConfig(returns_request_ids=True, api_keys=("k",)))
    assert ask(app, "GET", "/health", [("x-request-id", "mine")]).headers["x-request-id"] == "mine"
    new = {ask(app, "GET", "/v1/models").headers["x-request-id"] for _ in range(3)}  # also in a 401 response
    assert len(new) == 3
    assert all(len(each) == 32 for each in new)
    long = "x" * 10_000
    assert ask(app, "GET", "/health", [("x-request-id", long)]).headers["x-request-id"] != long
