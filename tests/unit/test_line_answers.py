"""Requests of batches begin after all others, retry while others are served, and end with their own errors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pd_cluster.api.files import line_answers
from pd_cluster.api.files.line_admission import LineAdmission
from pd_cluster.api.files.line_answers import LineAnswer, LineAnswers
from pd_cluster.api.routes.in_process_api import ApiAnswer
from pd_cluster.cluster.queueing.fair_queue import FairQueue, QueueEntry
from pd_cluster.cluster.routing.router import Router
from pd_cluster.cluster.tenancy.tenant_counts import TenantCounts
from pd_cluster.errors import GenerationError, InstanceLost, ModelNotFound, Overloaded, RequestError, Unavailable
from pd_cluster.service.callers.caller import Caller
from pd_cluster.service.files.batch_lines import BatchEntry
from pd_cluster.service.files.batch_states import BatchObject, KeptBatch
from pd_cluster.service.files.batch_throttle import BatchThrottle
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.types.request_spec import BATCH_PRIORITY

URL = "/v1/completions"
ENTRY = BatchEntry(1, "a", URL, b"{}")
BATCH = BatchObject(id="batch_1", endpoint=URL, input_file_id="file-1", created_at=1, expires_at=2)
DECODE = SimpleNamespace(
    role="hybrid",
    takes_requests=True,
    num_slots=8,
    num_outstanding=0,
    num_long=0,
    prompt_tokens_ahead=0,
    num_current_sequences=0,
    num_sent_since=0,
    load=SimpleNamespace(
        prefill_tokens_per_s=0, num_running=0, num_waiting=0, num_expected=0, num_held_blocks=0, num_blocks=0
    ),
)


class Calls:
    """Raises these errors one after another, and then answers."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        self._errors, self.callers = [*errors], list[Caller]()

    async def call(self, path: str, body: bytes, caller: Caller) -> ApiAnswer:
        self.callers.append(caller)
        if caller.meter is not None:
            caller.meter.count()
        if self._errors:
            raise self._errors.pop(0)
        return ApiAnswer(b'"answer"', 1)


def router_of(num_waiting: int = 0) -> Any:
    streams = SimpleNamespace(on_opened=[], on_ended=[])
    membership = SimpleNamespace(instances=[DECODE])
    return SimpleNamespace(streams=streams, membership=membership, num_waiting=num_waiting)


def admission_of(router: Any, throttle: BatchThrottle | None = None) -> LineAdmission:
    return LineAdmission(cast(Router, router), throttle or BatchThrottle(8), lambda: True)


def answered(
    errors: Sequence[Exception], monkeypatch: pytest.MonkeyPatch, http: HttpConfig | None = None, owner: str = "name:t"
) -> tuple[LineAnswer, list[Caller]]:
    """Returns the answered line and the caller of each attempt; waits are short."""
    monkeypatch.setattr(line_answers, "LONGEST_WAIT_S", 0.0)
    monkeypatch.setattr(line_answers, "RETRY_S", 0.0)
    calls = Calls(errors)

    async def run() -> LineAnswer:
        admission = admission_of(router_of())
        answers = LineAnswers(cast(Any, calls), admission, http or HttpConfig(), TenantCounts(), lambda: False)
        kept = KeptBatch(batch=BATCH, owner=owner, output_id="", error_id="", models=("m",))
        async with asyncio.timeout(20):
            return await answers.answer(kept, ENTRY)

    return asyncio.run(run()), calls.callers


def test_it_waits_while_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [Overloaded("busy", 3), Unavailable("nobody"), *[Overloaded("busy")] * 20, GenerationError("lost")]
    answer, callers = answered(errors, monkeypatch)
    assert answer.is_complete
    assert msgspec.json.decode(answer.line)["response"]["body"] == "answer"
    assert len(callers) == len(errors) + 1


