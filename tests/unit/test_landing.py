"""A landing must have every token once in every layer, in order and within bounds; otherwise the transfer fails."""

from __future__ import annotations

import pytest

from pd_cluster import wire
from pd_cluster.devices.device import CPU
from pd_cluster.kv.pool_route import PoolRoute
from pd_cluster.transport.landing import Geometry, Lander
from pd_cluster.transport.link_copies import Copies
from pd_cluster.transport.link_events import Arrived, Landed, LandFault
from pd_cluster.types import TokenOutput

TOKEN = TokenOutput("r", 0, 0, 0, 5)
GEOMETRY = Geometry(num_layers=4, source_block_size=4, target_block_size=4)
NUM_TOKENS = 10


class Recorder:
    """A receiver that records where payloads are written."""

    name: wire.TransportName = "local"
    route: PoolRoute  # never used

    def __init__(self) -> None:
        self.copies = Copies(CPU)
        self.into: list[list[int] | None] = []

    def open(self) -> None: ...
    def expect(self, sequence: int, chunk: wire.KVChunk) -> None: ...
    def receive(self, sequence: int, chunk: wire.KVChunk, into: list[int] | None) -> None:
        self.into.append(into)

    def close(self) -> None: ...


def chunk(
    index: int, start: int, stop: int, first_layer: int = 0, stop_layer: int = 4, blocks: int = -1
) -> wire.KVChunk:
    count = blocks if blocks >= 0 else -(-stop // 4) - start // 4
    piece = wire.KVPiece(start, stop - start, first_layer, stop_layer - first_layer, list(range(count)))
    return wire.KVChunk("t", index, piece, 64, 0)


def end(num_chunks: int, num_tokens: int = NUM_TOKENS) -> wire.KVEnd:
    return wire.KVEnd("t", num_chunks, num_tokens, [TOKEN])


def land(
    items: list[wire.KVChunk | wire.KVEnd], first_token: int = 0, geometry: Geometry = GEOMETRY
) -> tuple[Recorder, list[object]]:
    recorder = Recorder()
    lander = Lander(recorder, geometry)
    lander.begin("t", [10, 11, 12, 13, 14], first_token, NUM_TOKENS)
    return recorder, [lander.land(at, item) for at, item in enumerate(items)]


@pytest.mark.parametrize(
    "items",
    [
        [chunk(0, 0, 10), end(1)],
        [chunk(0, 0, 4), chunk(1, 4, 10), end(2)],
        [chunk(0, 0, 8, 0, 2), chunk(1, 0, 8, 2, 4), chunk(2, 8, 10), end(3)],
        [chunk(0, 0, 4, 0, 2), chunk(1, 4, 10, 0, 2), chunk(2, 0, 10, 2, 4), end(3)],
    ],
)
def test_a_whole_transfer_lands(items: list[wire.KVChunk | wire.KVEnd]) -> None:
    recorder, events = land(items)
    assert events[-1] == Landed("t", [TOKEN], 64 * (len(items) - 1))
    assert events[:-1] == [None] * (len(items) - 2) + [Arrived("t")]
    assert None not in recorder.into


def test_pieces_go_to_the_blocks_of_their_tokens() -> None:
    recorder, _ = land([chunk(0, 4, 10), end(1)], first_token=4)
    assert recorder.into == [[11, 12]]
    smaller = Geometry(num_layers=4, source_block_size=4, target_block_size=2)
    recorder, events = land([chunk(0, 2, 10), end(1)], first_token=2, geometry=smaller)
    assert recorder.into == [[11, 12, 13, 14]]
    assert isinstance(events[-1], Landed)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([chunk(1, 0, 10)], "0 was expected"),
        ([chunk(0, 0, 10), chunk(0, 0, 10)], "1 was expected"),
        ([chunk(0, 0, 10), chunk(1, 0, 10)], "layers before 0"),
        ([chunk(0, 0, 10, 1, 4)], "layers before 1"),
        ([chunk(0, 0, 12)], "tokens 0 to 12 of a prompt of 10"),
        ([chunk(0, -4, 4, blocks=2)], "tokens -4 to 4"),
        ([chunk(0, 0, 10, 0, 5)], "layers 0 to 5 of 4"),
        ([chunk(0, 0, 10, -1, 2)], "layers -1 to 2"),
        ([chunk(0, 0, 10, 2, 2)], "layers 2 to 2"),
        ([chunk(0, 0, 10, blocks=2)], "2 blocks for tokens 0 to 10"),
        ([chunk(0, 2, 10)], "inside a block"),
        ([end(0)], "10 of 10 tokens were missing"),
        ([chunk(0, 0, 10, 0, 3), end(1)], "10 of 10 tokens were missing"),
        ([chunk(0, 0, 10), end(2)], "1 of 2 chunks"),
        ([chunk(0, 0, 10), end(1, 11)], "transfer of 11 tokens"),
    ],
)
def test_what_does_not_fit_ends_the_transfer(items: list[wire.KVChunk | wire.KVEnd], words: str) -> None:
    recorder, events = land([*items, chunk(0, 0, 10)])
    fault = events[-2]
    assert isinstance(fault, LandFault)
    assert words in fault.reason
    assert events[-1] is None
    assert recorder.into[-1] is None, "after a fault nothing of this transfer may land"


def test_tokens_that_are_here_already_are_never_written() -> None:
    recorder, events = land([chunk(0, 0, 10), end(1)], first_token=4)
    assert isinstance(events[0], LandFault)
    assert recorder.into == [None]


def test_the_payload_of_an_unknown_transfer_is_taken_off_the_wire() -> None:
    recorder = Recorder()
    lander = Lander(recorder, GEOMETRY)
    assert lander.land(0, chunk(0, 0, 10)) is None
    assert lander.land(1, end(1)) is None
    assert recorder.into == [None]
