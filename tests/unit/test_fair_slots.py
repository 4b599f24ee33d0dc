"""The rule by which clients share places and memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from pd_cluster.errors import NoCapacity, Unavailable
from pd_cluster.service.concurrency import child_pool
from pd_cluster.service.concurrency.child_pool import MAX_SLOW, ChildPool, ChildTimeout
from pd_cluster.service.concurrency.fair_byte_budget import FairByteBudget
from pd_cluster.service.concurrency.fair_slots import FairSlots, current_client
from pd_cluster.service.concurrency.fair_thread_pool import FairThreadPool
from pd_cluster.service.media.pixel_budget import PixelBudget
from tests.support.until import until

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


def drained(turns: FairSlots[str]) -> list[str]:
    """Returns everything that waits in the order of its turns, ending each piece before the next begins."""
    order = []
    while (found := turns.next()) is not None:
        order.append(found[1])
        turns.ended(found[0])
    return order


def test_clients_alternate() -> None:
    turns: FairSlots[str] = FairSlots(1)
    for piece in ("a0", "a1", "a2", "b0", "c0", "b1"):
        turns.join(piece[0], piece)
    assert drained(turns) == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert (turns.num_waiting, turns.num_held) == (0, 0)


@pytest.mark.parametrize("num_places", [1, 2, 3, 8])
def test_a_place_is_left_for_others(num_places: int) -> None:
    turns: FairSlots[int] = FairSlots(num_places)
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
    turns: FairSlots[int] = FairSlots(6)
    for at in range(27):
        turns.join("abc"[at // 9], at)
    held = Counter(turns.next()[0] for _ in range(6))  # type: ignore[index]
    assert held == {"a": 2, "b": 2, "c": 2}
    for client in "bbc":
        turns.ended(client)
    assert [turns.next()[0] for _ in range(3)] == ["b", "c", "b"]  # type: ignore[index]


def test_the_queue_is_full_for_the_client_that_fills_it() -> None:
    turns: FairSlots[int] = FairSlots(1, most_waiting=8)
    for at in range(8):
        turns.join("a", at)
    with pytest.raises(NoCapacity, match="8 jobs are waiting already, 8 of them yours; try again"):
        turns.join("a", 8)
    for at in range(4):
        turns.join("b", at)
    with pytest.raises(NoCapacity, match="12 jobs are waiting already, 4 of them yours"):
        turns.join("b", 4)
    turns.join("c", 0)
    turns.leave("a", 3)
    turns.leave("a", 3)
    assert turns.num_waiting == 12


def test_no_sequence_of_events_breaks_the_count() -> None:
    rng = random.Random(0)
    turns: FairSlots[int] = FairSlots(5, most_waiting=12)
    waiting: list[tuple[str, int]] = []
    held: list[str] = []
    for at in range(2000):
        client = rng.choice("abcd")
        match rng.randrange(4):
            case 0 | 1:
                with suppress(NoCapacity):
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
    shares = FairByteBudget(100)
    assert shares.has_capacity("a", 100)
    shares.take("a", 50)
    assert not shares.has_capacity("a", 1)
    assert shares.has_capacity("b", 50)
    shares.give_back("a", 50)
    assert (shares.taken_nbytes, shares.of("a")) == (0, 0)
    budget = PixelBudget(100)
    current_client.set("a")
    held = [budget.take(10) for _ in range(5)]
    with pytest.raises(Unavailable, match="50 bytes of pictures belong to unfinished requests, 50 of them yours"):
        budget.take(10)
    current_client.set("b")
    held += [budget.take(10), budget.take(10)]
    for each in held:
        each.release()
    assert budget.in_memory.taken_nbytes == 0
    current_client.set("")


async def test_blocking_calls_of_a_client_leave_threads_for_others() -> None:
    """With the fair pool as the loop's default executor, `asyncio.to_thread` takes turns between clients."""
    asyncio.get_running_loop().set_default_executor(FairThreadPool(2))
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


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "turns_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(child_pool, "QUICK_S", 0.2)
    return "turns_child"


