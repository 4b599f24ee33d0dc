"""Workers without a rank table, with several schedulers: the owner admits workers, the others follow its list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.join_registrar import ELSEWHERE, Registrar
from pd_cluster.cluster.members.worker_joining import FIRST_BACKOFF_S
from pd_cluster.errors import ConfigError
from tests.support.joining_worker import JOIN, REACH_S, TIMES, Seeker
from tests.support.mail import RecordedMail
from tests.support.shared_schedulers import LEASE_S, Two

ADMITTED = wire.JoinAnswer()


class Admitting(Two):
    """Two schedulers, each with a join port; scheduler-0 owns membership at first."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.waited_s = 0.0  # the registrars' clock, separate from the lease's
        self.mail = [RecordedMail(), RecordedMail()]
        self.schedulers = [self.one, self.other]
        self.registrars = [
            Registrar(each.world.membership, mail.send, REACH_S, lambda: self.waited_s)
            for each, mail in zip(self.schedulers, self.mail, strict=True)
        ]

    def join(self, at: int, conn: str = "c1", peer: str = "d@1", **changes: Any) -> wire.JoinAnswer:
        self.registrars[at].on_message(conn, peer, msgspec.structs.replace(JOIN, **changes))
        to, answer = self.mail[at].sent[-1]
        assert to == conn
        assert isinstance(answer, wire.JoinAnswer)
        return answer

    def sent(self, at: int) -> list[tuple[str, wire.JoinAnswer]]:
        return self.mail[at].of(wire.JoinAnswer)

    async def look(self) -> None:
        """Both schedulers read the record, then check their registrations."""
        for each, registrar in zip(self.schedulers, self.registrars, strict=True):
            await each.look()
            registrar.tick()

    def names(self, at: int) -> list[str]:
        return self.schedulers[at].world.names

    def found(self, at: int) -> Instance:
        return self.schedulers[at].world["d"]

    def is_reached(self, at: int) -> None:
        self.schedulers[at].world.make_ready(self.found(at))


async def admitting(folder: Path) -> Admitting:
    """Returns two schedulers that both know a worker admitted by the owner."""
    two = await Admitting.begun(folder)
    await two.look()
    assert two.join(0) == ADMITTED
    await two.look()
    return two


async def test_the_owner_admits_a_worker_and_the_other_learns_of_it(tmp_path: Path) -> None:
    two = await admitting(tmp_path)
    assert two.join(1, "c2", "e@1", port=8001) == ELSEWHERE
    assert "e" not in two.names(1)
    followed = two.found(1)
    assert (followed.joined_as, followed.role, followed.port) == ("decode", "decode", 8000)
    assert followed.host == JOIN.host
    assert two.names(1) == two.names(0)
    two.registrars[1].tick()
    assert "d" in two.names(1), "only the owner may forget a worker"
    two.registrars[0].on_closed("c1")
    await two.look()
    await two.look()
    assert "d" not in two.names(0)
    assert "d" not in two.names(1)


async def test_the_next_owner_takes_the_registrations_over_with_what_was_wished(tmp_path: Path) -> None:
    two = await admitting(tmp_path)
    two.is_reached(0)
    two.one.world.elastic.change_role("d", "prefill", force=True)
    two.one.world.now_s += 0.5
    two.one.world.elastic.tick()
    two.one.world.elastic.drain("d", force=True)
    await two.look()
    two.is_reached(1)
    await two.fail_over()
    await two.look()
    assert two.sent(0)[-1] == ("c1", ELSEWHERE), "its connection to the former owner must not count as a lease"
    assert two.join(1, "c9", role="prefill").problem.startswith("--instance-name d: the decode instance at")
    assert two.join(1, "c9") == ADMITTED, "it reports the role with which it was started"
    assert (two.found(1).role, two.found(1).service) == ("prefill", "out")
    await two.look()
    assert two.names(0) == two.names(1)
    assert two.found(0).joined_as == "decode"


async def test_a_worker_that_dies_with_the_owner_is_forgotten_in_time(tmp_path: Path) -> None:
    two = await admitting(tmp_path)
    assert two.found(1).state == "unreachable"
    two.now_s += 6.0  # longer than it waits for that worker
    await two.fail_over()
    two.registrars[1].tick()
    two.waited_s += REACH_S
    two.registrars[1].tick()
    assert "d" in two.names(1), "the worker may register again"
    two.waited_s += 0.1
    two.registrars[1].tick()
    assert "d" not in two.names(1)


async def test_one_that_serves_and_does_not_register_again_stays(tmp_path: Path) -> None:
    two = await admitting(tmp_path)
    two.is_reached(1)
    await two.fail_over()
    two.registrars[1].tick()
    two.waited_s += 3 * REACH_S
    two.registrars[1].tick()
    assert "d" in two.names(1)
    assert two.join(1, "c2", "d@2", host="192.0.2.8").problem.startswith("--instance-name d: the decode instance")


