"""A worker's trace events of transfers: cheap, bounded, from any thread, with each leg's end once."""

from __future__ import annotations

import threading

import pytest

from pd_cluster import wire
from pd_cluster.engine.leg_trace import MAX_EVENTS, LegNotes, Tracer
from pd_cluster.types import Leg, Request, RequestSpec, Sampling
from tests.support.clock import Clock


def make_request(leg: Leg = "prefill", index: int = 0, num_output_tokens: int = 0) -> Request:
    request = Request("r", RequestSpec([1] * 10, Sampling(n=2)), index=index, leg=leg, transfer_id="t")
    request.output_token_ids = [7] * num_output_tokens
    return request


@pytest.fixture
def clock() -> Clock:
    return Clock(5.0)


@pytest.fixture
def tracer(clock: Clock) -> Tracer:
    return Tracer(clock)


@pytest.fixture
def notes(tracer: Tracer, clock: Clock) -> LegNotes:
    return LegNotes(tracer.note, clock)


def told(tracer: Tracer) -> list[tuple[str, dict[str, int]]]:
    return [(event.what, event.numbers) for event in tracer.drain()]


def test_what_was_noted_comes_once_in_order_with_its_time(tracer: Tracer, clock: Clock) -> None:
    """Events come once, in order, with their times; if they are not drained, the oldest are lost."""
    tracer.note("a", "offered")
    clock.now_s = 6.5
    tracer.note("b", "sent", start=0, stop=16)
    sent = wire.TraceEvent("b", 6.5, "sent", {"start": 0, "stop": 16})
    assert tracer.drain() == [wire.TraceEvent("a", 5.0, "offered"), sent]
    assert tracer.drain() == []
    for at in range(MAX_EVENTS + 5):
        tracer.note("t", "chunk", start=at)
    events = tracer.drain()
    assert len(events) == MAX_EVENTS
    assert (events[0].numbers, events[-1].numbers) == ({"start": 5}, {"start": MAX_EVENTS + 4})


def test_threads_note_while_another_drains(tracer: Tracer) -> None:
    """No event is lost or repeated, and each thread's events stay in order."""
    num_threads, num_events = 4, 3000

    def work(name: str) -> None:
        for at in range(num_events):
            tracer.note(name, "sent", at=at)

    threads = [threading.Thread(target=work, args=(str(at),)) for at in range(num_threads)]
    for thread in threads:
        thread.start()
    found: list[wire.TraceEvent] = []
    while any(thread.is_alive() for thread in threads):
        found += tracer.drain()
    found += tracer.drain()
    for at in range(num_threads):
        assert [e.numbers["at"] for e in found if e.transfer_id == str(at)] == list(range(num_events))


# ---- a leg


def test_a_prefill_leg(tracer: Tracer, notes: LegNotes, clock: Clock) -> None:
    request = make_request()
    notes.submitted(request, None)
    request.num_cached_tokens = request.num_computed_tokens = 4
    notes.admitted(request)
    request.num_computed_tokens = 6
    clock.now_s = 5.25
    notes.computed([(request, 2)], started_s=5.0)
    request.num_computed_tokens = 10
    request.output_token_ids = [7]
    notes.computed([(make_request("hybrid"), 1), (request, 4)], started_s=5.2)
    notes.ended(request, is_last=True)
    assert told(tracer) == [
        ("submitted", {}),
        ("admitted", {"num_tokens": 10, "num_cached": 4}),
        ("chunk", {"start": 4, "stop": 6, "took_us": 250_000}),
        ("chunk", {"start": 6, "stop": 10, "took_us": 50_000}),
        ("first token", {}),
        ("finished", {"num_tokens": 1}),
    ]


def test_a_decode_legs_tokens_are_those_of_all_its_sequences(tracer: Tracer, notes: LegNotes) -> None:
    sequences = [make_request("decode", index, num_output_tokens=3 + index) for index in range(2)]
    notes.joined(sequences[0], num_ended=1)
    notes.ended(sequences[1], is_last=False)
    notes.ended(sequences[0], is_last=True)
    assert told(tracer) == [("decode start", {}), ("finished", {"num_tokens": 8})]


def test_a_leg_that_failed_has_not_finished(tracer: Tracer, notes: LegNotes) -> None:
    request = make_request()
    for _ in range(2):  # a later leg with the same id starts anew
        notes.failed(request)
        notes.ended(request, is_last=True)
    notes.ended(request, is_last=True)
    assert [what for what, _ in told(tracer)] == ["failed", "failed", "finished"]
    notes.submitted(make_request(), "too long")
    assert [what for what, _ in told(tracer)] == ["submitted", "failed"]
