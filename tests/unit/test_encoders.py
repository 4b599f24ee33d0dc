"""Encoders of their own: what is asked of which one, features that travel, and both ends' states, without processes."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from pd_cluster import wire
from pd_cluster.cluster.members.instance import Instance
from pd_cluster.cluster.overview.history import History
from pd_cluster.cluster.overview.problems import problems_of
from pd_cluster.cluster.processes.launch import Launch
from pd_cluster.cluster.processes.launcher import plan_cluster
from pd_cluster.cluster.routing.encoders import SLACK_TOKENS, choose_encoders
from pd_cluster.engine.encode.encoder_links import EncoderTerms
from pd_cluster.engine.encode.encoders import MOST_ASKED_TOKENS, Encoders, Engine
from pd_cluster.engine.encode.worker import MOST_WAITING, EncodeWorker
from pd_cluster.engine.handover.events import ConnClosed, ConnOpened, Event, Mail, StartDrain
from pd_cluster.errors import LinkError
from pd_cluster.numerics import Numerics
from pd_cluster.reports import InstanceInfo
from pd_cluster.settings.routing import RoutingConfig
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.transport.base import Checksum
from pd_cluster.transport.events import EncoderReached, EncoderUnreached, FeatureEvent, FeaturesRead
from pd_cluster.transport.feature_pair import PairSender
from pd_cluster.transport.feature_reader import FeaturePlace, FeatureReader, Shape
from pd_cluster.transport.features import FeatureServer, Sealed, fetch, reach, ways
from pd_cluster.transport.table import CHOICES
from pd_cluster.types import Image, LinkState, Order, Sampling, Span

PLACE = FeaturePlace("127.0.0.1", 5.0, 30.0, Checksum())
TERMS = EncoderTerms("model", Numerics(), PLACE)
UP = LinkState("up", ("shm",))
OPENING = wire.EncoderOpen("model", Numerics(), ["shm", "dist"])
SHAPE = (2, 3, 8)
FEATURES = torch.arange(48, dtype=torch.float32).reshape(SHAPE)


# ---- the choice


def instance(name: str, role: Any, **links: Any) -> Instance:
    info = InstanceInfo(name=name, role=role, state="ready", server_ip="", device_ids=[], epoch=1, pid=1)
    load = wire.Load(links={f"{peer.replace('_', '-')}@1": state for peer, state in links.items()})
    return Instance(name, role, "h", 1, [], state="ready", info=info, load=load)


def order_of(*digests: bytes, num_tokens: int = 4, salt: str = "") -> Order:
    spans = tuple(Span(at * num_tokens, (at + 1) * num_tokens, each) for at, each in enumerate(digests))
    images = tuple(Image(2, 2, b"p") for _ in digests)
    return Order([1] * (len(digests) * num_tokens + 1), Sampling(), cache_salt=salt, spans=spans, images=images)


def test_an_image_that_comes_again_meets_the_same_encoder() -> None:
    prefill = instance("prefill-0", "prefill", encode_0=UP, encode_1=UP, encode_2=UP)
    encoders = [instance(f"encode-{at}", "encode") for at in range(3)]
    order = order_of(*(bytes([at]) * 32 for at in range(60)))
    found = choose_encoders(order, prefill, [prefill, *encoders])
    assert {each.name for each in found} == {each.name for each in encoders}
    assert found == choose_encoders(order, prefill, [*reversed(encoders), prefill])
    fewer = choose_encoders(order, prefill, encoders[:2])
    assert all(new is old for new, old in zip(fewer, found, strict=True) if old is not encoders[2])


def test_an_encoder_with_far_more_to_do_is_left_alone() -> None:
    prefill = instance("prefill-0", "prefill", encode_0=UP, encode_1=UP)
    busy, idle = instance("encode-0", "encode"), instance("encode-1", "encode")
    busy.outstanding_tokens = 2 * SLACK_TOKENS
    order = order_of(*(bytes([at]) * 32 for at in range(20)))
    assert set(map(id, choose_encoders(order, prefill, [prefill, busy, idle]))) == {id(idle)}


def test_nobody_is_chosen_without_images_links_or_service() -> None:
    prefill = instance("prefill-0", "prefill", encode_0=UP)
    encoder = instance("encode-0", "encode")
    order = order_of(b"d" * 32)
    assert choose_encoders(order, prefill, [encoder]) == [encoder]
    assert choose_encoders(Order([1], Sampling()), prefill, [encoder]) == []
    assert choose_encoders(order, instance("prefill-1", "prefill"), [encoder]) == []
    encoder.service = "out"
    assert choose_encoders(order, prefill, [encoder]) == []


def test_a_launch_registers_encoders_at_its_schedulers_port(tmp_path: Path) -> None:
    members = {each.name: each for each in plan_cluster(Launch(model="m", num_encode=2), tmp_path)}
    assert list(members) == ["prefill-0", "decode-0", "encode-0", "encode-1", "scheduler"]
    (join,) = [flag.removeprefix("--join-port=") for flag in members["scheduler"].command if "--join-port" in flag]
    for at in range(2):
        member = members[f"encode-{at}"]
        own = {"--role=encode", f"--join=127.0.0.1:{join}", f"--instance-name=encode-{at}", f"--port={member.port}"}
        assert own <= set(member.command)
        assert member.env["RANK_TABLE_FILE_PATH"] == "", "whatever the environment of `up` says"
    assert len({each.port for each in members.values()} | {int(join)}) == 6
    plain = plan_cluster(Launch(model="m"), tmp_path)
    assert not [flag for member in plain for flag in member.command if "join" in flag]
    given = plan_cluster(Launch(model="m", num_encode=1, arguments=["--join-port=9002"]), tmp_path)
    assert "--join=127.0.0.1:9002" in next(each for each in given if each.name == "encode-0").command


def test_a_refused_encoder_is_a_problem_that_is_named() -> None:
    refused = LinkState("refused", reason="the encoder has --dtype bfloat16")
    prefill = instance("prefill-0", "prefill", encode_0=refused, encode_1=UP, decode_0=UP)
    others = [instance("decode-0", "decode"), instance("encode-0", "encode"), instance("encode-1", "encode")]
    found = problems_of([prefill, *others], History(), RoutingConfig())
    assert [each.text for each in found] == ["prefill-0 gets no images from encode-0, and computes them itself"]
    assert "bfloat16" in found[0].reason


# ---- features between processes


def test_features_arrive_once_and_as_they_were() -> None:
    server, checksum = FeatureServer(), Checksum()
    try:
        reach(server.name, 5)
        for dtype in (torch.float32, torch.bfloat16):
            sent = FEATURES.to(dtype)
            file = Sealed.of(sent, checksum)
            with pytest.raises(OSError, match="not permitted"):
                os.write(file.fd, b"x")
            token = server.offer(file)
            found = fetch(server.name, token, SHAPE, dtype, checksum, file.checksum, 5)
            assert found.dtype == dtype
            assert torch.equal(found, sent)
            with pytest.raises(LinkError, match="does not have the features any more"):
                fetch(server.name, token, SHAPE, dtype, checksum, file.checksum, 5)
    finally:
        server.close()


def test_wrong_features_are_refused() -> None:
    server, checksum = FeatureServer(), Checksum()
    try:
        file = Sealed.of(FEATURES, checksum)
        with pytest.raises(LinkError, match="another checksum than announced"):
            fetch(server.name, server.offer(file.twin()), SHAPE, torch.float32, checksum, file.checksum ^ 1, 5)
        with pytest.raises(LinkError, match="are 192 bytes, not 96"):
            fetch(server.name, server.offer(file.twin()), SHAPE, torch.bfloat16, checksum, file.checksum, 5)
        open_fd = os.memfd_create("open")
        os.write(open_fd, bytes(file.nbytes))
        token = server.offer(replace(file, fd=open_fd))
        with pytest.raises(LinkError, match="could change while they are read"):
            fetch(server.name, token, SHAPE, torch.float32, checksum, file.checksum, 5)
        token = server.offer(file)
        server.withdraw(token)
        with pytest.raises(LinkError, match="does not have the features any more"):
            fetch(server.name, token, SHAPE, torch.float32, checksum, file.checksum, 5)
    finally:
        server.close()
    with pytest.raises(LinkError, match="the encoder's socket for features cannot be reached") as found:
        reach(server.name, 5)
    assert not found.value.retry


def test_features_over_a_pair_come_in_order_and_are_checked() -> None:
    """Both ends are the real ones; only the connection between them is two calls."""
    events: queue.SimpleQueue[FeatureEvent] = queue.SimpleQueue()
    failures: list[str] = []
    large = torch.arange(5_000_000, dtype=torch.float32).reshape(1, 5000, 1000)  # several pieces

    def post(body: wire.Body) -> None:
        match body:
            case wire.EncoderMeet():
                sender.open()
            case wire.LinkValue():
                sender.meeting.put(body.key, body.value)

    sender = PairSender(
        "group", "127.0.0.1", 5.0, 30.0, lambda key, value: reader.meeting.put(key, value), failures.append
    )
    reader = FeatureReader("c", wire.EncoderAnswer("", "", "group"), PLACE, post, events.put)
    try:
        assert events.get(timeout=30) == EncoderReached("c", "dist")
        for number, (features, is_wanted, is_right) in enumerate(
            ((FEATURES, True, True), (large, False, True), (large, True, True), (FEATURES, True, False))
        ):
            file = Sealed.of(features, PLACE.checksum)
            done = wire.EncodeDone(number, bytes(16), file.nbytes, file.checksum ^ (not is_right))
            sender.put(file)
            reader.read(done, Shape(tuple(features.shape), features.dtype) if is_wanted else None)
            if is_wanted:
                event = events.get(timeout=30)
                assert isinstance(event, FeaturesRead)
                assert event.item == number
                assert (event.features is not None and torch.equal(event.features, features)) == is_right
        sender.put(Sealed.of(FEATURES, PLACE.checksum))
        reader.read(wire.EncodeDone(9, bytes(16), FEATURES.nbytes, 1), Shape((1, 2, 3), torch.float32))
        event = events.get(timeout=30)
        assert isinstance(event, EncoderUnreached)
        assert (event.retry, event.reason) == (True, "the encoder announces 192 bytes of features")
        assert not failures
    finally:
        reader.close()
        sender.close()


def test_a_link_is_down_when_its_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of one image's is its own."""
    events: queue.SimpleQueue[FeatureEvent] = queue.SimpleQueue()
    server = FeatureServer()
    reader = FeatureReader("c", wire.EncoderAnswer("", server.name), PLACE, lambda body: None, events.put)
    try:
        assert events.get(timeout=30) == EncoderReached("c", "shm")
        file = Sealed.of(FEATURES, PLACE.checksum)
        done = wire.EncodeDone(1, server.offer(file.twin()), file.nbytes, file.checksum)
        reader.read(done, Shape((1 << 62,), torch.float32))
        event = events.get(timeout=30)
        assert isinstance(event, FeaturesRead)
        assert event.features is None
        done = msgspec.structs.replace(done, token=server.offer(file))
        reader.read(done, Shape(SHAPE, torch.float32))
        event = events.get(timeout=30)
        assert isinstance(event, FeaturesRead)
        assert event.features is not None
        monkeypatch.setattr(reader, "_fetch", lambda *_: [][0])
        reader.read(done, Shape(SHAPE, torch.float32))
        event = events.get(timeout=30)
        assert isinstance(event, EncoderUnreached)
        assert event.retry
    finally:
        reader.close()
        server.close()


