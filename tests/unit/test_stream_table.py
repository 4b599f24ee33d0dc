"""A stream table notifies its listener of each stream's opening and end once, and of nothing afterwards."""

from __future__ import annotations

import random

from pd_cluster import wire
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.streams.request_origin import FROM_ANYBODY, AdmittedRequest, RequestOrigin
from pd_cluster.cluster.streams.request_stream import RequestStream, ask_of
from pd_cluster.cluster.streams.stream_records import KeptStream, RecordPlace
from pd_cluster.cluster.streams.stream_table import StreamEnd, StreamTable
from pd_cluster.errors import GenerationError
from pd_cluster.types import RequestSpec
from tests.support.router_world import PROMPT, SAMPLING, ready, run

ORDER, LEFT = RequestSpec(PROMPT, SAMPLING), StreamEnd("left", None, "abort")


class Heard:
    def __init__(self, table: StreamTable) -> None:
        self.table = table
        self.opened: list[RequestStream] = []
        self.begun: list[RequestStream] = []
        self.over: list[tuple[RequestStream, int]] = []
        self.ended: list[tuple[RequestStream, StreamEnd]] = []
        table.on_opened.append(self.hear_opened)
        table.on_begun.append(self.begun.append)
        table.on_attempt_over.append(lambda stream: self.over.append((stream, stream.attempt)))
        table.on_ended.append(self.hear_ended)

    def hear_opened(self, stream: RequestStream) -> None:
        assert stream in self.table
        self.opened.append(stream)

    def hear_ended(self, stream: RequestStream, end: StreamEnd) -> None:
        assert stream not in self.table
        self.ended.append((stream, end))


def heard_table() -> tuple[StreamTable, Heard]:
    table = StreamTable(lambda *_: None, RequestStats())
    return table, Heard(table)


def open_in(table: StreamTable, origin: RequestOrigin = FROM_ANYBODY) -> RequestStream:
    instance = ready("decode-0")
    return table.open(ORDER, origin, AdmittedRequest(ask_of(ORDER), instance, instance))


def found(name: str) -> RequestOrigin:
    place = RecordPlace(ready("decode-0"), wire.Found(b"d" * 32, name, 2, ORDER))
    return RequestOrigin(kept=KeptStream(wire.Keep(b"d" * 32, 60.0, 1 << 20, b""), place))


def test_each_stream_ends_once_in_whatever_order() -> None:
    """Streams may end by their reader, by a takeover, or both, while others are open."""
    rng = random.Random(5)
    for _ in range(50):
        table, heard = heard_table()
        streams = [open_in(table) for _ in range(6)]
        works = [(stream, is_taken) for stream in streams for is_taken in (False, True)]
        rng.shuffle(works)
        for stream, is_taken in works:
            if not is_taken:
                table.end(stream, LEFT)
            elif stream in table:
                table.take_over(stream, "go on")
        assert heard.opened == streams
        assert sorted(stream.request_id for stream, _ in heard.ended) == sorted(each.request_id for each in streams)
        assert (len(table), list(table)) == (0, [])


def test_a_stream_that_was_taken_over_begins_no_more() -> None:
    """Its reader may still read received tokens, under an id that its successor now has."""
    table, heard = heard_table()
    first = open_in(table)
    later = open_in(table, found(first.request_id))
    table.begun(first)
    table.begun(later)
    table.end(first, LEFT)
    assert (heard.opened, heard.begun) == ([first, later], [later])
    assert [(stream, end.how, end.then) for stream, end in heard.ended] == [(first, "failed", "leave")]
    assert (later.request_id, later.attempt, table.find(first.request_id)) == (first.request_id, 2, later)


def test_an_attempt_is_over_before_the_next_has_its_number() -> None:
    """Messages to the old attempt's instances must still have its number."""

    async def test() -> None:
        table, heard = heard_table()
        stream = open_in(table)
        table.retreat(stream, GenerationError("lost"), "death")
        table.move(stream, "its drain is over")
        assert heard.over == [(stream, 0), (stream, 1)]
        assert (stream.attempt, stream.num_moves, len(stream.inbox)) == (2, 1, 2)
        assert (list(table), heard.ended) == ([stream], [])

    run(test())