async def test_an_owner_that_stood_still_sends_its_workers_on_and_admits_nobody(tmp_path: Path) -> None:
    two = await admitting(tmp_path)
    two.now_s += LEASE_S  # the owner is paused
    assert two.join(0, "c2", "e@1", port=8001) == ELSEWHERE, "its lease must end without a read of the record"
    assert two.sent(0)[-2] == ("c1", ELSEWHERE)
    two.registrars[0].on_closed("c1")
    two.registrars[0].tick()
    assert "d" in two.names(0), "the record must have it"


async def test_an_owner_that_comes_back_as_the_owner_begins_anew(tmp_path: Path) -> None:
    two = await admitting(tmp_path)
    two.is_reached(0)
    two.now_s += LEASE_S
    await two.one.look()  # before the other scheduler reads the record
    two.registrars[0].tick()
    assert two.one.shared.is_owner
    assert two.sent(0)[-1] == ("c1", ELSEWHERE)
    assert two.join(0, "c2") == ADMITTED
    assert two.names(0).count("d") == 1


async def test_a_name_at_another_port_is_another_worker(tmp_path: Path) -> None:
    two = await admitting(tmp_path)
    before = two.found(1)
    two.registrars[0].on_closed("c1")
    two.registrars[0].tick()
    assert two.join(0, "c2", "d@2", port=8001) == ADMITTED
    await two.look()
    assert two.found(1) is not before
    assert two.found(1).port == 8001


async def test_no_worker_is_admitted_that_the_record_has_no_room_for(tmp_path: Path) -> None:
    two = await admitting(tmp_path)
    two.one.store.max_record_nbytes = 4096
    num = 0
    while (answer := two.join(0, f"c{num}", f"w{num}@1", port=8000 + num)) == ADMITTED:
        num += 1
    assert answer.problem == "the schedulers' record has no room for another worker; stop some workers first"
    assert 5 < num < 20
    for each in two.one.world.membership.instances:
        each.service, each.next_role, each.drain_timeout_s = "leaving", "prefill", 1234.5678901
    await two.look()
    assert len(msgspec.json.encode(two.one.shared.ownership.record)) <= 4096
    assert two.join(0, "c0", "w0@1").problem.startswith("w0 is leaving"), "a registered worker needs no free place"


# ---- at the worker


def answer_elsewhere(seeker: Seeker, *hosts: str) -> str:
    """Connects to the next host, which refuses to admit; returns the host."""
    seeker.joining.connect(*hosts)
    conn = seeker.joining.conn
    seeker.joining.on_opened(conn)
    seeker.joining.on_answer(conn, ELSEWHERE.problem, True)
    assert (seeker.joining.state, seeker.lines.closed[-1]) == ("seeking", conn)
    return seeker.tried[-1][0]


@pytest.mark.parametrize("order", [("10.0.0.1", "10.0.0.2", "10.0.0.3"), ("10.0.0.3", "10.0.0.1", "10.0.0.2")])
def test_it_asks_all_schedulers_of_a_name_before_it_waits(order: tuple[str, ...]) -> None:
    listed, seeker = Seeker((("a", 1), ("b", 2))), Seeker((("pd-join", 9002),))
    assert [answer_elsewhere(listed, listed.joining.address[0]) for _ in range(2)] == ["a", "b"]
    assert not listed.joining.is_due
    asked = []
    for _ in range(3):
        assert seeker.joining.is_due
        asked.append(answer_elsewhere(seeker, *order))
        order = (*order[1:], order[0])  # rotates addresses as name servers do
    assert sorted(asked) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert not seeker.joining.is_due
    seeker.now_s += FIRST_BACKOFF_S
    assert seeker.joining.is_due


def test_a_registered_one_that_is_sent_on_seeks_the_owner() -> None:
    seeker = Seeker((("pd-join", 9002),))
    conn = seeker.register()
    seeker.joining.on_answer(conn, ELSEWHERE.problem, True)
    assert seeker.joining.state == "seeking"
    assert seeker.lines.closed == [conn]
    seeker.now_s += FIRST_BACKOFF_S
    assert answer_elsewhere(seeker, "10.0.0.1", "10.0.0.2") == "10.0.0.2", "expected the next host"


def test_while_no_scheduler_admits_workers_a_registered_one_serves_on_and_a_new_one_does_not_wait_for_ever() -> None:
    """Covers schedulers without an owner for any time, as while the API server is down."""
    seeker, new = Seeker((("pd-join", 9002),)), Seeker((("pd-join", 9002),))
    seeker.joining.on_answer(seeker.register(), ELSEWHERE.problem, True)
    for _ in range(20):
        seeker.now_s += TIMES.join_timeout_s / 5
        answer_elsewhere(seeker, "10.0.0.1")
        seeker.joining.tick()
    seeker.now_s += TIMES.join_timeout_s
    seeker.joining.tick()
    seeker.now_s += 0.1
    with pytest.raises(ConfigError, match="no scheduler has admitted this worker"):
        seeker.joining.tick()  # no scheduler answers
    new.now_s = TIMES.join_timeout_s
    answer_elsewhere(new, "10.0.0.1")
    new.now_s += 0.1
    with pytest.raises(ConfigError, match="no scheduler has admitted this worker"):
        new.joining.tick()