def test_a_socket_of_another_host_leaves_the_pair_or_nothing() -> None:
    for group in ("", "group"):
        events: queue.SimpleQueue[FeatureEvent] = queue.SimpleQueue()
        sent: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()
        place = replace(PLACE, connect_s=0.1)
        reader = FeatureReader("c", wire.EncoderAnswer("", "nowhere", group), place, sent.put, events.put)
        if group:
            assert sent.get(timeout=30) == wire.EncoderMeet()
        event = events.get(timeout=30)  # nobody comes to the pair
        assert isinstance(event, EncoderUnreached)
        assert event.retry == bool(group)
        reader.close()


def test_which_transports_leave_a_way() -> None:
    assert {choice: ways(choice) for choice in CHOICES} == {
        "auto": ["shm", "dist"],
        "ipc": ["shm"],
        "shm": ["shm"],
        "dist": ["dist"],
        "nixl": [],
    }


def test_terms_name_what_differs() -> None:
    def problem(**changes: Any) -> str:
        return TERMS.problem(msgspec.structs.replace(OPENING, **changes))

    assert problem(numerics=Numerics(attention_backend="c", kv_cache_dtype="int8")) == ""
    assert "another model (model)" in problem(model_identity="other")
    found = problem(numerics=Numerics(dtype="bfloat16"))
    assert "--dtype float32, the prefill instance --dtype bfloat16" in found
    assert "--device cpu" in problem(numerics=Numerics(device="cuda"))
    assert "no --kv-transport allows one at both ends (the encoder's is auto)" in problem(transports=["nixl"])
    assert "the encoder's is nixl" in replace(TERMS, kv_transport="nixl").problem(OPENING)


