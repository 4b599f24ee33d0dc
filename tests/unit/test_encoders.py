"""Separate encoders, without processes: the choice of an encoder for an image, and the transfer of features."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.overview.cluster_problems import problems_of
from pd_cluster.cluster.overview.request_history import RequestHistory
from pd_cluster.cluster.placement.encoder_choice import SLACK_TOKENS, choose_encoders
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import plan_cluster
from pd_cluster.errors import LinkError
from pd_cluster.extras.encoders.feature_events import EncoderReached, EncoderUnreached, FeatureEvent, FeaturesRead
from pd_cluster.extras.encoders.feature_files import FeatureServer, SealedFile, Shape, fetch, reach
from pd_cluster.extras.encoders.feature_pair import PairSender
from pd_cluster.extras.encoders.feature_reader import FeatureReader
from pd_cluster.numerics import Numerics
from pd_cluster.process_messages import InstanceInfo
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.transport.transport_interface import Checksum
from pd_cluster.types import LinkState, RequestSpec, Sampling
from tests.support.encoder_values import FEATURES, OPENING, PLACE, SHAPE, TERMS, UP, order_of

# ---- the choice


def instance(name: str, role: Any, **links: Any) -> Instance:
    info = InstanceInfo(name=name, role=role, state="ready", server_ip="", device_ids=[], epoch=1, pid=1)
    load = wire.Load(links={f"{peer.replace('_', '-')}@1": state for peer, state in links.items()})
    return Instance(name, role, "h", 1, [], state="ready", info=info, load=load)


def test_the_same_image_meets_the_same_encoder_unless_it_is_busy_or_away() -> None:
    prefill = instance("prefill-0", "prefill", encode_0=UP, encode_1=UP, encode_2=UP)
    encoders = [instance(f"encode-{at}", "encode") for at in range(3)]
    order = order_of(*(bytes([at]) * 32 for at in range(60)))
    found = choose_encoders(order, prefill, [prefill, *encoders])
    assert {each.name for each in found} == {each.name for each in encoders}
    assert found == choose_encoders(order, prefill, [*reversed(encoders), prefill])
    fewer = choose_encoders(order, prefill, encoders[:2])
    assert all(new is old for new, old in zip(fewer, found, strict=True) if old is not encoders[2])
    prefill = instance("prefill-0", "prefill", encode_0=UP, encode_1=UP)
    busy, idle = instance("encode-0", "encode"), instance("encode-1", "encode")
    busy.outstanding_tokens = 2 * SLACK_TOKENS
    order = order_of(*(bytes([at]) * 32 for at in range(20)))
    assert set(map(id, choose_encoders(order, prefill, [prefill, busy, idle]))) == {id(idle)}
    prefill = instance("prefill-0", "prefill", encode_0=UP)
    encoder = instance("encode-0", "encode")
    order = order_of(b"d" * 32)
    assert choose_encoders(order, prefill, [encoder]) == [encoder]
    assert choose_encoders(RequestSpec([1], Sampling()), prefill, [encoder]) == []
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
        assert member.env["RANK_TABLE_FILE_PATH"] == "", "the environment of `up` must not change this"
    assert len({each.port for each in members.values()} | {int(join)}) == 6
    plain = plan_cluster(Launch(model="m"), tmp_path)
    assert not [flag for member in plain for flag in member.command if "join" in flag]
    given = plan_cluster(Launch(model="m", num_encode=1, arguments=["--join-port=9002"]), tmp_path)
    assert "--join=127.0.0.1:9002" in next(each for each in given if each.name == "encode-0").command


def test_a_refused_encoder_is_a_problem_that_is_named() -> None:
    refused = LinkState("refused", reason="the encoder has --dtype bfloat16")
    prefill = instance("prefill-0", "prefill", encode_0=refused, encode_1=UP, decode_0=UP)
    others = [instance("decode-0", "decode"), instance("encode-0", "encode"), instance("encode-1", "encode")]
    found = problems_of([prefill, *others], RequestHistory(), RoutingConfig())
    assert [each.text for each in found] == ["prefill-0 gets no images from encode-0, and computes them itself"]
    assert "bfloat16" in found[0].reason


# ---- features between processes


@pytest.fixture
def server() -> Iterator[FeatureServer]:
    with contextlib.closing(FeatureServer()) as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_arrive_once_and_as_they_were(server: FeatureServer, dtype: torch.dtype) -> None:
    checksum, sent = Checksum(), FEATURES.to(dtype)
    reach(server.name, 5)
    file = SealedFile.of(sent, checksum)
    with pytest.raises(OSError, match="not permitted"):
        os.write(file.fd, b"x")
    token = server.offer(file)
    found = fetch(server.name, token, Shape(SHAPE, dtype), checksum, file.checksum, 5)
    assert found.dtype == dtype
    assert torch.equal(found, sent)
    with pytest.raises(LinkError, match="no longer has the features"):
        fetch(server.name, token, Shape(SHAPE, dtype), checksum, file.checksum, 5)


def test_wrong_features_are_refused(server: FeatureServer) -> None:
    checksum = Checksum()
    file = SealedFile.of(FEATURES, checksum)
    open_fd = os.memfd_create("open")
    os.write(open_fd, bytes(file.nbytes))
    withdrawn = server.offer(file.duplicate())
    server.withdraw(withdrawn)
    for token, dtype, announced, said in (
        (server.offer(file.duplicate()), torch.float32, file.checksum ^ 1, "do not have the announced checksum"),
        (server.offer(file.duplicate()), torch.bfloat16, file.checksum, "are 192 bytes, not 96"),
        (server.offer(replace(file, fd=open_fd)), torch.float32, file.checksum, "could change while it is read"),
        (withdrawn, torch.float32, file.checksum, "no longer has the features"),
    ):
        with pytest.raises(LinkError, match=said):
            fetch(server.name, token, Shape(SHAPE, dtype), checksum, announced, 5)
    server.close()
    with pytest.raises(LinkError, match="the encoder's socket for features cannot be reached") as found:
        reach(server.name, 5)
    assert not found.value.retry


@pytest.mark.parametrize("transport", ["dist", "curve"])
def test_features_over_a_pair_come_in_order_and_are_checked(transport: str) -> None:
    """Both ends are production code; only the connection between them is replaced by direct calls."""
    events: queue.SimpleQueue[FeatureEvent] = queue.SimpleQueue()
    failures: list[str] = []
    made: Future[FeatureReader] = Future()  # the server's thread may run before the reader's variable is set
    large = torch.arange(5_000_000, dtype=torch.float32).reshape(1, 5000, 1000)  # sent in several pieces

    def post(body: wire.Body) -> None:
        match body:
            case wire.EncoderMeet():
                sender.open()
            case wire.LinkValue():
                sender.meeting.put(body.key, body.value)

    sender = PairSender(
        "group", transport, PLACE, lambda key, value: made.result(30).meeting.put(key, value), failures.append
    )
    reader = FeatureReader("c", wire.EncoderAnswer("", "", "group", transport), PLACE, post, events.put)
    made.set_result(reader)
    try:
        assert events.get(timeout=30) == EncoderReached("c", transport)
        for number, (features, is_wanted, is_right) in enumerate(
            ((FEATURES, True, True), (large, False, True), (large, True, True), (FEATURES, True, False))
        ):
            file = SealedFile.of(features, PLACE.checksum)
            done = wire.EncodeDone(number, bytes(16), file.nbytes, file.checksum ^ (not is_right))
            sender.put(file)
            reader.read(done, Shape(tuple(features.shape), features.dtype) if is_wanted else None)
            if is_wanted:
                event = events.get(timeout=30)
                assert isinstance(event, FeaturesRead)
                assert event.item == number
                assert (event.features is not None and torch.equal(event.features, features)) == is_right
        assert not failures
        sender.put(SealedFile.of(FEATURES, PLACE.checksum))
        reader.read(wire.EncodeDone(9, bytes(16), FEATURES.nbytes, 1), Shape((1, 2, 3), torch.float32))
        event = events.get(timeout=30)
        assert isinstance(event, EncoderUnreached)
        assert (event.retry, event.reason) == (True, "the encoder announces 192 bytes of features")
    finally:
        reader.close()
        sender.close()


def test_a_link_is_down_when_its_thread_has_failed(server: FeatureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed thread brings its link down; an error of one image does not."""
    events: queue.SimpleQueue[FeatureEvent] = queue.SimpleQueue()
    file = SealedFile.of(FEATURES, PLACE.checksum)
    answer = wire.EncoderAnswer("", server.name)
    with contextlib.closing(FeatureReader("c", answer, PLACE, lambda body: None, events.put)) as reader:
        assert events.get(timeout=30) == EncoderReached("c", "shm")
        for shape in ((1 << 62,), SHAPE):
            done = wire.EncodeDone(1, server.offer(file.duplicate()), file.nbytes, file.checksum)
            reader.read(done, Shape(shape, torch.float32))
            event = events.get(timeout=30)
            assert isinstance(event, FeaturesRead)
            assert (event.features is not None) == (shape == SHAPE)
        monkeypatch.setattr(reader, "_fetch", lambda *_: [][0])
        reader.read(done, Shape(SHAPE, torch.float32))
        event = events.get(timeout=30)
        assert isinstance(event, EncoderUnreached)
        assert event.retry


