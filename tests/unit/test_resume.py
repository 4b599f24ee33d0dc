"""Records of streams at a worker, by the table of docs/protocol.md, and the scheduler's part of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pd_cluster import wire
from pd_cluster.api.gate.http import Last
from pd_cluster.api.openai.kept_streams import numbered
from pd_cluster.cluster.routing.replays import ReplayLimits
from pd_cluster.cluster.routing.resume import Finder, KeptStream, RecordPlace
from pd_cluster.engine.outbox import NOBODY, Outbox
from pd_cluster.engine.resume import GONE, STOPPED, TAKEN, Records
from pd_cluster.errors import GenerationError, Overloaded, Unavailable
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
    assert world.found(b"\2" * 32).order is None  # alone it is too large: nobody made room for it
    assert world.found(b"\0" * 32).order is not None
    assert world.legs.clients == {"r0#0": NOBODY, "r2#0": S}  # its reader reads on
    world.records.read(S, wire.Release("r2", 0, "go on"))
    assert world.legs.aborted == [(S, wire.Abort("r2", 0))]


def test_nobody_makes_room_where_it_would_not_be_enough(world: World) -> None:
    requests = [world.open(f"r{at}", bytes([at]) * 32, room=3000) for at in range(3)]
    world.records.read(S, wire.Release("r0", 0, "go on"))
    world.records.note(requests[1], [token(position) for position in range(16)])  # it is read
    world.records.note(requests[2], [token(position) for position in range(4)])
    assert [world.found(bytes([at]) * 32).order is None for at in range(3)] == [False, False, True]
    assert world.legs.runs("r0#0")


def test_the_next_attempt_ends_the_leg_before(world: World) -> None:
    world.open()
    world.records.closed(S)  # and it is back: its next attempt comes to the same instance
    world.open(attempt=1)
    assert world.legs.clients == {"r#1": S}
    world.outbox.flush()
    assert world.sent == []


def test_the_next_attempt_of_another_scheduler_takes_the_stream_over(world: World) -> None:
    world.open()
    keep = wire.Keep(DIGEST, WINDOW_S, ROOM, b"recipe")
    order = Order([1, 2, 3], Sampling(max_tokens=9))
    world.legs.clients["r#1"] = S2
    world.records.open(S2, wire.Submit("r", 1, "t", "decode", "p@1", order, 0.0, keep=keep))
    assert world.legs.clients == {"r#1": S2}
    world.outbox.flush()
    ((to, told),) = world.sent
    assert (to, told.ended) == (S, [LegEnd("r", 0, TAKEN, is_taken=True)])


def test_a_reader_that_lost_the_leg_hears_of_the_next_one(world: World) -> None:
    request = world.open()
    del world.legs.clients["r#0"]
    world.records.leg_ended(request)  # S looks for an instance now
    assert world.attach(S2)[S][0].ended == [LegEnd("r", 0, TAKEN, is_taken=True)]  # and so does S2
    world.records.read(S, wire.Release("r", 1, "forget"))  # it has given up
    assert world.found().order is not None
    world.records.closed(S2)
    assert set(world.attach(S)) == {S}


def test_a_stream_that_failed_elsewhere_is_forgotten(world: World) -> None:
    request = world.open()
    del world.legs.clients["r#0"]
    world.records.leg_ended(request)
    world.records.read(S, wire.Release("r", 1, "forget"))  # no instance was left for its next attempt
    assert world.found() == wire.Found(DIGEST)
    assert world.records.nbytes == 0


def test_a_whole_stream_that_moves_is_not_kept_for_ever(world: World) -> None:
    request = world.open()
    world.records.note(request, [token(0, last=True)])
    del world.legs.clients["r#0"]
    world.records.leg_ended(request)
    world.records.aborted(S2, wire.Abort("r", 0))  # it does not read it
    world.records.expire(2 * WINDOW_S)
    assert world.records
    world.records.aborted(S, wire.Abort("r", 0))
    world.records.expire(2 * WINDOW_S)
    assert not world.records


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


def test_a_stream_that_waits_for_an_instance_ends_for_a_later_reader() -> None:
    """Where it is taken over at another scheduler, and where two readers of this one found it at once."""

    async def check(is_here: bool) -> None:
        world = RouterWorld()
        serving, first, name = await world.begin(kept=kept())
        world.outputs("to-prefill-0", TokenOutput(name, 0, 0, 0, 5), prompt=PromptOutput(name, 0, 1))
        await first
        for each in world.instances[1:]:
            each.state = "unreachable"
        world.instances[0].service = "out"
        rest = asyncio.ensure_future(anext(serving))
        world.outputs("to-decode-0", ended=LegEnd(name, 0, STOPPED, is_fault=True))
        for _ in range(5):
            await asyncio.sleep(0)  # it waits for an instance
        num_submitted = len(world.mailbox.of(wire.Submit))
        later = None
        if is_here:
            again = kept()
            found = wire.Found(DIGEST, name, 0, Order([1, 2, 3], Sampling(max_tokens=9)), b"recipe", 1)
            again.place = RecordPlace(world.instances[2], found)
            later = world.serve(kept=again)
            token = asyncio.ensure_future(anext(later))
            while not world.mailbox.of(wire.Attach):
                await asyncio.sleep(0)
        else:
            world.outputs("to-decode-0", ended=LegEnd(name, 0, TAKEN, is_taken=True))
        world.instances[0].service = "in"
        world.membership.changed.set()
        with pytest.raises(GenerationError, match="another reader"):
            await rest
        assert len(world.mailbox.of(wire.Submit)) == num_submitted
        if later is not None:
            timeline = world.router.timelines.find(name)
            assert timeline is not None
            assert timeline.status not in ("failed", "finished")  # the later reader's
            world.outputs("to-decode-0", TokenOutput(name, 0, 0, 0, 5))
            assert (await token).token_id == 5
            await later.aclose()
        world.assert_home()

    run(check(False))
    run(check(True))


@pytest.mark.parametrize("why", ["nobody is ready", "one is lost", "one is silent"])
def test_while_an_instance_is_away_a_stream_may_still_be_found(why: str) -> None:
    async def check() -> None:
        world = RouterWorld()
        finder = Finder(world.mailbox.send, world.membership, 0.01 if why == "one is silent" else 60.0)
        asked = 0 if why == "nobody is ready" else 4
        for each in world.instances[asked:]:
            each.state = "connecting"
        search = asyncio.ensure_future(finder.find(DIGEST))
        while len(world.mailbox.of(wire.Find)) < asked:
            await asyncio.sleep(0)
        for each in world.instances[: min(asked, 3)]:
            finder.on_found(each.conn, wire.Found(DIGEST))
        if why == "one is lost":
            finder.on_lost(world.instances[3], "dead")
        with pytest.raises(Unavailable):
            await search

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


def test_a_scheduler_that_has_just_begun_waits_for_its_instances() -> None:
    async def check() -> None:
        world = RouterWorld(replay=ReplayLimits(together_s=60.0))
        world.router.expect_instances()
        for instance in world.instances[1:]:
            instance.state = "connecting"
        search = asyncio.ensure_future(world.router.find(DIGEST))
        await asyncio.sleep(0)
        for instance in world.instances:
            assert not world.mailbox.of(wire.Find)
            instance.state = "ready"
            world.membership.changed.set()
            await asyncio.sleep(0)
        while len(world.mailbox.of(wire.Find)) < 4:
            await asyncio.sleep(0)
        for instance in world.instances:
            world.router.on_found(instance.conn, wire.Found(DIGEST))
        assert await search is None
        for instance in world.instances:
            instance.state = "unreachable"
        with pytest.raises(Unavailable):
            await Finder(world.mailbox.send, world.membership, 60.0).find(DIGEST)

    run(check())