# ---- at a prefill instance


class Post:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, wire.Body]] = []
        self.closed: list[str] = []

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        return f"to {name}"

    def disconnect(self, conn: str) -> None:
        self.closed.append(conn)

    def send(self, conn: str, body: wire.Body) -> None:
        self.sent.append((conn, body))

    def beat(self) -> None: ...
    def beat_soon(self) -> None: ...

    def take(self, kind: type) -> list[Any]:
        found = [body for _, body in self.sent if isinstance(body, kind)]
        self.sent = [each for each in self.sent if not isinstance(each[1], kind)]
        return found


class Blocks(set[bytes]):
    """The hashes of blocks that are cached."""

    tier = None

    def __init__(self, hashes: set[bytes]) -> None:
        super().__init__()
        self._hashes = hashes

    def __contains__(self, each: object) -> bool:
        return each in self._hashes


class Prefill:
    """The table of an image at P, with a tower and a scheduler that are only what the table asks of them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.post, self.begun, self.here = Post(), list[str](), set[str]()
        self.tower = SimpleNamespace(kept={}, landed={}, dtype=torch.float32, shape_of=lambda image: SHAPE)
        self.cached: set[bytes] = set()
        scheduler: Any = SimpleNamespace(
            block_size=4, prompt_hashes=lambda request: [b"one", b"two"], blocks=Blocks(self.cached)
        )
        limits: Any = SimpleNamespace(problem=lambda request, resumed: None)
        tower: Any = self.tower
        engine = Engine(lambda: tower, scheduler, limits, self._begin, self.here.__contains__)
        self.encoders = Encoders(engine, TERMS, self.post, lambda event: None, lambda: self.now_s, Timeouts())

    def _begin(self, conn: str, submit: wire.Submit) -> None:
        self.begun.append(submit.request_id)
        self.here.add(f"{submit.request_id}#{submit.attempt}")

    def link(self, *names: str) -> None:
        """Brings links up; sockets that do not exist are reached."""
        infos = [
            wire.PeerInfo(name=name, epoch=1, role="encode", host="h", control_port=1, public_key=b"") for name in names
        ]
        self.encoders.set_peers(infos)
        for name in names:
            self.encoders.links.on_opened(f"to {name}")
            self.encoders.read(f"to {name}", wire.EncoderAnswer("", "no-such-socket"))
            self.encoders.handle(EncoderReached(f"to {name}", "shm"))

    def submit(self, request_id: str, order: Order, *encoders: str, deadline_s: float = 0.0) -> bool:
        keys = [f"{each}@1" if each else "" for each in encoders]
        given = wire.Submit(request_id, 0, "t", "prefill", "decode-0@1", order, deadline_s, [], 1, False, keys)
        return self.encoders.admits("s", given)

    def asked(self) -> list[wire.Encode]:
        return self.post.take(wire.Encode)

    def tick(self, passed_s: float = 0.0) -> None:
        self.now_s += passed_s
        self.encoders.tick()


@pytest.fixture
def prefill() -> Prefill:
    made = Prefill()
    made.link("encode-0", "encode-1")
    return made


A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))


def test_a_leg_begins_when_all_its_images_are_here(prefill: Prefill) -> None:
    assert not prefill.submit("r", order_of(A, B), "encode-0", "encode-1")
    one, other = prefill.asked()
    assert (one.key, other.key) == (A, B)
    prefill.encoders.handle(FeaturesRead(one.item, FEATURES))
    assert prefill.begun == []
    prefill.encoders.handle(FeaturesRead(other.item, FEATURES))
    assert prefill.begun == ["r"]
    assert prefill.tower.landed.keys() == {A, B}
    load = prefill.encoders.counted(wire.Load(), {})
    assert (load.num_landed_images, load.num_encoder_fallbacks, load.feature_nbytes) == (2, 0, 2 * FEATURES.nbytes)
    prefill.tick()
    assert prefill.tower.landed, "the leg is there, and will use them"
    prefill.here.clear()
    prefill.tick()
    assert not prefill.tower.landed, "no leg will use them"


def test_what_is_here_or_on_its_way_is_not_asked_for_again(prefill: Prefill) -> None:
    prefill.tower.kept[A] = FEATURES
    assert prefill.submit("kept", order_of(A), "encode-0")
    assert not prefill.submit("first", order_of(B), "encode-0")
    assert not prefill.submit("second", order_of(B), "encode-1")
    assert not prefill.submit("another tenant", order_of(B, salt="x"), "encode-0")
    one, others = prefill.asked()
    assert (one.key, others.key) == (B, B + b"x")
    prefill.encoders.handle(FeaturesRead(one.item, FEATURES))
    assert prefill.begun == ["first", "second"]
    assert prefill.submit("third", order_of(B), "encode-0"), "it has landed, and waits for a step"


def test_an_image_in_the_prefix_cache_is_not_asked_for(prefill: Prefill) -> None:
    prefill.cached |= {b"one"}
    assert not prefill.submit("r", order_of(A, B), "encode-0", "encode-0")
    assert [ask.key for ask in prefill.asked()] == [B]
    prefill.cached |= {b"two"}
    assert prefill.submit("q", order_of(A, C), "encode-0", "encode-0")


def test_a_failure_of_any_kind_lets_the_leg_begin(prefill: Prefill) -> None:
    for at, fail in enumerate[Callable[[wire.Encode], object]](
        (
            lambda ask: prefill.encoders.read("to encode-0", wire.EncodeFailed(ask.item, "full")),
            lambda ask: prefill.encoders.handle(FeaturesRead(ask.item, None, "torn")),
            lambda ask: prefill.tick(Timeouts().encode_timeout_s + 0.1),
            lambda ask: prefill.encoders.links.on_closed("to encode-0", "silence"),
        )
    ):
        assert not prefill.submit(f"r{at}", order_of(A), "encode-0")
        (ask,) = prefill.asked()
        fail(ask)
        assert prefill.begun[-1] == f"r{at}"
        assert not prefill.tower.landed
        prefill.encoders.handle(FeaturesRead(ask.item, FEATURES))
        assert not prefill.tower.landed, "late"
        assert prefill.encoders.counted(wire.Load(), {}).num_encoder_fallbacks == at + 1
    assert len(prefill.post.take(wire.EncodeAbort)) == 1, "the late one"
    assert prefill.submit("down", order_of(A), "encode-0"), "its link is down"
    assert prefill.encoders.links.states()["encode-0@1"].phase == "waiting"


def test_a_busy_encoder_has_more_time_than_one_that_stands_still(prefill: Prefill) -> None:
    limit_s = Timeouts().encode_timeout_s
    assert not prefill.submit("r", order_of(A), "encode-0")
    assert not prefill.submit("q", order_of(B), "encode-1")
    for at in range(1, 8):
        prefill.encoders.read("to encode-0", wire.Heartbeat(wire.Load(num_steps=at)))
        prefill.encoders.read("to encode-1", wire.Heartbeat(wire.Load(num_steps=5)))
        prefill.tick(0.9 * limit_s)
        assert ("q" in prefill.begun) == (at > 1)
        assert ("r" in prefill.begun) == (at > 6)


def test_an_answer_counts_only_over_the_link_that_was_asked(prefill: Prefill) -> None:
    assert not prefill.submit("r", order_of(A), "encode-0")
    (ask,) = prefill.asked()
    prefill.encoders.read("to encode-1", wire.EncodeFailed(ask.item, "not mine"))
    assert prefill.begun == []


def test_an_aborted_leg_is_forgotten_and_its_images_are_too(prefill: Prefill) -> None:
    assert not prefill.submit("r", order_of(A, B), "encode-0", "encode-0")
    assert not prefill.submit("q", order_of(B), "encode-0")
    one, _ = prefill.asked()
    prefill.encoders.abort("s", wire.Abort("r", 0))
    assert prefill.post.take(wire.EncodeAbort) == [wire.EncodeAbort([one.item])]
    prefill.encoders.client_closed("s")
    assert len(prefill.encoders) == 0
    assert prefill.begun == []


def test_a_legs_own_deadline_and_a_drain_end_its_wait(prefill: Prefill) -> None:
    assert not prefill.submit("r", order_of(A), "encode-0", deadline_s=1.0)
    prefill.tick(1.1)
    assert prefill.begun == ["r"]
    assert not prefill.submit("q", order_of(B), "encode-0")
    prefill.encoders.release_all()
    assert prefill.begun == ["r", "q"]


def test_only_so_many_tokens_are_asked_for_at_a_time(prefill: Prefill) -> None:
    half = MOST_ASKED_TOKENS // 2
    assert not prefill.submit("r", order_of(A, B, C, num_tokens=half), "encode-0", "encode-0", "encode-0")
    assert [ask.key for ask in prefill.asked()] == [A, B]


def test_a_larger_image_is_asked_for_alone(prefill: Prefill) -> None:
    order = order_of(A, B, num_tokens=2 * MOST_ASKED_TOKENS)
    assert not prefill.submit("r", order, "encode-0", "encode-0")
    assert [ask.key for ask in prefill.asked()] == [A]


def test_a_refused_encoder_is_asked_for_nothing() -> None:
    prefill = Prefill()
    info = wire.PeerInfo(name="encode-0", epoch=1, role="encode", host="h", control_port=1, public_key=b"")
    prefill.encoders.set_peers([info])
    prefill.encoders.links.on_opened("to encode-0")
    assert prefill.post.take(wire.EncoderOpen) == [OPENING]
    prefill.encoders.read("to encode-0", wire.EncoderAnswer("the encoder serves another model"))
    state = prefill.encoders.links.states()["encode-0@1"]
    assert (state.phase, state.reason) == ("refused", "the encoder serves another model")
    assert prefill.post.closed == ["to encode-0"]
    assert prefill.submit("r", order_of(A), "encode-0")
    prefill.encoders.set_peers([])
    assert prefill.encoders.links.states() == {}


# ---- at an encoder


class Tower:
    """Counts what it computes."""

    def __init__(self) -> None:
        self.num_encoded = 0
        self.rules = SimpleNamespace(problem=lambda image: "" if image.num_rows == 2 else "too many rows")

    def encode(self, image: Image) -> torch.Tensor:
        self.num_encoded += 1
        return FEATURES + len(image.pixels)


class Encoder:
    def __init__(self, num_kept_tokens: int = 100) -> None:
        self.now_s = 0.0
        self.post, self.tower, inbox = Post(), Tower(), queue.SimpleQueue[Event]()
        tower: Any = self.tower
        self.worker = EncodeWorker(tower, TERMS, self.post, inbox, num_kept_tokens, lambda: tower, lambda: self.now_s)


def mail(body: wire.Body, conn: str = "p") -> Mail:
    return Mail(conn, "prefill-0@1", body)


OPEN = mail(OPENING)


def step(encoder: Encoder, *events: Event) -> None:
    """One round of the loop for each event, and as many more as it takes until nothing is queued."""
    for event in events:
        encoder.worker._handle(event)
    while encoder.worker._queue:
        encoder.worker._encode(encoder.worker._queue.popleft())
    encoder.worker._tick()
    encoder.worker._publish()


@pytest.fixture
def encoder() -> Any:
    made = Encoder()
    yield made
    made.worker._server.close()
    made.worker._forget()


def test_an_image_is_computed_once_and_offered_each_time(encoder: Encoder) -> None:
    ask = wire.Encode(1, A, Image(2, 2, b"pp"), 10.0)
    step(encoder, OPEN, mail(ask), mail(replace_struct(ask, item=2)))
    (answer,) = encoder.post.take(wire.EncoderAnswer)
    one, other = encoder.post.take(wire.EncodeDone)
    assert (one.item, other.item, one.checksum) == (1, 2, other.checksum)
    for done in (one, other):
        found = fetch(answer.address, done.token, SHAPE, torch.float32, PLACE.checksum, done.checksum, 5)
        assert torch.equal(found, FEATURES + 2)
    step(encoder)
    assert encoder.tower.num_encoded == 1
    load = encoder.worker.load
    assert (load.num_encoded_images, load.num_encoded_hits) == (1, 1)
    assert load.links == {"prefill-0@1": UP}


def replace_struct(ask: wire.Encode, **changes: Any) -> wire.Encode:
    return wire.Encode(**{**{name: getattr(ask, name) for name in ask.__struct_fields__}, **changes})


def test_what_is_refused(encoder: Encoder) -> None:
    ask = wire.Encode(1, A, Image(2, 2, b"pp"), 10.0)
    step(encoder, mail(ask))
    assert encoder.post.sent == [], "nobody who has not opened is answered"
    step(
        encoder, OPEN, mail(replace_struct(ask, image=Image(3, 2, b"pp"))), mail(replace_struct(ask, image=Image(2, 2)))
    )
    assert [each.reason for each in encoder.post.take(wire.EncodeFailed)] == ["too many rows", "it came without pixels"]
    for at in range(MOST_WAITING + 1):
        encoder.worker._handle(mail(replace_struct(ask, item=at)))
    (full,) = encoder.post.take(wire.EncodeFailed)
    assert full == wire.EncodeFailed(MOST_WAITING, f"{MOST_WAITING} images wait at the encoder")
    encoder.worker._handle(ConnClosed("p", "prefill-0@1", "gone"))
    assert not encoder.worker._queue
    encoder.worker._handle(StartDrain())
    step(encoder, OPEN, mail(ask))
    assert encoder.post.take(wire.EncodeFailed)[0].reason == "the encoder stops"
    other = mail(msgspec.structs.replace(OPENING, model_identity="another"), "q")
    step(encoder, other)
    assert "another model" in encoder.post.take(wire.EncoderAnswer)[-1].problem


def test_offers_end(encoder: Encoder) -> None:
    """By their lease, an abort, and the end of the connection."""
    step(encoder, OPEN)
    for at, end in enumerate[Callable[[], object]](
        (
            lambda: setattr(encoder, "now_s", encoder.now_s + 31.0),
            lambda: encoder.worker._handle(mail(wire.EncodeAbort([1]))),
            lambda: encoder.worker._handle(ConnClosed("p", "prefill-0@1", "gone")),
        )
    ):
        step(encoder, mail(wire.Encode(at, bytes([at]) * 32, Image(2, 2, b"pp"), 10.0)))
        (done,) = encoder.post.take(wire.EncodeDone)
        assert done.token in encoder.worker._server
        end()
        step(encoder)
        assert done.token not in encoder.worker._server
    assert not encoder.worker._offers


def num_files() -> int:
    """Counts the open files of features."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # of the listing itself
            found += "pd-cluster-features" in os.readlink(each)
    return found


