"""A cluster with keys, CORS and a root path, and two API processes, over real connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.api.conftest import KEYS, METRICS_KEY
from tests.support.cluster import LiveCluster, children_of

FIRST, SECOND = KEYS.values()
RIGHT = {"Authorization": f"Bearer {SECOND}"}
COMPLETION = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
NUM_TRIES = 8  # enough new connections for both processes


def each_process(path: str, headers: dict[str, str], url: str) -> Iterator[httpx.Response]:
    for _ in range(NUM_TRIES):
        yield httpx.get(url + path, headers=headers, trust_env=False, timeout=30)


def test_openais_client_with_a_key_and_without(guarded: LiveCluster) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=FIRST, max_retries=0, timeout=60) as client:
        answer = client.completions.create(model="tiny", prompt="hello", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        stream = client.completions.create(model="tiny", prompt="hello", max_tokens=4, temperature=0, stream=True)
        assert len(list(stream)) > 1
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model="tiny", prompt="hello")
        assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/static-offline-docs/swagger-ui.css", "/v1/models/tiny"])
def test_both_processes_ask_for_the_key(guarded: LiveCluster, path: str) -> None:
    for root in ("", "/llm"):
        answers = list(each_process(root + path, RIGHT, guarded.url))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.content for answer in answers}) == 1 or path == "/v1/models/tiny"
        assert {answer.status_code for answer in each_process(root + path, {}, guarded.url)} == {401}


def cached(guarded: LiveCluster, key: str, prompt: list[int], **fields: object) -> int:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{guarded.url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60)
    num_cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_cached


def test_cached_prompts_of_one_key_are_nothing_to_another(guarded: LiveCluster) -> None:
    """In neither process can one key learn from counts or times what another key requested."""
    secret = [(17 * at) % 239 for at in range(100)]
    assert cached(guarded, FIRST, secret) == 0
    assert [cached(guarded, FIRST, secret) for _ in range(NUM_TRIES)] == [96] * NUM_TRIES
    guesses = [secret, secret[:50], [*secret[:50], 1]]
    assert [cached(guarded, SECOND, guess) for guess in guesses] == [0, 48, 48], "the second key must find only its own"
    assert cached(guarded, FIRST, secret, cache_salt="mine") == 0


def test_probes_need_none(guarded: LiveCluster) -> None:
    for path in ("/health", "/ping", "/live", "/llm/health"):
        answers = list(each_process(path, {}, guarded.url))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.headers["x-request-id"] for answer in answers}) == NUM_TRIES


AROUND = (
    *("/v1/models", "//health", "/health/", "/health%00", "/health%0a", "/health;/v1/models", "/./health"),
    *("/health%2f..%2fv1%2fmodels", "/health/../v1/models", "/llm/../health", "/llm%2fv1/models"),
    *("http://127.0.0.1/v1/models", "http://health/v1/models", "/v1/models?/health"),
)


def test_raw_requests_that_try_to_get_around_it(guarded: LiveCluster) -> None:
    for target in AROUND:
        assert raw(guarded, f"GET {target} HTTP/1.1").startswith(b"HTTP/1.1 401 "), target
    for target in ("/%68ealth", "http://127.0.0.1/ping", "/llm/live"):  # probes
        assert raw(guarded, f"GET {target} HTTP/1.1").startswith(b"HTTP/1.1 200 "), target
    for header in ("X-HTTP-Method-Override: GET", "X-Original-URL: /health", "X-Forwarded-Prefix: /v1"):
        answer = raw(guarded, "POST /v1/completions HTTP/1.1", header, "Content-Length: 0")
        assert answer.startswith(b"HTTP/1.1 401 ")
    answer = raw(guarded, "POST /v1/completions HTTP/1.1", "Expect: 100-continue", "Content-Length: 30")
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"100 Continue" not in answer


def raw(guarded: LiveCluster, line: str, *headers: str) -> bytes:
    """Returns the answer's bytes up to the end of its headers."""
    port = httpx.URL(guarded.url).port
    assert port is not None
    lines = [line, "Host: 127.0.0.1", *headers, "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall("\r\n".join(lines).encode())
        answer = b""
        while b"\r\n\r\n" not in answer and (data := connection.recv(65536)):
            answer += data
    return answer


def test_metrics_have_a_key_of_their_own(guarded: LiveCluster) -> None:
    for headers, status in (({}, 401), (RIGHT, 401), ({"Authorization": f"Bearer {METRICS_KEY}"}, 200)):
        assert {answer.status_code for answer in each_process("/metrics", headers, guarded.url)} == {status}
    found = guarded.client.get(f"{guarded.url}/v1/models", headers={"Authorization": f"Bearer {METRICS_KEY}"})
    assert found.status_code == 401


def test_a_refused_body_leaves_the_connection_usable(guarded: LiveCluster) -> None:
    with httpx.Client(trust_env=False, timeout=30) as client:
        large = {**COMPLETION, "user": "x" * (1 << 20)}
        assert client.post(f"{guarded.url}/v1/completions", json=large).status_code == 401
        assert client.post(f"{guarded.url}/v1/completions", json=large, headers=RIGHT).status_code == 200


def test_a_page_of_another_origin(guarded: LiveCluster) -> None:
    for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
        asking = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        preflight = guarded.client.options(f"{guarded.url}/v1/completions", headers=asking)
        assert preflight.headers.get("access-control-allow-origin") == allowed
        for headers in ({"Origin": origin}, {"Origin": origin, **RIGHT}):
            answer = guarded.client.post(f"{guarded.url}/v1/completions", json=COMPLETION, headers=headers)
            assert answer.status_code == (200 if "Authorization" in headers else 401)
            assert answer.headers.get("access-control-allow-origin") == allowed


def test_keys_are_written_nowhere(guarded: LiveCluster) -> None:
    """Keys appear neither in logs nor in the processes that the scheduler starts."""
    for name in guarded.members:
        log = guarded.log_file(name).read_text(errors="replace")
        assert "sk-" not in log
        assert METRICS_KEY not in log
    scheduler = guarded.processes["scheduler"].pid
    started = children_of(scheduler)
    assert len(started) >= 2
    for name in ("prefill-0", "decode-0"):
        started += guarded.rank_pids(name)
    for pid in (*started, scheduler):
        assert b"sk-first" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for pid in started:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"sk-first" not in environment
        assert METRICS_KEY.encode() not in environment
