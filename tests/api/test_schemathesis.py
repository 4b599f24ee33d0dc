"""Sends valid and invalid requests generated from the served OpenAPI document, during a repeated stream.

Each answer must be documented, in time and no 5xx fault; requests that the document forbids must be refused. The test
adjusts Schemathesis' requests to be cheap and useful: max_tokens is at most 8, and is added if missing; n and best_of
are at most 4; the model exists; valid requests keep only a few optional fields, since most exclude each other; prompts'
token ids are in the vocabulary.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.api_cases import MODES, each_case, nothing_left
from tests.support.canary import Canary
from tests.support.cluster import LiveCluster
from tests.support.only_local import only_local

if TYPE_CHECKING:
    import requests
    from schemathesis import Case

NUM_CASES = 2
NUM_CASES_SLOW = 1000
NUM_THREADS = 8
DEADLINE_S = 30.0
MAX_TOKENS = 8
MAX_SEQUENCES = 4
MAX_OPTIONAL_FIELDS = 4
NEEDS_A_STORE = {
    f"/v1/responses/{{response_id}}{rest}" for rest in ("", "/cancel", "/input_items")
}  # this cluster stores no responses
ALWAYS_REFUSED = NEEDS_A_STORE | {"/v1/responses/compact"}

local = threading.local()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(cluster: LiveCluster) -> Iterator[None]:
    with nothing_left(cluster), only_local():
        yield


@pytest.fixture(scope="module")
def document(cluster: LiveCluster) -> dict[str, Any]:
    answer = cluster.client.get(f"{cluster.url}/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture(scope="module")
def operations(document: dict[str, Any]) -> list[Any]:
    import schemathesis  # its import takes seconds

    schema = schemathesis.openapi.from_dict(document)
    schema.config.output.sanitization.enabled = False  # sanitizing would treat max_tokens as a secret
    return [result.ok() for result in schema.get_all_operations()]


def test_the_document_is_valid_and_has_the_routes(document: dict[str, Any], operations: list[Any]) -> None:
    import schemathesis

    schemathesis.openapi.from_dict(document).validate()
    labels = {operation.label for operation in operations}
    assert labels >= {"POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /health"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "num_cases",
    [NUM_CASES, pytest.param(NUM_CASES_SLOW, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["few", "many"],
)
def test_every_operation_keeps_to_the_document(
    cluster: LiveCluster, operations: list[Any], mode: str, num_cases: int
) -> None:
    with_body = [operation for operation in operations if len(operation.body)]
    asked = operations if mode == "positive" else with_body  # without a body nothing can be invalid
    with Canary(cluster).singing() as canary, Calls(cluster.url) as calls:
        for operation in asked:
            run(operation, mode, num_cases, calls)
    assert calls.faults == [], "\n\n".join([f"{len(calls.faults)} faults", *calls.faults[:5]])
    for operation in asked:
        statuses = calls.statuses[operation.label]
        if operation in with_body:
            assert statuses.total() >= num_cases, (operation.label, statuses)
        if mode == "positive" and num_cases == NUM_CASES_SLOW and operation.path not in ALWAYS_REFUSED:
            assert any(status < 400 for status in statuses), f"{operation.label}: all were refused: {statuses}"
    assert canary.num_songs >= (3 if num_cases == NUM_CASES_SLOW else 1)


def run(operation: Any, mode: str, num_cases: int, calls: Calls) -> None:
    """Generates cases one after the other in this thread, and passes them to the calling threads."""

    def start(case: Case, choose: random.Random) -> None:
        _make_cheap(case, mode, choose)
        calls.start(case)

    each_case(operation, mode, num_cases, start)


def _make_cheap(case: Case, mode: str, choose: random.Random) -> None:
    """Adjusts a case as described at the top of the file."""
    if not isinstance(case.body, dict):
        return
    body = dict(case.body)
    if mode == "positive":
        required = set(_schema_of(case).get("required", ()))
        optional = sorted(body.keys() - required)
        for name in choose.sample(optional, max(0, len(optional) - MAX_OPTIONAL_FIELDS)):
            del body[name]
        if isinstance(prompt := body.get("prompt"), list):
            body["prompt"] = [_known_ids(each) for each in prompt]
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    if "prompt" in body or "messages" in body:
        _bound(body, choose)
    case.body = body


def _known_ids(prompt: Any) -> Any:
    """Maps token ids in a list of prompts or ids into the vocabulary; leaves texts unchanged."""
    if isinstance(prompt, list):
        return [_known_ids(each) for each in prompt]
    return prompt % 256 if isinstance(prompt, int) else prompt


def _bound(body: dict[str, Any], choose: random.Random) -> None:
    fields = [name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    for name in fields or ["max_tokens"]:
        value = body.get(name)
        if value is None or (isinstance(value, int | float) and value > MAX_TOKENS):
            body[name] = choose.randint(1, MAX_TOKENS)
    for name in ("n", "best_of"):
        if isinstance(value := body.get(name), int) and value > MAX_SEQUENCES:
            body[name] = choose.randint(1, MAX_SEQUENCES)


def _schema_of(case: Case) -> dict[str, Any]:
    (body,) = case.operation.body
    found: dict[str, Any] = body.optimized_schema
    return found


class Calls:
    """Sends cases on a few threads, and records each answer's faults."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = ThreadPoolExecutor(NUM_THREADS)
        self._room = threading.Semaphore(4 * NUM_THREADS)
        self._futures: list[Future[None]] = []
        self.faults: list[str] = []
        self.statuses: dict[str, Counter[int]] = {}

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for future in self._futures:
            future.result()

    def start(self, case: Case) -> None:
        assert self._room.acquire(timeout=2 * DEADLINE_S), "calls hang"
        future = self._pool.submit(self._call, case)
        future.add_done_callback(lambda _: self._room.release())
        self._futures.append(future)

    def _call(self, case: Case) -> None:
        import requests

        began_s = time.monotonic()
        try:
            answer = case.call(base_url=self._url, session=_session(), timeout=DEADLINE_S)
            case.validate_response(answer, checks=checks())
        except requests.RequestException as error:
            self.faults.append(f"{case.as_curl_command()}: {error!r}")
            return
        except BaseExceptionGroup as error:
            self.faults.append(str(error))
        self.statuses.setdefault(case.operation.label, Counter())[answer.status_code] += 1
        if time.monotonic() - began_s > DEADLINE_S:
            self.faults.append(f"{case.as_curl_command()}: took more than {DEADLINE_S:g} s")


@cache
def checks() -> list[Any]:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as found

    return [
        not_a_server_error,
        found.status_code_conformance,
        found.content_type_conformance,
        found.response_headers_conformance,
        found.response_schema_conformance,
        found.negative_data_rejection,
    ]


def _session() -> requests.Session:
    """Returns this thread's session, which ignores proxy settings."""
    import requests

    if not hasattr(local, "session"):
        local.session = requests.Session()
        local.session.trust_env = False
    found: requests.Session = local.session
    return found
