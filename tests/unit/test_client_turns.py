"""One rule for places that clients share, and memory that they share."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from pd_cluster.errors import NoRoom, Unavailable
from pd_cluster.service.helpers import children
from pd_cluster.service.helpers.byte_shares import ByteShares
from pd_cluster.service.helpers.children import MAX_CHILDREN, MAX_SLOW, Children, TookTooLong
from pd_cluster.service.helpers.client_turns import ClientTurns, current_client
from pd_cluster.service.helpers.fair_pool import FairPool
from pd_cluster.service.pixels import PixelBudget

DEADLINE_S = 60.0
CHILD = """
import socket, sys, time
from pathlib import Path
link = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
for line in link:
    word = line.decode().strip()
    while word.startswith("slow") and not Path(word.partition(" ")[2]).exists():
        time.sleep(0.01)
    link.write(line)
    link.flush()
"""


def drained(turns: ClientTurns[str]) -> list[str]:
    """Returns all that waits in the order of its turns, where each piece ends before the next begins."""
    order = []
    while (found := turns.next()) is not None:
        order.append(found[1])
        turns.ended(found[0])
    return order


def test_clients_alternate() -> None:
    turns: ClientTurns[str] = ClientTurns(1)
    for piece in ("a0", "a1", "a2", "b0", "c0", "b1"):
        turns.join(piece[0], piece)
    assert drained(turns) == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert (turns.num_waiting, turns.num_held) == (0, 0)


@pytest.mark.parametrize("num_places", [1, 2, 3, 4, 8])
def test_a_place_is_left_for_others(num_places: int) -> None:
    turns: ClientTurns[int] = ClientTurns(num_places)
    for at in range(20):
        turns.join("a", at)
    held = 0
    while turns.next() is not None:
        held += 1
    assert held == -(-num_places // 2)
    turns.join("b", 0)
    found = turns.next()
    assert found == (("b", 0) if num_places > 1 else None)


def test_a_place_goes_to_the_client_that_holds_the_fewest() -> None:
    turns: ClientTurns[int] = ClientTurns(6)
    for client, number in (("a", 9), ("b", 9), ("c", 9)):
        for at in range(number):
            turns.join(client, at)
    held = Counter(turns.next()[0] for _ in range(6))  # type: ignore[index]
    assert held == {"a": 2, "b": 2, "c": 2}
    turns.ended("b")
    turns.ended("b")
    turns.ended("c")
    assert [turns.next()[0] for _ in range(3)] == ["b", "c", "b"]  # type: ignore[index]


def test_the_queue_is_full_for_the_client_that_fills_it() -> None:
    turns: ClientTurns[int] = ClientTurns(1, most_waiting=8)
    for at in range(8):
        turns.join("a", at)
    with pytest.raises(NoRoom, match="8 wait already, 8 of them yours; try again"):
        turns.join("a", 8)
    for at in range(4):
        turns.join("b", at)
    with pytest.raises(NoRoom, match="12 wait already, 4 of them yours"):
        turns.join("b", 4)
    turns.join("c", 0)
    turns.leave("a", 3)
    turns.leave("a", 3)
    assert turns.num_waiting == 12


def test_no_sequence_of_events_breaks_the_count() -> None:
    rng = random.Random(0)
    turns: ClientTurns[int] = ClientTurns(5, most_waiting=12)
    waiting: list[tuple[str, int]] = []
    held: list[str] = []
    for at in range(5000):
        client = rng.choice("abcd")
        match rng.randrange(4):
            case 0 | 1:
                with suppress(NoRoom):
                    turns.join(client, at)
                    waiting.append((client, at))
            case 2 if waiting and rng.random() < 0.3:
                turns.leave(*waiting.pop(rng.randrange(len(waiting))))
            case 2:
                if (found := turns.next()) is not None:
                    waiting.remove(found)
                    held.append(found[0])
            case _ if held:
                turns.ended(held.pop(rng.randrange(len(held))))
        assert (turns.num_waiting, turns.num_held) == (len(waiting), len(held))
        assert max(Counter(held).values(), default=0) <= 3
        assert len(held) <= 5


def test_memory_is_shared_by_the_same_kind_of_rule() -> None:
    shares = ByteShares(100)
    assert shares.has_room("a", 100)
    shares.take("a", 50)
    assert not shares.has_room("a", 1)
    assert shares.has_room("b", 50)
    shares.give_back("a", 50)
    assert (shares.taken_nbytes, shares.of("a")) == (0, 0)


def test_a_clients_pictures_leave_memory_for_others() -> None:
    budget = PixelBudget(100)
    current_client.set("a")
    held = [budget.take(10) for _ in range(5)]
    with pytest.raises(Unavailable, match="50 bytes of pictures are waiting for their answers, 50 of them yours"):
        budget.take(10)
    current_client.set("b")
    held += [budget.take(10), budget.take(10)]
    for each in held:
        each.release()
    assert budget.in_memory.taken_nbytes == 0
    current_client.set("")


def test_blocking_calls_of_a_client_leave_threads_for_others() -> None:
    """`asyncio.to_thread` takes turns where the pool is the loop's default executor."""

    async def use() -> None:
        asyncio.get_running_loop().set_default_executor(FairPool(2))
        opened = threading.Event()

        async def call(client: str, work: object) -> object:
            current_client.set(client)
            return await asyncio.to_thread(work)  # type: ignore[arg-type]

        hogs = [asyncio.create_task(call("a", lambda: opened.wait(DEADLINE_S))) for _ in range(20)]
        await asyncio.sleep(0)
        assert await asyncio.create_task(call("b", lambda: "b")) == "b"
        assert not any(each.done() for each in hogs)
        opened.set()
        assert all(await asyncio.gather(*hogs))

    asyncio.run(asyncio.wait_for(use(), DEADLINE_S))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "turns_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(children, "QUICK_S", 0.2)
    return "turns_child"


