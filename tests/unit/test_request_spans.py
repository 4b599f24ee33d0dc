"""A request's timeline converted to spans, with a clock that the test sets."""

from __future__ import annotations

from pd_cluster.cluster.records.request_spans import Names, TraceSpan, is_reported, spans_of
from pd_cluster.cluster.records.request_stats import Outcome
from pd_cluster.cluster.records.request_timeline import RequestNames, Timeline, Timelines
from pd_cluster.wire import TraceEvent

PREFILL, DECODE = ("conn-p", "prefill-0"), ("conn-d", "decode-0")


class World:
    """Workers' clocks are 100 s ahead of the scheduler's, and messages take no time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timelines = Timelines(clock=lambda: self.now_s)
        self.now_s = 1.0
        self.timelines.routed(RequestNames("r", "r-0", "cmpl-1"), 0.0, 7, PREFILL, DECODE)

    def at(self, now_s: float, conn: str, transfer_id: str, *whats: str, **numbers: int) -> None:
        self.now_s = now_s
        self.timelines.heard(conn, now_s + 100)
        self.timelines.add(conn, [TraceEvent(transfer_id, now_s + 100, what, numbers) for what in whats])

    @property
    def timeline(self) -> Timeline:
        found = self.timelines.find("r")
        assert found is not None
        return found


def shape(span: TraceSpan) -> tuple[object, ...]:
    return (span.name, span.start_s, span.end_s, *(shape(part) for part in span.parts))


def handed_over() -> World:
    world = World()
    world.at(1.5, "conn-p", "r-0", "submitted")
    world.at(2.0, "conn-p", "r-0", "admitted", num_tokens=7, num_cached=4)
    world.at(2.0, "conn-p", "r-0", "offered")
    world.at(1.5, "conn-d", "r-0", "submitted")
    world.at(2.25, "conn-d", "r-0", "offered", "credited")
    world.at(3.0, "conn-p", "r-0", "first token")
    world.at(3.5, "conn-d", "r-0", "landed", nbytes=640)
    world.at(3.75, "conn-d", "r-0", "landing complete", "confirmed", "decode start")
    world.at(4.0, "conn-p", "r-0", "finished")
    return world


def test_the_parts_of_a_request() -> None:
    world = handed_over()
    world.now_s = 6.0
    world.timelines.ended("r")
    assert not is_reported(world.timeline)
    world.at(6.25, "conn-d", "r-0", "finished", num_tokens=9)
    assert is_reported(world.timeline)
    queue, attempt = spans_of(world.timeline)
    assert shape(queue) == ("queue", 0.0, 1.0)
    prefill, handover, decode = attempt.parts
    assert shape(attempt) == ("attempt", 1.0, 6.0, shape(prefill), shape(handover), shape(decode))
    assert shape(prefill) == ("prefill", 1.5, 3.0)
    assert shape(handover) == ("handover", 2.25, 3.75)
    assert shape(decode) == ("decode", 3.75, 6.0), "clipped, as the worker's message came after the answer's end"
    assert prefill.attributes == {Names.INSTANCE: "prefill-0", Names.NUM_TOKENS: 7, Names.NUM_CACHED: 4}
    assert handover.attributes == {Names.INSTANCE: "decode-0", Names.NUM_BYTES: 640, Names.SENDER: "prefill-0"}
    assert decode.attributes == {Names.INSTANCE: "decode-0", Names.NUM_TOKENS: 9}
    assert not any(span.error for span in (queue, attempt, prefill, handover, decode))


def test_a_killed_worker_and_a_replay() -> None:
    world = handed_over()
    world.now_s = 5.0
    world.timelines.replayed("r", "r-1", *PREFILL, why="decode-0 was lost")
    world.at(5.5, "conn-p", "r-1", "submitted")
    world.at(7.0, "conn-p", "r-1", "finished", num_tokens=9)
    world.timelines.ended("r")
    assert is_reported(world.timeline), "a killed worker must not be waited for"
    _, first, second = spans_of(world.timeline)
    assert (first.error, second.error) == ("decode-0 was lost", "")
    decode = first.parts[2]
    assert shape(decode) == ("decode", 3.75, 5.0), "the span must end with its attempt"
    assert (decode.error, decode.attributes[Names.UNREPORTED]) == ("decode-0 did not report an end", True)
    assert shape(second) == ("attempt", 5.0, 7.0, ("generate", 5.5, 7.0))
    assert [span.attributes[Names.TRANSFER_ID] for span in (first, second)] == ["r-0", "r-1"]


def test_an_answer_of_one_token_needs_no_handover() -> None:
    outcome = Outcome(["length"], [1], 7, 9, 0.0, 3.0, 4.0)
    world = World()
    world.at(1.5, "conn-p", "r-0", "submitted")
    world.at(2.0, "conn-p", "r-0", "admitted", "offered")
    world.at(3.0, "conn-p", "r-0", "first token", "finished")
    world.timelines.ended("r")
    _, attempt = spans_of(world.timeline, outcome)
    assert shape(attempt) == ("attempt", 1.0, 3.0, ("prefill", 1.5, 3.0))
    assert attempt.parts[0].error == ""
    world = World()
    world.at(2.0, "conn-d", "r-0", "offered", "landed", nbytes=640)
    world.now_s = 3.0
    world.timelines.ended("r")
    (handover,) = spans_of(world.timeline, outcome)[1].parts
    assert (shape(handover), handover.error) == (("handover", 2.0, 3.0), "")