@contextlib.asynccontextmanager
async def running(module: str, timeout_s: float = DEADLINE_S) -> AsyncIterator[ChildPool]:
    """Runs child processes for jobs; asserts afterwards that no place is taken and nothing waits."""
    jobs = ChildPool(module, b"{}", timeout_s, "job")
    yield jobs
    await until(lambda: not jobs._tasks, 0.01)
    for turns in (jobs.turns, jobs.slow_turns):
        assert (turns.num_waiting, turns.num_held) == (0, 0)
    assert jobs.slow == []
    await jobs.close()


async def asked(jobs: ChildPool, client: str, word: str) -> str:
    current_client.set(client)
    return (await jobs.ask(word.encode())).decode().strip()


def asking(jobs: ChildPool, client: str, *words: str) -> list[asyncio.Task[str]]:
    return [asyncio.create_task(asked(jobs, client, word)) for word in words]


async def given_up(tasks: list[asyncio.Task[str]]) -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_slow_jobs_of_a_client_delay_no_job_of_another(module: str, tmp_path: Path) -> None:
    """Despite a client's sixty endless jobs, other clients' quick jobs finish and their slow jobs get a place."""
    async with running(module) as jobs:
        hogs = asking(jobs, "a", *[f"slow {tmp_path}/never"] * 60)
        await until(lambda: len(jobs.slow) >= MAX_SLOW // 2 and jobs.slow_turns.num_waiting, 0.01)
        for at in range(5):
            assert await asking(jobs, "b", f"quick{at}")[0] == f"quick{at}"
        (slow,) = asking(jobs, "b", f"slow {tmp_path}/soon")
        await until(lambda: slow.done() or "b" in {job.client for job in jobs.slow}, 0.01)
        assert [job.client for job in jobs.slow].count("a") == MAX_SLOW // 2
        (tmp_path / "soon").touch()
        assert await slow == f"slow {tmp_path}/soon"
        await given_up(hogs)


async def test_slow_jobs_of_one_client_wait_for_one_another(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single client's slow jobs, such as one request with many videos, all finish."""
    async with running(module) as jobs:
        *first, left = asking(jobs, "a", *(f"slow {tmp_path}/{at}" for at in range(6)))
        await until(lambda: jobs.slow_turns.num_waiting >= 6 - MAX_SLOW // 2, 0.01)
        monkeypatch.setattr(child_pool, "QUICK_S", DEADLINE_S)  # no job counts as slow on a busy machine
        assert await asked(jobs, "a", "quick") == "quick"
        await given_up([left])
        for at in range(5):
            (tmp_path / f"{at}").touch()
        assert await asyncio.gather(*first) == [f"slow {tmp_path}/{at}" for at in range(5)]


async def test_a_slow_job_waits_for_a_place_no_longer_than_it_may_take(module: str, tmp_path: Path) -> None:
    async with running(module, timeout_s=1.0) as jobs:
        asked_together = asking(jobs, "a", *[f"slow {tmp_path}/never"] * 6)
        ends = await asyncio.gather(*asked_together, return_exceptions=True)
        assert {type(each) for each in ends} <= {NoCapacity, ChildTimeout}


async def test_a_job_costs_little_once_its_client_has_left(module: str, tmp_path: Path) -> None:
    """After a client has left, its waiting jobs never run, and its running jobs end once they count as slow."""
    async with running(module) as jobs:
        assert await asked(jobs, "a", "warm") == "warm"
        leaving = asking(jobs, "a", *(f"quick{at}" for at in range(30)))
        await until(lambda: jobs.turns.num_held)
        await given_up(leaving)
        assert jobs.turns.num_waiting == 0
        (slow,) = asking(jobs, "a", f"slow {tmp_path}/never")
        await until(lambda: jobs.turns.num_held)
        slow.cancel()
        await until(lambda: not jobs.turns.num_held, 0.01)
        assert jobs.slow == []
        (slow,) = asking(jobs, "c", f"slow {tmp_path}/never")
        await until(lambda: jobs.slow, 0.01)
        slow.cancel()
        await until(lambda: not jobs.slow, 0.01)
        assert await asked(jobs, "b", "on") == "on"
