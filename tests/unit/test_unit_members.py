"""Members of a unit find each other, compare their settings, meet, and exchange rows in the order of the members."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from pd_cluster import wire
from pd_cluster.engine.unit.mates import Mates
from pd_cluster.engine.unit.meet import gloo_group
from pd_cluster.errors import ConfigError, InstanceLost, told
from pd_cluster.model.parallel.unit import UnitGroup
from pd_cluster.settings.config import UnitPlace
from pd_cluster.transport.meeting import Meeting

WAIT_S = 20.0


class Town:
    """Mailboxes of several members in one process: connections open at once, and messages arrive in order."""

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
            Mates(
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

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        return f"{self._rank}-{name.rpartition('-')[2]}"

    def disconnect(self, conn: str) -> None: ...

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
    town.mates[1].closed("1-2", "the connection was closed")  # it has ended, as this one will
    town.mates[2].closed("0-2", "nothing heard for 3 s")
    assert town.lost == [(2, 0, "nothing heard for 3 s")]


def test_other_settings_are_named_on_both_sides() -> None:
    town = Town([{"dtype": "auto"}, {"dtype": "bfloat16"}])
    formed(town)
    for each, theirs, own in zip(town.mates, ("bfloat16", "auto"), ("auto", "bfloat16"), strict=True):
        with pytest.raises(ConfigError) as raised:
            each.await_all(WAIT_S)
        assert f"--dtype: decode-{1 - each.place.rank} has {theirs}, and this" in told(raised.value.text)
        assert f"has {own};" in raised.value.text


def test_a_stranger_is_not_heard() -> None:
    """One that the scheduler does not name, one of another rank, and keys of one that has sent no terms."""
    town = Town([{}, {}, {}])
    town.mates[1].hear(town.peers[:2])
    for peer, rank in (("decode-2@3", 2), ("decode-0@1", 2), ("decode-0@1", 1)):
        town.mates[1].read("0-1", peer, wire.UnitTerms(rank, {"size": "3"}))
        town.mates[1].read("0-1", peer, wire.UnitKey(0, "key", b""))
    assert town.mates[1].rank_of("0-1") is None
    assert not town.keys[1]


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


def groups(size: int) -> list[UnitGroup]:
    """Ends that meet by keys that travel as they do between processes."""
    meetings: list[Meeting] = []

    def post(rank: int, key: str, value: bytes) -> None:
        for other, meeting in enumerate(meetings):
            if other != rank:
                meeting.put(key, value)

    def meet(rank: int) -> Any:
        with meetings[rank].held():
            return gloo_group(meetings[rank].store, rank, size, "127.0.0.1")

    meetings += [Meeting(WAIT_S, partial(post, rank), size - 1) for rank in range(size)]
    return [UnitGroup(rank, size, partial(meet, rank), WAIT_S) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_rows_are_exchanged_in_the_order_of_members(size: int) -> None:
    """With any numbers of rows; what comes back is added in that order, whose bits a reference has."""
    rng = random.Random(size)
    steps = [[rng.choice((0, 1, 5, 64)) for _ in range(size)] for _ in range(12)]
    made = torch.Generator().manual_seed(size)
    rows = [[torch.randn(num, 24, generator=made) for num in step] for step in steps]
    parts = [torch.randn(size, sum(step), 24, generator=made) * 1e3 for step in steps]
    barrier = threading.Barrier(size)

    def member(group: UnitGroup) -> None:
        barrier.wait(WAIT_S)
        group.form()
        for step, xs, partials in zip(steps, rows, parts, strict=True):
            own = step[group.rank]
            told = group.agree((own, group.rank))
            assert told == [[num, rank] for rank, num in enumerate(step)]
            group.rows = [num for num, _ in told]
            chosen, weights = torch.full((own, 3), group.rank), torch.full((own, 3), group.rank + 0.5)
            found = group.gather(xs[group.rank], chosen, weights)
            expected = [torch.cat([torch.full((n, 3), rank) for rank, n in enumerate(step)])]
            assert [each.dtype for each in found] == [torch.float32, torch.int64, torch.float32]
            assert torch.equal(found[0], torch.cat(xs))
            assert torch.equal(found[1], expected[0])
            assert torch.equal(found[2], expected[0] + 0.5)
            start = sum(step[: group.rank])
            total = partials[0, start : start + own].clone()
            for other in partials[1:]:
                total += other[start : start + own]
            assert torch.equal(group.combine(partials[group.rank]), total)

    with ThreadPoolExecutor(size) as threads:
        for each in [threads.submit(member, group) for group in groups(size)]:
            each.result(2 * WAIT_S)
