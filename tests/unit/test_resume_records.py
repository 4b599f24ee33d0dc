"""Records of resumable streams at a worker, by the table of docs/protocol/requests.md."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_cluster import wire
from pd_cluster.cluster.streams.stream_records import KeptStream
from pd_cluster.engine.legs.leg_records import GONE, NoRecords
from pd_cluster.engine.legs.leg_table import LegTable
from pd_cluster.engine.legs.output_batcher import NOBODY, OutputBatcher
from pd_cluster.extras.resumable_streams.resume_records import STOPPED, TAKEN, Records
from pd_cluster.extras.resumable_streams.stream_tickets import ResumeRecord, StreamTicket
from pd_cluster.types import LegEnd, Logprobs, PromptOutput, Request, RequestSpec, Sampling, TokenOutput
from tests.support.resume_values import DIGEST, OTHER, ROOM, WINDOW_S

S, S2 = "conn-of-s", "conn-of-s2"


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.sent: list[tuple[str, Any]] = []
        post: Any = SimpleNamespace(send=lambda conn, body: self.sent.append((conn, body)))
        tracer: Any = SimpleNamespace(drain=list)
        self.output_batcher = OutputBatcher(post, tracer, lambda: self.now_s)
        self.legs = LegTable()
        self.records = Records(self.legs, self.output_batcher, lambda: self.now_s)

    def open(
        self, name: str = "r", digest: bytes = DIGEST, room: int = ROOM, attempt: int = 0, conn: str = S, **more: Any
    ) -> Request:
        keep = wire.Keep(digest, WINDOW_S, room, b"recipe", **more)
        order = RequestSpec([1, 2, 3], Sampling(max_tokens=9))
        request = Request(name, order, attempt=attempt, client=conn)
        self.legs.add([request], 1, None)
        self.records.open(conn, wire.Submit(name, attempt, "t", "decode", "p@1", order, 0.0, keep=keep))
        return request

    @property
    def clients(self) -> dict[str, str | None]:
        """Drops unwanted legs; returns running leg -> its reader."""
        while self.legs.unwanted:
            self.legs.sequences.pop(self.legs.unwanted.pop(), None)
        return {key: self.legs.client_of(key) for key in self.legs.sequences}

    def release(self, name: str = "r", then: Any = "go on", attempt: int = 0, conn: str = S) -> None:
        self.records.read(conn, wire.Release(name, attempt, then))

    def note(self, request: Request, *positions: int, last: bool = False) -> None:
        self.records.note(request, [token(each, last, request.attempt, request.request_id) for each in positions])

    def end_leg(self, request: Request) -> None:
        self.legs.remove(request)
        self.records.leg_ended(request)

    def found(self, digest: bytes = DIGEST) -> wire.Found:
        self.records.read(S2, wire.Find(digest))
        found = self.sent.pop()[1]
        assert isinstance(found, wire.Found)
        assert found.digest == digest
        return found

    def attach(self, conn: str = S2, attempt: int = 0) -> dict[str, list[wire.Outputs]]:
        """Lets a scheduler attach to the stream; returns the messages to each scheduler."""
        self.sent.clear()
        self.records.read(conn, wire.Attach(DIGEST, "r", attempt))
        return self.told()

    def told(self) -> dict[str, list[wire.Outputs]]:
        self.output_batcher.flush()
        told: dict[str, list[wire.Outputs]] = {}
        for to, body in self.sent:
            told.setdefault(to, []).append(body)
        return told


def token(position: int, last: bool = False, attempt: int = 0, name: str = "r", top: int = -1) -> TokenOutput:
    logprobs = Logprobs(-1.5, 1, [(each, -1.0) for each in range(top)]) if top >= 0 else None
    return TokenOutput(name, attempt, 0, position, 40 + position, "length" if last else None, logprobs)


@pytest.fixture
def world() -> World:
    return World()


def test_a_reader_is_lost_and_another_one_gets_everything(world: World) -> None:
    request = world.open()
    for prompt in (PromptOutput("r", 1, 3), PromptOutput("r", 0, 2), PromptOutput("r", 0, 1)):
        world.records.note_prompt(prompt)  # from another attempt, then the first attempt's, which counts, and again
    for position in range(3):
        world.note(request, position)
    world.records.closed(S)
    assert world.clients == {"r#0": NOBODY}
    world.note(request, 2, 3)  # one token repeated
    found = world.found()
    assert (found.request_id, found.attempt, found.recipe, found.num_tokens) == ("r", 0, b"recipe", 4)
    ((outputs,),) = world.attach().values()
    assert [each.position for each in outputs.tokens] == [0, 1, 2, 3]
    assert outputs.prompts == [PromptOutput("r", 0, 2)]
    assert outputs.ended == []
    assert world.clients == {"r#0": S2}
    world.now_s = 10 * WINDOW_S
    world.records.expire(world.now_s)
    assert world.found().num_tokens == 4  # it has a reader


def test_the_later_reader_takes_over(world: World) -> None:
    world.open()
    told = world.attach(S2)
    assert told[S][0].ended == [LegEnd("r", 0, TAKEN, is_taken=True)]
    assert S2 not in told
    world.release(then="forget")  # from a reader that is no longer attached
    assert world.found().order is not None
    assert world.clients == {"r#0": S2}
    assert world.attach(S2) == {}  # the same one again
    for digest in (OTHER, b"x" * 32):
        assert world.found(digest) == wire.Found(digest)


def test_after_the_window_there_is_nothing(world: World) -> None:
    world.open()
    world.release()
    world.now_s = WINDOW_S + 0.01
    assert world.found() == wire.Found(DIGEST)  # even before the tick
    world.records.expire(world.now_s)
    assert not world.records
    assert world.records.nbytes == 0
    assert world.clients == {}
    assert world.attach()[S2][0].ended == [LegEnd("r", 0, GONE, is_fault=True)]


@pytest.mark.parametrize(
    ("then", "runs", "stays"), [("go on", True, True), ("stop", False, True), ("forget", False, False)]
)
def test_what_becomes_of_a_stream_that_is_not_read(world: World, then: Any, runs: bool, stays: bool) -> None:
    world.open()
    world.release(then=then)
    assert ("r#0" in world.clients) is runs
    assert (world.found().order is not None) is stays


def test_a_leg_that_stopped_is_a_fault_for_the_next_reader(world: World) -> None:
    request = world.open()
    world.note(request, 0)
    world.end_leg(request)
    outputs = world.attach()[S2][0]
    assert len(outputs.tokens) == 1
    assert outputs.ended == [LegEnd("r", 0, STOPPED, is_fault=True)]
    world.now_s = WINDOW_S + 1  # S2 makes the next attempt elsewhere, and never reports
    world.records.expire(world.now_s)
    assert not world.records


def test_a_whole_answer_waits_for_its_reader_and_is_not_kept_for_ever(world: World) -> None:
    request = world.open()
    world.note(request, 0)
    world.note(request, 1, last=True)
    world.end_leg(request)
    world.records.aborted(S2, wire.Abort("r", 0))  # S2 is not its reader
    world.records.expire(5 * WINDOW_S)
    assert world.attach()[S2][0].ended == []
    world.records.aborted(S2, wire.Abort("r", 0))
    world.records.expire(5 * WINDOW_S)
    assert not world.records


def test_what_cannot_go_on_is_forgotten(world: World) -> None:
    """Covers a failed request, a stream without an instance for its next attempt, and several sequences."""
    world.records.failed(world.open())
    assert (bool(world.records), world.records.nbytes) == (False, 0)
    world.end_leg(world.open())
    world.release(then="forget", attempt=1)
    assert world.found() == wire.Found(DIGEST)
    assert world.records.nbytes == 0
    order = RequestSpec([1], Sampling(n=2))
    world.records.open(S, wire.Submit("r", 0, "t", "decode", "", order, 0.0, keep=wire.Keep(DIGEST, 1.0, ROOM, b"")))
    assert not world.records


def test_a_later_attempt_has_what_was_told(world: World) -> None:
    request = world.open(attempt=2, tokens=[token(0), token(1)], prompt=PromptOutput("r", 0, 7))
    world.note(request, 2)
    outputs = world.attach(attempt=2)[S2][0]
    assert [(each.position, each.attempt) for each in outputs.tokens] == [(0, 2), (1, 2), (2, 2)]
    assert outputs.prompts == [PromptOutput("r", 2, 7)]


def test_room_is_made_by_those_without_readers_then_the_growing_one_is_forgotten(world: World) -> None:
    requests = [world.open(f"r{at}", bytes([at]) * 32, room=3000) for at in range(3)]
    for at in (1, 0):
        world.release(f"r{at}")
        world.now_s += 1
    world.note(requests[2], *range(17))  # 2,720 bytes
    assert world.found(b"\1" * 32).order is None
    assert world.found(b"\0" * 32).order is not None
    assert set(world.clients) == {"r0#0", "r2#0"}
    world.records.note(requests[2], [token(17, top=20)])
    assert world.found(b"\2" * 32).order is None  # too large by itself, so nothing was evicted for it
    assert world.found(b"\0" * 32).order is not None
    assert world.clients == {"r0#0": NOBODY, "r2#0": S}  # its reader continues
    world.release("r2")
    assert set(world.clients) == {"r0#0"}, "its leg must continue without a record"


def test_a_tenants_streams_take_no_room_of_anothers(world: World) -> None:
    """However many streams one tenant has, with or without readers, another's old and new streams are kept."""
    world.note(world.open("mine", b"\xff" * 32, room=3000, owner=b"me"), *range(5))
    world.release("mine")  # parked, and the first to expire
    for at in range(40):
        world.now_s += 0.01
        world.note(world.open(f"r{at}", bytes([at]) * 32, room=3000, owner=b"they"), *range(3))
        if at % 2:
            world.release(f"r{at}")
        assert world.records.nbytes <= 3000
        assert world.found(b"\xff" * 32).order is not None
    world.note(world.open("new", b"\xfe" * 32, room=3000, owner=b"me"), *range(3))
    assert world.found(b"\xfe" * 32).order is not None
    assert world.found(b"\xff" * 32).order is not None