def test_a_socket_of_another_host_leaves_the_pair_or_nothing() -> None:
    for group in ("", "group"):
        events: queue.SimpleQueue[FeatureEvent] = queue.SimpleQueue()
        sent: queue.SimpleQueue[wire.Body] = queue.SimpleQueue()
        place = replace(PLACE, connect_s=0.1)
        reader = FeatureReader("c", wire.EncoderAnswer("", "nowhere", group, "dist"), place, sent.put, events.put)
        if group:
            assert sent.get(timeout=30) == wire.EncoderMeet()
        event = events.get(timeout=30)  # no peer joins the pair
        assert isinstance(event, EncoderUnreached)
        assert event.retry == bool(group)
        reader.close()


def test_terms_name_what_differs() -> None:
    def problem(**changes: Any) -> str:
        return TERMS.problem(msgspec.structs.replace(OPENING, **changes))

    assert problem(numerics=Numerics(attention_backend="c", kv_cache_dtype="int8")) == ""
    assert "another model (model)" in problem(model_identity="other")
    assert "--dtype bfloat16" in problem(numerics=Numerics(dtype="bfloat16"))
    assert "--device cpu" in problem(numerics=Numerics(device="cuda"))
    assert "(the encoder has auto)" in problem(transports=["nixl"])
    assert "the encoder has nixl" in replace(TERMS, kv_transport="nixl").problem(OPENING)
