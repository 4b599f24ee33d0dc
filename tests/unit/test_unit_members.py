"""A unit's members find each other, compare settings, meet, and exchange rows in the order of members."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_cluster import wire
from pd_cluster.devices.device import CPU, Device
from pd_cluster.engine.assembly.build_unit import terms_of
from pd_cluster.engine.lifecycle.worker_drain import CLOSES_AFTER_S, WorkerDrain
from pd_cluster.engine.ranks.follower import Follower
from pd_cluster.engine.ranks.rank_messages import TakePart
from pd_cluster.engine.unit.member_connections import MemberConnections
from pd_cluster.engine.unit.unit_meeting import gloo_group
from pd_cluster.engine.unit.unit_rounds import UnitRounds
from pd_cluster.engine.worker.mailbox_reader import MailboxReader
from pd_cluster.errors import ConfigError, InstanceLost, told
from pd_cluster.model.parallel.unit_group import UnitGroup
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_configs import UnitPlace
from tests.support.checkpoints import make_checkpoint
from tests.support.unit_exchange import WAIT_S, connected, exchange_rows


class Town:
    """Mailboxes of several members in one process; connections open at once, messages arrive in order."""

    def __init__(self, terms: list[dict[str, str]]) -> None:
        size = len(terms)
        self.lost: list[tuple[int, int, str]] = []
        self.peers = [
            wire.PeerInfo(
                name=f"decode-{rank}", epoch=rank + 1, role="decode", host="127.0.0.1", control_port=9,
                public_key=bytes(32), unit="decode-0", unit_rank=rank, is_forming=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        self.keys: list[list[wire.UnitKey]] = [[] for _ in terms]
        self.posts = [Post(self, rank) for rank in range(size)]
        self.mates = [
            MemberConnections(
                UnitPlace(name="decode-0", rank=rank, size=size),
                own,
                self.posts[rank],
                lambda other, _, why, rank=rank: self.lost.append((rank, other, why)),  # type: ignore[misc]
                self.keys[rank].append,
            )
            for rank, own in enumerate(terms)
        ]

    def peer(self, rank: int) -> str:
        return f"decode-{rank}@{rank + 1:x}"


class Post:
    def __init__(self, town: Town, rank: int) -> None:
        self._town, self._rank = town, rank
        self.connecting: Callable[[str], None] = lambda conn: None
        self.cut: list[str] = []

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        conn = f"{self._rank}-{name.rpartition('-')[2]}"
        self.connecting(conn)
        return conn

    def disconnect(self, conn: str) -> None:
        self.cut.append(conn)

    def await_confirmed(self, timeout_s: float) -> bool:
        return True

    def send(self, conn: str, body: wire.Body) -> None:
        first, second = map(int, conn.split("-"))
        other = second if first == self._rank else first
        self._town.mates[other].read(conn, self._town.peer(self._rank), body)

    def open(self, conn: str) -> None:
        self._town.mates[self._rank].opened(conn)


def formed(town: Town) -> None:
    for rank, each in enumerate(town.mates):
        each.hear(town.peers)
        for other in range(rank + 1, len(town.mates)):
            town.mates[other].hear(town.peers)
            town.posts[rank].open(f"{rank}-{other}")


def test_all_meet_whatever_the_order() -> None:
    town = Town([{"dtype": "auto"}] * 4)
    formed(town)
    for rank, each in enumerate(town.mates):
        each.await_all(WAIT_S)
        assert sorted(
            each.rank_of(f"{min(rank, other)}-{max(rank, other)}") for other in range(4) if other != rank
        ) == [other for other in range(4) if other != rank]
    town.mates[0].send(wire.UnitKey(1, "key", b"value"))
    assert [len(each) for each in town.keys] == [0, 1, 1, 1]
    for each in town.mates[1:3]:
        each.send(wire.UnitDone())
    town.mates[1].closed("1-2", "the connection was closed")  # its end, which ends this member, too
    town.mates[2].closed("0-2", "nothing heard for 3 s")
    assert town.lost == [(2, 0, "nothing heard for 3 s")]


def test_other_settings_are_named_on_both_sides() -> None:
    town = Town([{"dtype": "auto"}, {"dtype": "bfloat16"}])
    formed(town)
    for each, theirs, own in zip(town.mates, ("bfloat16", "auto"), ("auto", "bfloat16"), strict=True):
        with pytest.raises(ConfigError) as raised:
            each.await_all(WAIT_S)
        assert f"--dtype: decode-{1 - each.place.rank} has {theirs}, but this" in told(raised.value.text)
        assert f"has {own};" in raised.value.text


def test_a_stranger_is_not_heard() -> None:
    """Ignores members that the scheduler does not name, wrong ranks, and keys from a member without terms."""
    town = Town([{}, {}, {}])
    town.mates[1].hear(town.peers[:2])
    for peer, rank in (("decode-2@3", 2), ("decode-0@1", 2), ("decode-0@1", 1)):
        town.mates[1].read("0-1", peer, wire.UnitTerms(rank, {"size": "3"}))
        town.mates[1].read("0-1", peer, wire.UnitKey(0, "key", b""))
    assert town.mates[1].rank_of("0-1") is None
    assert not town.keys[1]
    assert town.posts[1].cut == ["0-1"] * 3  # so a member named later need not wait for an answer


def test_terms_follow_a_connection_that_opens_before_it_is_noted() -> None:
    town = Town([{}, {}])
    opening: list[threading.Thread] = []

    def open_at_once(conn: str) -> None:
        opening.append(threading.Thread(target=town.posts[0].open, args=(conn,)))
        opening[0].start()
        opening[0].join(0.1)

    town.posts[0].connecting = open_at_once
    town.mates[1].hear(town.peers)
    town.mates[0].hear(town.peers)
    opening[0].join(WAIT_S)
    assert [each.rank_of("0-1") for each in town.mates] == [1, 0]


def test_only_schedulers_name_mates_and_a_dead_mailbox_ends_the_wait() -> None:
    town = Town([{}, {}])
    mates = town.mates[0]
    mailbox_reader = MailboxReader(queue.SimpleQueue(), mates)
    connecting: list[str] = []
    town.posts[0].connecting = connecting.append
    for conn, kind in (("in:worker", "worker"), ("in:scheduler", "scheduler")):
        mailbox_reader.on_opened(conn, f"{kind}@1", kind)
        mailbox_reader.on_message(conn, f"{kind}@1", wire.Peers(town.peers, 0))
        assert connecting == (["0-1"] if kind == "scheduler" else [])
    mailbox_reader.on_fatal(OSError("no more files"))
    with pytest.raises(OSError, match="no more files"):
        mates.await_all(WAIT_S)


def test_hosts_are_those_of_the_mates_though_a_new_scheduler_names_none_yet() -> None:
    town = Town([{}, {}, {}])
    formed(town)
    town.mates[0].hear([])
    assert town.mates[0].hosts() == ["127.0.0.1"] * 2


def test_terms_fit_a_message(tmp_path: Path) -> None:
    """Long overrides must not make a message unreadable, which would leave both members waiting."""
    folder = make_checkpoint(tmp_path, "qwen3_moe")
    found = []
    for last in range(2):
        engine = EngineConfig(model=str(folder), hf_overrides={f"unused_{at}": last for at in range(100)})
        found.append(terms_of(engine, CPU))
        body = wire.UnitTerms(0, found[-1])
        assert wire.decode(wire.seal("decode-0", 1, 2, wire.encode_body(body))).body == body
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"hf_overrides"}
    assert found[0]["dtype"] == "float32"  # not auto, which other processors may resolve differently


def test_a_member_is_done_once_nobody_can_send_requests() -> None:
    """Without legs, a draining member is done only after the time in which schedulers may still send requests."""
    now_s, sent = [0.0], list[wire.Body]()
    mates = SimpleNamespace(send=sent.append)
    drain = WorkerDrain(30.0, lambda: now_s[0])
    group = SimpleNamespace(rank=0, size=2)
    rounds = UnitRounds(mates, group, None, SimpleNamespace(are_over=True), drain, lambda event: None)  # type: ignore[arg-type]
    drain.begin()
    rounds.tick()
    rounds.release_all()
    assert sent == [wire.UnitDrain()]
    now_s[0] = CLOSES_AFTER_S
    rounds.release_all()
    assert sent == [wire.UnitDrain(), wire.UnitDone()]


def test_a_follower_rests_after_its_part() -> None:
    calls: list[str] = []
    runner = SimpleNamespace(
        expect=lambda rows: calls.append(f"expect {rows}"),
        take_part=lambda: calls.append("take part"),
        threads=SimpleNamespace(rest=lambda: calls.append("rest")),
        close_tiers=lambda: None,
    )
    hear: list[Callable[[Any], None]] = []
    channel = SimpleNamespace(start=lambda name, read, ended: hear.append(read), error=None)
    follower = Follower(runner, channel, None)  # type: ignore[arg-type]
    follower.start()
    hear[0](TakePart((0, 3)))
    follower.stop()
    follower.run()
    assert calls == ["expect (0, 3)", "take part", "rest"]


def test_one_that_is_lost_while_others_wait_ends_the_wait() -> None:
    town = Town([{}, {}, {}])
    town.mates[0].hear(town.peers)
    town.posts[0].open("0-1")
    town.mates[1].hear(town.peers)
    town.mates[1].read("0-1", town.peer(0), wire.UnitTerms(0, {"size": "3"}))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(town.mates[1].await_all, WAIT_S)
        town.mates[1].closed("0-1", "gone")
        with pytest.raises(InstanceLost, match=r"decode-0, member 0 of the unit decode-0: gone"):
            waiting.result(WAIT_S)


def test_members_have_one_kind_of_device_and_accelerators_one_size_of_steps(checkpoint: Callable[..., Path]) -> None:
    """On accelerators all members compute the largest step at load; its default size depends on the device."""
    engine = EngineConfig(model=str(checkpoint("qwen3_moe")), dtype="float16", max_num_seqs=9)
    cpu, npu = (terms_of(engine, device) for device in (CPU, Device("npu")))
    assert npu.items() - cpu.items() == {("device", "npu"), ("max_num_seqs", "9"), ("max_model_len", "None")}
    assert (cpu["device"], cpu["max_num_batched_tokens"]) == ("cpu", "2048")


@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_exchanged_in_the_order_of_members(size: int) -> None:
    def meet(store: Any, rank: int, size: int) -> Any:
        return gloo_group(store, rank, size, "127.0.0.1")

    exchange_rows(connected(size, meet, UnitGroup), torch.float32)