def test_the_store_is_bounded(encoder: Encoder) -> None:
    small = Encoder(num_kept_tokens=2 * SHAPE[1])
    try:
        step(small, OPEN)
        before = num_files()
        for at in (1, 2, 3, 2, 1):
            step(small, mail(wire.Encode(at, bytes([at]) * 32, Image(2, 2, b"pp"), 10.0)))
        assert small.tower.num_encoded == 4, "2 was kept, 1 was not"
        assert len(small.worker._kept) == 2
        small.worker._handle(ConnClosed("p", "prefill-0@1", "gone"))
        small.worker._forget()
        assert num_files() == before, "every file is closed"
    finally:
        small.worker._server.close()


def test_an_image_larger_than_the_store_leaves_it_alone(encoder: Encoder) -> None:
    encoder.worker._num_kept_tokens = SHAPE[1]
    large = torch.zeros(SHAPE[0], SHAPE[1] + 1, SHAPE[2])
    step(encoder, OPEN, mail(wire.Encode(1, A, Image(2, 2, b"pp"), 10.0)))
    encoder.tower.encode = lambda image: large  # type: ignore[method-assign]
    step(encoder, mail(wire.Encode(2, B, Image(2, 2, b"pp"), 10.0)))
    assert [each.item for each in encoder.post.take(wire.EncodeDone)] == [1, 2]
    assert list(encoder.worker._kept) == [A]


