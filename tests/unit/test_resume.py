"""Records of streams at a worker, by the table of docs/protocol.md, and the scheduler's part of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.api.gate.http import Last
from pd_cluster.api.openai.kept_streams import numbered
from pd_cluster.cluster.routing.resume import Finder, KeptStream
from pd_cluster.engine.outbox import NOBODY, Outbox
from pd_cluster.engine.resume import GONE, STOPPED, TAKEN, Records
from pd_cluster.errors import GenerationError, Overloaded
from pd_cluster.parsers.reply import ReplyFormat
from pd_cluster.service.resumption import Recipe, Ticket
from pd_cluster.types import LegEnd, Logprobs, Order, PromptOutput, Request, Sampling, TokenOutput
from tests.support.router_world import World as RouterWorld
from tests.support.router_world import run

DIGEST, OTHER = b"d" * 32, b"d" * 8 + b"e" * 24
S, S2 = "conn-of-s", "conn-of-s2"
WINDOW_S, ROOM = 30.0, 100_000


class Legs:
    def __init__(self) -> None:
        self.clients: dict[str, str] = {}  # of legs that run
        self.aborted: list[tuple[str, wire.Abort]] = []

    def runs(self, key: str) -> bool:
        return key in self.clients

    def readdress(self, key: str, client: str) -> None:
        if key in self.clients:
            self.clients[key] = client

    def drop_if_it_runs(self, key: str) -> None:
        self.clients.pop(key, None)

    def abort(self, conn: str, abort: wire.Abort) -> None:
        self.aborted.append((conn, abort))


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.sent: list[tuple[str, Any]] = []
        post: Any = SimpleNamespace(send=lambda conn, body: self.sent.append((conn, body)))
        tracer: Any = SimpleNamespace(drain=list)
        self.outbox = Outbox(post, tracer, lambda: self.now_s)
        self.legs = Legs()
        self.records = Records(self.legs, self.outbox, lambda: self.now_s)

    def open(self, name: str = "r", digest: bytes = DIGEST, room: int = ROOM, attempt: int = 0, **more: Any) -> Request:
        keep = wire.Keep(digest, WINDOW_S, room, b"recipe", **more)
        order = Order([1, 2, 3], Sampling(max_tokens=9))
        self.legs.clients[f"{name}#{attempt}"] = S
        self.records.open(S, wire.Submit(name, attempt, "t", "decode", "p@1", order, 0.0, keep=keep))
        return Request(name, order, attempt=attempt, client=S)

    def found(self, digest: bytes = DIGEST, conn: str = S2) -> wire.Found:
        self.records.read(conn, wire.Find(digest))
        found = self.sent.pop()[1]
        assert isinstance(found, wire.Found)
        assert found.digest == digest
        return found

    def attach(self, conn: str = S2, attempt: int = 0) -> dict[str, list[wire.Outputs]]:
        """Returns what each scheduler hears."""
        self.sent.clear()
        self.records.read(conn, wire.Attach(DIGEST, "r", attempt))
        self.outbox.flush()
        told: dict[str, list[wire.Outputs]] = {}
        for to, body in self.sent:
            told.setdefault(to, []).append(body)
        return told


def token(position: int, last: bool = False, attempt: int = 0, top: int = -1) -> TokenOutput:
    logprobs = Logprobs(-1.5, 1, [(each, -1.0) for each in range(top)]) if top >= 0 else None
    return TokenOutput("r", attempt, 0, position, 40 + position, "length" if last else None, logprobs)


@pytest.fixture
def world() -> World:
    return World()


def test_a_reader_is_lost_and_another_one_gets_everything(world: World) -> None:
    request = world.open()
    world.records.note_prompt(PromptOutput("r", 1, 3))  # of another attempt
    world.records.note_prompt(PromptOutput("r", 0, 2))
    world.records.note_prompt(PromptOutput("r", 0, 1))  # the first one counts
    for position in range(3):
        world.records.note(request, [token(position)])
    world.records.closed(S)
    assert world.legs.clients == {"r#0": NOBODY}
    world.records.note(request, [token(2), token(3)])  # one of them again
    found = world.found()
    assert (found.request_id, found.attempt, found.recipe, found.num_tokens) == ("r", 0, b"recipe", 4)
    ((outputs,),) = world.attach().values()
    assert [each.position for each in outputs.tokens] == [0, 1, 2, 3]
    assert outputs.prompts == [PromptOutput("r", 0, 2)]
    assert outputs.ended == []
    assert world.legs.clients == {"r#0": S2}
    world.now_s = 10 * WINDOW_S
    world.records.expire(world.now_s)
    assert world.found().num_tokens == 4  # it has a reader


def test_the_later_reader_takes_over(world: World) -> None:
    world.open()
    told = world.attach(S2)
    assert told[S][0].ended == [LegEnd("r", 0, TAKEN, is_taken=True)]
    assert S2 not in told
    world.records.read(S, wire.Release("r", 0, "forget"))  # of a reader that it has no longer
    assert world.found().order is not None
    assert world.legs.clients == {"r#0": S2}
    assert world.attach(S2) == {}  # the same one again


@pytest.mark.parametrize("digest", [OTHER, b"x" * 32])
def test_another_digest_finds_nothing(world: World, digest: bytes) -> None:
    world.open()
    assert world.found(digest) == wire.Found(digest)


def test_after_the_window_there_is_nothing(world: World) -> None:
    world.open()
    world.records.read(S, wire.Release("r", 0, "go on"))
    world.now_s = WINDOW_S + 0.01
    assert world.found() == wire.Found(DIGEST)  # even before the tick
    world.records.expire(world.now_s)
    assert not world.records
    assert world.records.nbytes == 0
    assert world.legs.clients == {}
    assert world.attach()[S2][0].ended == [LegEnd("r", 0, GONE, is_fault=True)]


@pytest.mark.parametrize(
    ("then", "runs", "stays"), [("go on", True, True), ("stop", False, True), ("forget", False, False)]
)
def test_what_becomes_of_a_stream_that_is_not_read(world: World, then: Any, runs: bool, stays: bool) -> None:
    world.open()
    world.records.read(S, wire.Release("r", 0, then))
    assert world.legs.runs("r#0") is runs
    assert (world.found().order is not None) is stays


def test_a_leg_that_stopped_is_a_fault_for_the_next_reader(world: World) -> None:
    request = world.open()
    world.records.note(request, [token(0)])
    del world.legs.clients["r#0"]
    world.records.leg_ended(request)
    outputs = world.attach()[S2][0]
    assert len(outputs.tokens) == 1
    assert outputs.ended == [LegEnd("r", 0, STOPPED, is_fault=True)]
    world.now_s = WINDOW_S + 1  # S2 makes the next attempt elsewhere, and never says a word
    world.records.expire(world.now_s)
    assert not world.records


def test_a_whole_answer_waits_for_its_reader(world: World) -> None:
    request = world.open()
    world.records.note(request, [token(0), token(1, last=True)])
    del world.legs.clients["r#0"]
    world.records.leg_ended(request)
    world.records.expire(5 * WINDOW_S)
    assert world.attach()[S2][0].ended == []


def test_an_error_of_its_own_is_forgotten(world: World) -> None:
    world.records.failed(world.open())
    assert not world.records
    assert world.records.nbytes == 0


def test_a_later_attempt_has_what_was_told(world: World) -> None:
    request = world.open(attempt=2, tokens=[token(0), token(1)], prompt=PromptOutput("r", 0, 7))
    world.records.note(request, [token(2, attempt=2)])
    outputs = world.attach(attempt=2)[S2][0]
    assert [(each.position, each.attempt) for each in outputs.tokens] == [(0, 2), (1, 2), (2, 2)]
    assert outputs.prompts == [PromptOutput("r", 2, 7)]


def test_room_is_made_by_those_without_readers_then_the_growing_one_is_forgotten(world: World) -> None:
    requests = [world.open(f"r{at}", bytes([at]) * 32, room=3000) for at in range(3)]
    for at in (1, 0):
        world.records.read(S, wire.Release(f"r{at}", 0, "go on"))
        world.now_s += 1
    world.records.note(requests[2], [token(position) for position in range(17)])  # 2,720 bytes
    assert world.found(b"\1" * 32).order is None
    assert world.found(b"\0" * 32).order is not None
    assert set(world.legs.clients) == {"r0#0", "r2#0"}
    world.records.note(requests[2], [token(17, top=20)])
    assert len(world.records) == 0
    assert world.records.nbytes == 0
    assert world.legs.clients == {"r2#0": S}  # its reader reads on
    world.records.read(S, wire.Release("r2", 0, "go on"))
    assert world.legs.aborted == [(S, wire.Abort("r2", 0))]


def test_several_sequences_are_not_kept(world: World) -> None:
    order = Order([1], Sampling(n=2))
    world.records.open(S, wire.Submit("r", 0, "t", "decode", "", order, 0.0, keep=wire.Keep(DIGEST, 1.0, ROOM, b"")))
    assert not world.records


def test_nothing_secret_is_shown() -> None:
    ticket = Ticket.new("tenant")
    keep = wire.Keep(ticket.digest, 1.0, 1, b"what a client wrote")
    found = wire.Found(ticket.digest, "r", 0, Order([1], Sampling()), b"what a client wrote")
    recipe = Recipe("chat", b"what a client wrote", "id", 1)
    shown = repr([ticket, keep, found, recipe, KeptStream(keep)])
    assert ticket.token not in shown
    assert repr(ticket.digest)[2:10] not in shown
    assert "wrote" not in shown


def test_a_token_is_bound_to_its_tenant_and_draws_the_same_ids() -> None:
    ticket = Ticket.new("one")
    assert len(bytes.fromhex(ticket.token)) == 16
    assert Ticket.of(ticket.token, "one") == ticket
    assert Ticket.of(ticket.token, "other").digest != ticket.digest
    form = ReplyFormat("mistral", "", {})
    ids = [[form.call_id(draw) for _ in range(3)] for draw in (ticket.draws(), ticket.draws())]
    assert ids[0] == ids[1]
    assert len({*ids[0], form.call_id(), form.call_id()}) == 5
    assert all(len(each) == 9 and each.isalnum() for each in ids[0])


# ---- at the scheduler


def test_events_have_ids_and_errors_have_none() -> None:
    async def events() -> Any:
        yield b"data: {}\n\ndata: 1\n\n"
        yield b"data: 2\n\n"
        yield Last(b'data: {"error":1}\n\ndata: [DONE]\n\n')

    async def read(after: int) -> list[bytes]:
        return [each async for each in numbered(events(), Ticket("t", DIGEST, after))]

    async def check() -> None:
        whole = b"".join(await read(-1))
        assert whole.startswith(b"id: t-0\ndata: {}\n\nid: t-1\ndata: 1\n\nid: t-2\ndata: 2\n\ndata: {")
        assert b"".join(await read(1)) == whole[whole.index(b"id: t-2") :]
        assert await read(9) == [b'data: {"error":1}\n\ndata: [DONE]\n\n']

    asyncio.run(check())


def kept(digest: bytes = DIGEST) -> KeptStream:
    return KeptStream(wire.Keep(digest, WINDOW_S, ROOM, b"recipe"))


def test_a_client_that_leaves_lets_its_legs_go_on() -> None:
    async def check() -> None:
        world = RouterWorld()
        serving, first, name = await world.begin(kept=kept())
        assert [conn for conn, each in world.mailbox.of(wire.Submit) if each.keep is not None] == ["to-decode-0"]
        prompt = PromptOutput(name, 0, 1)
        world.outputs("to-prefill-0", TokenOutput(name, 0, 0, 0, 5), prompt=prompt)
        await first
        await serving.aclose()
        assert world.mailbox.of(wire.Release) == [("to-decode-0", wire.Release(name, 0, "go on"))]
        assert world.mailbox.of(wire.Abort) == []
        world.assert_home()

    run(check())


def test_the_next_attempt_keeps_what_was_delivered() -> None:
    async def check() -> None:
        world = RouterWorld()
        serving, first, name = await world.begin(kept=kept())
        told, prompt = TokenOutput(name, 0, 0, 0, 5), PromptOutput(name, 0, 1)
        world.outputs("to-prefill-0", told, prompt=prompt)
        await first
        world.lose("decode-0")
        rest = asyncio.ensure_future(anext(serving))
        while (submit := world.mailbox.of(wire.Submit)[-1][1]).attempt == 0:
            await asyncio.sleep(0)
        assert submit.leg == "hybrid"
        assert submit.keep == wire.Keep(DIGEST, WINDOW_S, ROOM, b"recipe", prompt, [told])
        world.outputs(world.mailbox.of(wire.Submit)[-1][0], TokenOutput(name, 1, 0, 1, 6, "length"))
        assert (await rest).token_id == 6
        assert [each async for each in serving] == []
        (released,) = world.mailbox.of(wire.Release)
        assert released[1] == wire.Release(name, 1, "stop")
        world.assert_home()


def test_more_than_the_room_is_not_kept_by_the_next_attempt() -> None:
    small = KeptStream(wire.Keep(DIGEST, WINDOW_S, 300, b"recipe"))
    small.tokens = [TokenOutput("r", 0, 0, 0, 5)]
    assert small.of_next_attempt() is not None
    small.tokens.append(TokenOutput("r", 0, 0, 1, 5))
    assert small.of_next_attempt() is None


def test_an_error_that_the_client_reads_is_the_end() -> None:
    async def check() -> None:
        world = RouterWorld()
        serving, first, name = await world.begin(kept=kept())
        world.outputs("to-prefill-0", TokenOutput(name, 0, 0, 0, 5), prompt=PromptOutput(name, 0, 1))
        await first
        world.outputs("to-decode-0", ended=LegEnd(name, 0, "the request's deadline has passed"))
        with pytest.raises(GenerationError, match="deadline"):
            await anext(serving)
        assert [body.then for _, body in world.mailbox.of(wire.Release)] == ["forget"]
        assert world.aborted() == ["to-prefill-0"]
        world.assert_home()

    run(check())


def test_a_stream_resumes_from_its_first_token() -> None:
    async def check() -> None:
        world = RouterWorld()
        serving, first, name = await world.begin(kept=kept())
        world.outputs("to-prefill-0", TokenOutput(name, 0, 0, 0, 5), prompt=PromptOutput(name, 0, 1))
        await first
        search = asyncio.ensure_future(world.router.find(DIGEST))
        while len(world.mailbox.of(wire.Find)) < 4:
            await asyncio.sleep(0)
        with pytest.raises(GenerationError, match="another reader"):
            await anext(serving)
        assert world.mailbox.of(wire.Release) == [("to-decode-0", wire.Release(name, 0, "go on"))]
        order = Order([1, 2, 3], Sampling(max_tokens=9))
        for conn in ("to-prefill-0", "to-prefill-1", "to-decode-0", "to-decode-1"):
            found = wire.Found(DIGEST, name, 0, order, b"recipe", 1) if conn == "to-decode-0" else wire.Found(DIGEST)
            world.router.on_found(conn, found)
        place = await search
        assert place is not None
        assert place.instance.name == "decode-0"
        again = kept()
        again.place = place
        reading = world.serve(kept=again)
        token = asyncio.ensure_future(anext(reading))
        while not world.mailbox.of(wire.Attach):
            await asyncio.sleep(0)
        assert world.mailbox.of(wire.Attach) == [("to-decode-0", wire.Attach(DIGEST, name, 0))]
        world.outputs("to-decode-0", TokenOutput(name, 0, 0, 0, 5))
        assert (await token).token_id == 5
        rest = asyncio.ensure_future(anext(reading))
        world.outputs("to-decode-0", ended=LegEnd(name, 0, TAKEN, is_taken=True))
        with pytest.raises(GenerationError, match="another reader"):
            await rest
        assert len(world.mailbox.of(wire.Release)) == 1  # none by one that has lost it to another
        world.assert_home()

    run(check())


def test_searches_end_without_those_that_are_lost_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        world = RouterWorld()
        finder = Finder(world.mailbox.send, world.membership, 60.0)
        search = asyncio.ensure_future(finder.find(DIGEST))
        while len(world.mailbox.of(wire.Find)) < 4:
            await asyncio.sleep(0)
        monkeypatch.setattr("pd_cluster.cluster.routing.resume.MOST_SEARCHES", 1)
        with pytest.raises(Overloaded):
            await finder.find(OTHER)
        order = Order([1], Sampling())
        finder.on_found("to-decode-0", wire.Found(DIGEST, "r", 0, order))
        finder.on_found("to-decode-1", wire.Found(DIGEST, "r", 1, order))
        finder.on_found("to-decode-1", wire.Found(DIGEST, "r", 9, order))  # it has answered
        for name in ("prefill-0", "prefill-1"):
            finder.on_lost(next(each for each in world.instances if each.name == name), "dead")
        place = await search
        assert place is not None
        assert (place.instance.name, place.found.attempt) == ("decode-1", 1)

    run(check())


def test_encoders_are_not_searched() -> None:
    async def check() -> None:
        world = RouterWorld()
        next(each for each in world.instances if each.name == "prefill-1").role = "encode"
        finder = Finder(world.mailbox.send, world.membership, 60.0)
        search = asyncio.ensure_future(finder.find(DIGEST))
        await asyncio.sleep(0)
        for name in ("prefill-0", "decode-0", "decode-1"):
            finder.on_found(f"to-{name}", wire.Found(DIGEST))
        assert await search is None
        assert [conn for conn, _ in world.mailbox.of(wire.Find)] == ["to-prefill-0", "to-decode-0", "to-decode-1"]

    run(check())