def test_nobody_makes_room_where_it_would_not_be_enough(world: World) -> None:
    requests = [world.open(f"r{at}", bytes([at]) * 32, room=3000) for at in range(3)]
    world.release("r0")
    world.note(requests[1], *range(16))  # it has a reader
    world.note(requests[2], *range(4))
    assert [world.found(bytes([at]) * 32).order is None for at in range(3)] == [False, False, True]
    assert "r0#0" in world.clients


@pytest.mark.parametrize("conn", [S, S2])
def test_the_next_attempt_ends_the_leg_before_and_takes_the_stream_from_another_scheduler(
    world: World, conn: str
) -> None:
    world.open()
    if conn == S:
        world.records.closed(S)  # S has reconnected, and its next attempt reaches the same instance
    world.open(attempt=1, conn=conn)
    assert world.clients == {"r#1": conn}
    ended = {to: each.ended for to, outputs in world.told().items() for each in outputs}
    assert ended == ({} if conn == S else {S: [LegEnd("r", 0, TAKEN, is_taken=True)]})


def test_a_reader_that_lost_the_leg_hears_of_the_next_one(world: World) -> None:
    world.end_leg(world.open())  # S now looks for an instance
    assert world.attach(S2)[S][0].ended == [LegEnd("r", 0, TAKEN, is_taken=True)]  # S2 finds the stream as well
    world.release(then="forget", attempt=1)  # S has given up
    assert world.found().order is not None
    world.records.closed(S2)
    assert set(world.attach(S)) == {S}


def test_nothing_secret_is_shown() -> None:
    ticket = StreamTicket.new("tenant")
    keep = wire.Keep(ticket.digest, 1.0, 1, b"what a client wrote")
    found = wire.Found(ticket.digest, "r", 0, RequestSpec([1], Sampling()), b"what a client wrote")
    recipe = ResumeRecord("chat", b"what a client wrote", "id", 1)
    shown = repr([ticket, keep, found, recipe, KeptStream(keep)])
    assert ticket.token not in shown
    assert repr(ticket.digest)[2:10] not in shown
    assert "wrote" not in shown


def test_without_the_extra_no_stream_resumes(world: World) -> None:
    records = NoRecords(world.legs, world.output_batcher)
    world.records = cast(Any, records)
    world.note(world.open(), 0)
    assert (world.found(), len(records)) == (wire.Found(DIGEST), 0)
    assert world.attach(S2)[S2][0].ended == [LegEnd("r", 0, GONE, is_fault=True)]
    world.release(conn=S2)
    assert world.clients == {"r#0": S}
    world.release(conn=S)
    assert world.clients == {}
