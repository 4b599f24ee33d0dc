"""With several schedulers, followers use the owner's list, and only the owner gives orders."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from pd_cluster.cluster.leases.membership_lease import LeaseRecord
from pd_cluster.errors import Refused, Unavailable
from tests.support.elastic_world import ElasticWorld
from tests.support.shared_schedulers import LEASE_S, Scheduler, Two


async def test_only_the_owner_gives_orders_and_commands_at_another_name_it(tmp_path: Path) -> None:
    """A follower names the owner to operators; one that cannot reach the record names none."""
    two = await Two.begun(tmp_path)
    assert {peers.term for peers in two.one.orders} == {1}
    two.other.world.membership.send_peers()
    assert not two.other.orders
    with pytest.raises(Refused, match=r"scheduler-1 does not own membership: scheduler-0 does, at http://.*:9001"):
        two.other.world.elastic.drain("decode-1")
    assert two.other.fence.term == 1, "it must greet workers with the owner's term"
    assert two.one.shared.owner == "scheduler-0"
    two.now_s += LEASE_S
    assert two.one.shared.owner == ""
    with pytest.raises(Refused, match="scheduler-0 does not own membership: none does now; try again"):
        two.one.world.elastic.drain("decode-1")


async def test_a_command_is_recorded_and_outlives_the_owner(tmp_path: Path) -> None:
    two = await Two.begun(tmp_path)
    elastic = two.one.world.elastic
    done = asyncio.ensure_future(elastic.done(elastic.drain("decode-1", timeout_s=7.0)))
    await asyncio.sleep(0)
    assert not done.done(), "the command is not in the record yet"
    await two.one.look()
    assert (await done).service == "out"
    await two.other.look()
    followed = two.other.world["decode-1"]
    assert (followed.service, followed.drain_timeout_s, followed.takes_requests) == ("out", 7.0, False)
    await two.fail_over()
    assert two.other.world["decode-1"].service == "out"
    assert two.other.orders[-1].term == 2
    await two.one.look()  # it was paused
    assert two.one.world["decode-1"].service == "out"
    assert not two.one.shared.is_owner


async def test_a_command_at_an_owner_that_is_none_any_more_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_cluster.cluster.members.shared_membership.RECORD_TIMEOUT_S", 0.05)
    two = await Two.begun(tmp_path)
    elastic = two.one.world.elastic
    drained = elastic.drain("decode-1")
    await two.fail_over()
    with pytest.raises(Unavailable, match="may be lost with"):
        await elastic.done(drained)
    await two.one.look()
    assert two.one.world["decode-1"].service == "in", "it must follow the owner's list"


async def test_roles_and_members_follow_once_all_had_time_to_hear(tmp_path: Path) -> None:
    two = await Two.begun(tmp_path)
    world = two.one.world
    world.elastic.change_role("decode-1", "prefill")
    world.elastic.remove("prefill-1")
    world.elastic.tick()
    assert world["decode-1"].role == "decode", "others may still send requests there"
    world.now_s += 0.5
    world["decode-1"].others_tokens = 5
    world.elastic.tick()
    assert world["decode-1"].role == "decode", "another scheduler has a request there"
    world["decode-1"].others_tokens = 0
    world.elastic.tick()
    assert world["decode-1"].role == "prefill"
    assert "prefill-1" not in world.names
    await two.one.look()
    await two.other.look()
    assert two.other.world["decode-1"].role == "prefill"
    assert "prefill-1" not in two.other.world.names
    assert not two.other.orders


async def test_a_refused_order_makes_the_owner_look_and_ends_nothing_by_itself(tmp_path: Path) -> None:
    """Only the record decides who owns membership; otherwise a lying worker could end an ownership."""
    two = await Two.begun(tmp_path)
    two.one.world.membership.on_stale_order("to-decode-0", 2**62)
    assert two.one.shared.look_requested.is_set()
    await two.one.look()
    assert two.one.shared.is_owner
    assert two.one.fence.term == 1, "workers must be greeted with the record's term"
    await two.fail_over()
    assert not two.one.shared.is_owner


async def test_a_record_that_was_removed_is_its_owner_s_to_write_again(tmp_path: Path) -> None:
    """The owner rewrites it, because a new scheduler does not know the workers that have joined."""
    two = await Two.begun(tmp_path)
    two.one.world.elastic.drain("decode-1", timeout_s=7.0)
    await two.one.look()
    for file in (tmp_path / "lease").glob("0*"):
        file.unlink()
    new = Scheduler(tmp_path, 2, lambda: two.now_s)
    for each in (new, two.other):
        await each.look()
        assert not each.shared.is_owner
    assert two.other.world.membership.instances, "an empty record must not remove instances"
    two.now_s += LEASE_S / 2
    await two.one.look()
    assert (two.one.shared.ownership.term_now, two.one.shared.ownership.record.version) == (1, 2)
    await new.look()
    assert new.shared.owner == "scheduler-0"
    assert new.world["decode-1"].service == "out"


async def test_a_write_that_another_program_got_ahead_of_is_made_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = await Two.begun(tmp_path)
    store, shared, refused = two.one.store, two.one.shared, [True]
    write = store.write
    monkeypatch.setattr(store, "write", lambda record: not (refused and refused.pop()) and write(record))
    two.now_s += LEASE_S / 2
    await two.one.look()
    assert not refused
    two.now_s += LEASE_S * 0.9
    assert shared.is_owner, "the lease must be renewed"
    monkeypatch.setattr(store, "write", lambda record: False)
    await two.one.look()
    assert shared.is_owner, "there can be no other owner before the lease ends"
    two.now_s += LEASE_S * 0.2
    assert not shared.is_owner


async def test_an_owner_whose_workers_follow_a_later_term_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two = await Two.begun(tmp_path)
    for term, says_so in ((1, False), (7, True), (None, False)):
        caplog.clear()
        if term is not None:
            two.one.world.membership.on_stale_order("to-decode-0", term)
        await two.one.look()
        assert ("workers follow term 7 and refuse earlier ones, but this owner" in caplog.text) == says_so
    assert two.one.shared.is_owner
    caplog.clear()
    ElasticWorld().membership.on_stale_order("to-decode-0", 7)  # with a single scheduler
    (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "restart the workers" in told.getMessage()


@pytest.mark.parametrize("is_slow", [False, True])
async def test_the_lease_is_let_go_after_a_write_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    two = await Two.begun(tmp_path)
    shared, begun, goes_on = two.one.shared, threading.Event(), threading.Event()
    write, written = two.one.store.write, list[str]()

    def slowly(record: LeaseRecord) -> bool:
        begun.set()
        assert goes_on.wait(10)
        written.append(record.holder)
        return write(record)

    monkeypatch.setattr(two.one.store, "write", slowly)
    monkeypatch.setattr("pd_cluster.cluster.members.shared_membership.CALL_PART", 0.01 if is_slow else 5.0)
    two.now_s += LEASE_S / 2
    running = asyncio.create_task(shared.run())
    assert await asyncio.to_thread(begun.wait, 10)
    running.cancel()
    if not is_slow:
        asyncio.get_running_loop().call_later(0.02, goes_on.set)
    await asyncio.wait((running,), timeout=10)
    assert running.cancelled()
    assert written == ([] if is_slow else ["scheduler-0@1", ""]), "expected one call at a time"
    goes_on.set()


async def test_a_new_scheduler_is_no_owner_before_it_reaches_all(tmp_path: Path) -> None:
    """Its incomplete list of live instances would close links in use; until then it keeps the record's list."""
    two = await Two.begun(tmp_path)
    two.one.world.elastic.drain("decode-1", timeout_s=7.0)
    await two.one.look()
    await two.one.stop()
    new = Scheduler(tmp_path, 2, lambda: two.now_s)
    new.world["decode-0"].state = "connecting"
    await new.look()
    two.now_s += LEASE_S + 0.1
    await new.look()
    assert not new.shared.is_owner
    assert new.world["decode-1"].service == "out"
    new.world["decode-0"].state = "ready"
    await new.look()
    assert new.shared.is_owner
    (member,) = [each for each in new.shared.ownership.record.members if each.name == "decode-1"]
    assert (member.service, member.drain_timeout_s) == ("out", 7.0)


async def test_terms_of_a_new_folder_are_later_than_those_of_a_lost_one(tmp_path: Path) -> None:
    terms, now_s = [], [10.0]
    for wall_s in (1_000_000.9, 1_000_050.0):
        one = Scheduler(tmp_path, 0, lambda: now_s[0])
        one.wall_s = wall_s
        await one.look()
        now_s[0] += LEASE_S
        await one.look()
        terms.append(one.fence.term)
        for file in (tmp_path / "lease").iterdir():
            file.unlink()
    assert terms == [1_000_000, 1_000_050]
    one.wall_s = 0.0  # the wall clock was set back
    for _ in range(2):
        now_s[0] += LEASE_S
        await one.look()
    assert one.fence.term == 1_000_051


async def test_others_have_longer_to_hear_where_leases_are_longer(tmp_path: Path) -> None:
    two = await Two.begun(tmp_path)
    assert two.one.shared.settle_s == 0.5
    two.one.shared.ownership.duration_s = 15.0
    world = two.one.world
    world.elastic.change_role("decode-1", "prefill")
    for now_s, role in ((4.4, "decode"), (4.5, "prefill")):
        world.now_s = now_s
        world.elastic.tick()
        assert world["decode-1"].role == role