def test_an_image_that_cannot_be_computed_or_given_ends_no_encoder(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> Any:
        raise error

    step(encoder, OPEN, mail(wire.Encode(1, A, Image(2, 2, b"pp"), 10.0)))
    before = num_files()
    full = OSError(errno.EMFILE, "Too many open files")
    with monkeypatch.context() as patch:
        patch.setattr(Sealed, "twin", lambda sealed: fail(full))
        step(encoder, *(mail(wire.Encode(2 + at, key, Image(2, 2, b"pp"), 10.0)) for at, key in enumerate((A, B))))
        patch.setattr(encoder.tower, "encode", lambda image: fail(torch.OutOfMemoryError("no memory")))
        step(encoder, mail(wire.Encode(4, B, Image(2, 2, b"pp"), 10.0)))
        patch.setattr(encoder.tower, "encode", lambda image: fail(torch.AcceleratorError("the device is lost")))
        with pytest.raises(torch.AcceleratorError):
            step(encoder, mail(wire.Encode(5, B, Image(2, 2, b"pp"), 10.0)))
    assert num_files() == before
    assert encoder.post.take(wire.EncodeFailed) == [
        wire.EncodeFailed(2, "the encoder has no room: Too many open files"),
        wire.EncodeFailed(3, "the encoder has no room: Too many open files"),
        wire.EncodeFailed(4, "the encoder cannot compute it: no memory"),
    ]
    step(encoder, mail(wire.Encode(6, A, Image(2, 2, b"pp"), 10.0)))
    assert [each.item for each in encoder.post.take(wire.EncodeDone)] == [1, 6]


def test_sleep_adapters_and_an_empty_store(encoder: Encoder) -> None:
    step(encoder, ConnOpened("s", "scheduler@1", "scheduler"), OPEN)
    adapters = wire.WantedAdapters([wire.AdapterPlace("l" * 64, "/a")])
    step(encoder, mail(wire.Encode(1, A, Image(2, 2, b"pp"), 10.0)))
    step(encoder, mail(adapters, "s"), mail(wire.ResetCache(), "s"))
    assert encoder.post.take(wire.AdapterStates) == [wire.AdapterStates(["l" * 64])]
    assert not encoder.worker._kept
    step(encoder, mail(wire.Sleep(2), "s"))
    encoder.worker._sleep.settle()
    assert encoder.worker._tower is None
    step(encoder, mail(wire.Encode(2, A, Image(2, 2, b"pp"), 10.0)))
    assert encoder.post.take(wire.EncodeFailed)[0].reason == "the encoder sleeps"
    step(encoder, mail(wire.Sleep(0), "s"))
    encoder.worker._sleep.settle()
    step(encoder, mail(wire.Encode(3, A, Image(2, 2, b"pp"), 10.0)))
    assert [each.item for each in encoder.post.take(wire.EncodeDone)] == [1, 3]
    assert encoder.worker.load.num_cache_resets == 1