@pytest.mark.parametrize(
    ("error", "status", "num_tries"),
    [
        (RequestError("wrong", "x"), 400, 1),
        (ModelNotFound("no such model"), 404, 1),
        (InstanceLost("gone"), 500, 3),
        (ValueError("a bug"), 500, 1),
    ],
)
def test_its_own_errors_end_it(error: Exception, status: int, num_tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, callers = answered([error] * 9, monkeypatch)
    assert not answer.is_complete
    assert msgspec.json.decode(answer.line)["response"]["status_code"] == status
    assert len(callers) == num_tries
    assert b"a bug" not in answer.line


def test_it_is_its_owners_and_comes_after_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = HttpConfig(api_keys=("k",))
    _, (caller,) = answered([], monkeypatch, keys)
    assert (caller.tenant, caller.models) == ("name:t", ("m",))
    assert caller.client not in ("name:t", ""), "its owner's other requests must keep their share"
    assert caller.priority(1 - (1 << 31)) > (1 << 31)
    assert caller.meter is not None
    _, (caller,) = answered([], monkeypatch, HttpConfig())
    assert (caller.tenant, caller.meter) == ("", None)
    _, (caller,) = answered([], monkeypatch, HttpConfig(api_keys=("k",), shares_prefix_cache=True))
    assert caller.tenant == ""


def test_each_try_counts_by_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, str]] = []
    monkeypatch.setattr(TenantCounts, "ended", lambda self, tenant, outcome: ended.append((tenant, outcome)))
    errors = [Overloaded("busy"), RequestError("wrong")]
    answered(errors, monkeypatch, HttpConfig(api_keys=("k",)))
    answered([GenerationError("lost")], monkeypatch, HttpConfig(api_keys=("k",)), owner="key:1")
    assert ended == [("t", "refused"), ("t", "refused"), ("other", "failed"), ("other", "finished")]


def test_a_server_that_stops_writes_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_answers, "RETRY_S", 0.0)

    async def run() -> None:
        calls = Calls([GenerationError("the server is shutting down")] * 9)
        answers = LineAnswers(cast(Any, calls), admission_of(router_of()), HttpConfig(), TenantCounts(), lambda: True)
        kept = KeptBatch(batch=BATCH, owner="", output_id="", error_id="")
        assert (await answers.answer(kept, ENTRY)).is_complete, "it must continue until it is cancelled"

    asyncio.run(run())


def stream(name: str, priority: int = 0, heard_s: float = 0.0) -> Any:
    return SimpleNamespace(request_id=name, order=SimpleNamespace(priority=priority), heard_s=heard_s)


def test_requests_begin_when_nobody_waits() -> None:
    async def run() -> None:
        router = router_of(num_waiting=1)
        admission = admission_of(router)

        async def begin() -> None:
            async with admission.admitted():
                pass

        waiting = asyncio.ensure_future(begin())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        router.num_waiting = 0
        async with asyncio.timeout(10):
            await waiting

    asyncio.run(run())


def test_streams_tell_whose_they_are() -> None:
    async def run() -> None:
        router, throttle = router_of(), BatchThrottle(8)
        admission = admission_of(router, throttle)
        (opened,), (ended,) = router.streams.on_opened, router.streams.on_ended
        mine = stream("mine", BATCH_PRIORITY)
        async with admission.admitted():
            opened(mine)
            assert not throttle.is_beside_others(1e9)
            other = stream("other")
            opened(other)
            assert throttle.is_beside_others(1e9)
        ended(other, None)
        assert not throttle.is_beside_others(1e9)
        mine.heard_s = asyncio.get_running_loop().time() - 100
        throttle.paused_until_s = 0.0
        async with asyncio.timeout(10), admission.admitted():  # its first token has arrived, although unread
            ended(mine, None)

    asyncio.run(run())


def test_nobody_is_told_to_wait_for_a_batch() -> None:
    """Batches come after all other requests, so they do not count in expected waits."""
    queue = FairQueue()
    batch, other = queue.client("batch", 0.0), queue.client("other", 0.0)
    queue.join(QueueEntry(batch, 1000, 1, priority=BATCH_PRIORITY))
    assert queue.tokens_before(other) == 0
    queue.join(QueueEntry(other, 10, 1))
    first = queue.next(lambda entry: True)
    assert first is not None
    assert first.client is other
    queue.leave(first)
    last = queue.next(lambda entry: True)
    assert last is not None
    queue.leave(last)
    assert (batch.num_waiting_tokens, other.num_waiting_tokens) == (0, 0)