async def asked(jobs: Children, client: str, word: str) -> str:
    current_client.set(client)
    return (await jobs.ask(word.encode())).decode().strip()


def test_slow_jobs_of_a_client_delay_no_job_of_another(module: str, tmp_path: Path) -> None:
    """A hundred that never end: others' quick ones are done, and others' slow ones get a place."""

    async def use() -> None:
        jobs = Children(module, b"{}", DEADLINE_S, "job")
        hogs = [asyncio.create_task(asked(jobs, "a", f"slow {tmp_path}/never")) for _ in range(60)]
        while len(jobs.slow) < MAX_SLOW // 2 or not jobs.slow_turns.num_waiting:
            await asyncio.sleep(0.01)
        for at in range(5):
            assert await asyncio.create_task(asked(jobs, "b", f"quick{at}")) == f"quick{at}"
        slow = asyncio.create_task(asked(jobs, "b", f"slow {tmp_path}/soon"))
        while "b" not in {job.client for job in jobs.slow}:
            assert not slow.done()
            await asyncio.sleep(0.01)
        assert [job.client for job in jobs.slow].count("a") == MAX_SLOW // 2
        (tmp_path / "soon").touch()
        assert await slow == f"slow {tmp_path}/soon"
        for each in hogs:
            each.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)
        await jobs.close()
        for turns in (jobs.turns, jobs.slow_turns):
            assert (turns.num_waiting, turns.num_held) == (0, 0)
        assert (jobs.slow, jobs._tasks) == ([], set())

    asyncio.run(asyncio.wait_for(use(), DEADLINE_S))


def test_slow_jobs_of_one_client_wait_for_one_another(module: str, tmp_path: Path) -> None:
    """A program alone with its process, or one request with many videos, loses none of them."""

    async def use() -> None:
        jobs = Children(module, b"{}", DEADLINE_S, "job")
        asking = [asyncio.create_task(asked(jobs, "a", f"slow {tmp_path}/{at}")) for at in range(6)]
        while jobs.slow_turns.num_waiting < 6 - MAX_SLOW // 2:
            await asyncio.sleep(0.01)
        assert await asked(jobs, "a", "quick") == "quick"
        left = asking.pop()
        left.cancel()
        for at in range(5):
            (tmp_path / f"{at}").touch()
        assert await asyncio.gather(*asking) == [f"slow {tmp_path}/{at}" for at in range(5)]
        await asyncio.gather(left, return_exceptions=True)
        while jobs._tasks:
            await asyncio.sleep(0.01)
        assert (jobs.turns.num_held, jobs.slow_turns.num_held, jobs.slow_turns.num_waiting) == (0, 0, 0)
        await jobs.close()

    asyncio.run(asyncio.wait_for(use(), DEADLINE_S))


def test_a_slow_job_waits_for_a_place_no_longer_than_it_may_take(module: str, tmp_path: Path) -> None:
    async def use() -> None:
        jobs = Children(module, b"{}", 1.5, "job")
        asking = [asyncio.create_task(asked(jobs, "a", f"slow {tmp_path}/never")) for _ in range(6)]
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(each) for each in ends} <= {NoRoom, TookTooLong}
        while jobs._tasks:
            await asyncio.sleep(0.01)
        assert (jobs.turns.num_held, jobs.slow_turns.num_held, jobs.slow_turns.num_waiting) == (0, 0, 0)
        await jobs.close()

    asyncio.run(asyncio.wait_for(use(), DEADLINE_S))


def test_no_more_children_are_kept_than_may_run(module: str) -> None:
    """Several that were started at once for the next job, while none was idle."""

    async def use() -> None:
        jobs = Children(module, b"{}", DEADLINE_S, "job")
        await asyncio.gather(*(jobs._restock() for _ in range(MAX_CHILDREN + 2)))
        assert len(jobs.idle) == MAX_CHILDREN
        await jobs.close()

    asyncio.run(asyncio.wait_for(use(), DEADLINE_S))


def test_a_job_costs_little_once_its_client_has_left(module: str, tmp_path: Path) -> None:
    """Those that wait never run, those that run end when they turn out to be slow."""

    async def use() -> None:
        jobs = Children(module, b"{}", DEADLINE_S, "job")
        assert await asked(jobs, "a", "warm") == "warm"
        leaving = [asyncio.create_task(asked(jobs, "a", f"quick{at}")) for at in range(30)]
        while not jobs.turns.num_held:
            await asyncio.sleep(0)
        for each in leaving:
            each.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        assert jobs.turns.num_waiting == 0
        slow = asyncio.create_task(asked(jobs, "a", f"slow {tmp_path}/never"))
        while jobs.turns.num_held < 1:
            await asyncio.sleep(0)
        slow.cancel()
        while jobs.turns.num_held:
            await asyncio.sleep(0.01)
        assert jobs.slow == []
        slow = asyncio.create_task(asked(jobs, "c", f"slow {tmp_path}/never"))
        while not jobs.slow:
            await asyncio.sleep(0.01)
        slow.cancel()
        while jobs.slow:
            await asyncio.sleep(0.01)
        assert await asked(jobs, "b", "on") == "on"
        await jobs.close()

    asyncio.run(asyncio.wait_for(use(), DEADLINE_S))
