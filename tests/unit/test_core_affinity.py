"""A rank's home cores: which they are, and when steps leave them; tested against the kernel where possible."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pd_cluster.devices.core_affinity import (
    AWAY_S,
    MEASURED_AT_ONCE,
    CannotBind,
    CoreAffinity,
    as_list,
    in_order,
    waited_by,
)

ALL = frozenset(os.sched_getaffinity(0))
OWN = frozenset({min(ALL)})
MISSING = frozenset({max(ALL) + 4000})  # exists on no machine
DEADLINE_S = 60.0

needs_counts = pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel counts no waiting")
needs_two_cores = pytest.mark.skipif(len(ALL) < 2, reason="one core: a home is all of them")


@pytest.fixture(autouse=True)
def cores_as_before() -> Iterator[None]:
    yield
    os.sched_setaffinity(0, ALL)


@dataclass
class Time:
    now_s: float = 100.0
    waited_s: float = 0.0
    is_told: bool = True  # whether the kernel reports threads' waiting times

    def waited(self, thread: int) -> float:
        if not self.is_told:
            raise OSError("no schedstat")
        return self.waited_s


@pytest.fixture
def at() -> Time:
    return Time()


def home_with(at: Time, cores: frozenset[int] = OWN) -> CoreAffinity:
    return CoreAffinity(cores, ALL, ALL, at.waited, clock=lambda: at.now_s)


def here() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def step(home: CoreAffinity, at: Time, took_s: float, waited_s: float = 0.0) -> frozenset[int]:
    """Runs a step with the rank's share of threads; returns the cores on which it was allowed to run."""
    home.begin()
    home.take(len(home.cores))
    allowed = here()
    at.now_s += took_s
    at.waited_s += waited_s
    home.end()
    return allowed


# ---- which cores


def make_machine(folder: Path, places: dict[int, tuple[int, int, int]]) -> Path:
    """Writes the kernel's topology files: core -> (node, package, physical core)."""
    for core, (node, package, physical) in places.items():
        topology = folder / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology.parent / f"node{node}").mkdir()
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{physical}\n")
    return folder


def test_neighbours_share_a_core_then_a_package_then_a_memory(tmp_path: Path) -> None:
    """Neighbours on two packages of two cores with two threads, numbered like Linux, with second threads last."""
    places = {core: (core // 2 % 2, core // 2 % 2, core % 2) for core in range(8)}
    folder = make_machine(tmp_path, places)
    assert in_order(range(8), folder) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert in_order({7, 0, 5, 2}, folder) == [0, 5, 2, 7], "it must omit cores that the process may not use"


def test_memory_decides_before_packages(tmp_path: Path) -> None:
    """In a package with two memory nodes, only cores of the same node are neighbours."""
    places = {0: (1, 0, 0), 1: (0, 0, 1), 2: (1, 0, 2), 3: (0, 0, 3)}
    assert in_order(range(4), make_machine(tmp_path, places)) == [1, 3, 0, 2]
    assert in_order({3, 1, 2}, tmp_path / "none") == [1, 2, 3], "without topology files the order must stay"


def test_homes_of_a_host_are_disjoint() -> None:
    for size in {1, 2, len(ALL) // 2, len(ALL)} & {*range(1, len(ALL) + 1)}:
        homes = [CoreAffinity.of(index, size, {}) for index in range(size)]
        assert {len(home.cores) for home in homes} == {len(ALL) // size}
        assert len(frozenset().union(*(home.cores for home in homes))) == size * (len(ALL) // size)
        for home in homes:
            assert home.cores <= home.node_cores <= home.all_cores == ALL


@needs_two_cores
def test_weights_belong_on_the_memory_of_the_home(tmp_path: Path) -> None:
    """A model is read into the memory node of its home, or into both nodes if the home has cores of both."""
    cores = sorted(ALL)
    half = len(cores) // 2
    folder = make_machine(tmp_path, {core: (at // half, at // half, at) for at, core in enumerate(cores)})
    homes = [CoreAffinity.of(index, 2, {}, folder) for index in range(2)]
    assert [home.node_cores for home in homes] == [frozenset(cores[:half]), frozenset(cores[half:])]
    assert [home.cores for home in homes] == [frozenset(cores[:half]), frozenset(cores[half : 2 * half])]
    assert CoreAffinity.of(0, 1, {}, folder).node_cores == ALL


def test_who_has_none() -> None:
    with pytest.raises(CannotBind, match=rf"{len(ALL) + 1} ranks share {len(ALL)} cores"):
        CoreAffinity.of(0, len(ALL) + 1, {})
    with pytest.raises(CannotBind, match="GOMP_CPU_AFFINITY is set"):
        CoreAffinity.of(0, 1, {"GOMP_CPU_AFFINITY": "0-3"})
    assert CoreAffinity.of(0, 1, {"OMP_PROC_BIND": "false"}).cores == ALL


def test_cores_are_written_as_the_kernel_does() -> None:
    assert [as_list(cores) for cores in ({0}, {3, 1, 2, 8}, {0, 1, 4, 5})] == ["0", "1-3,8", "0-1,4-5"]


# ---- when steps use their home


@needs_two_cores
def test_a_step_is_at_home_and_roams_with_more_threads(at: Time) -> None:
    home = home_with(at)
    assert here() == ALL
    for steps in ((1, 2, 1), (2,)):
        home.begin()
        for num_threads in steps:
            home.take(num_threads)
            assert here() == (OWN if num_threads == 1 else ALL), "a second thread needs another rank's core"
        home.end()
        assert here() == ALL


@needs_two_cores
def test_other_threads_of_the_process_run_anywhere(at: Time) -> None:
    """Other threads are not bound, also those that start while the bound thread is between steps."""
    seen: list[frozenset[int]] = []
    home = home_with(at)
    step(home, at, 0.1)
    before, after = (threading.Thread(target=lambda: seen.append(here())) for _ in range(2))
    before.start()
    before.join(DEADLINE_S)
    home.begin()
    home.take(1)
    assert os.sched_getaffinity(threading.get_native_id()) == OWN
    home.end()
    after.start()
    after.join(DEADLINE_S)
    assert seen == [ALL, ALL]


@needs_two_cores
def test_a_home_that_others_use_is_left_for_a_while(at: Time) -> None:
    home = home_with(at)
    assert step(home, at, 0.3, waited_s=0.1) == OWN
    assert step(home, at, 0.3, waited_s=0.1) == OWN, "the first half second ends during this step"
    assert step(home, at, 0.3, waited_s=0.0) == ALL, "the thread waited 0.2 of 0.6 seconds"
    at.now_s += AWAY_S - 0.4
    assert step(home, at, 0.2) == ALL
    assert step(home, at, 0.3, waited_s=0.1) == OWN, "the home is used again after AWAY_S"
    assert step(home, at, 0.3, waited_s=0.07) == OWN
    assert step(home, at, 0.1) == OWN, "waiting 0.17 of 0.6 seconds is acceptable"


@needs_two_cores
def test_waits_away_from_home_do_not_count(at: Time) -> None:
    home = home_with(at)
    for _ in range(5):
        home.begin()
        home.take(2)
        at.now_s += 1
        at.waited_s += 1
        home.end()
    for _ in range(3):
        assert step(home, at, 1.0) == OWN
        at.waited_s += 100  # between steps


@needs_two_cores
@needs_counts
def test_a_program_on_the_same_core_is_noticed() -> None:
    """Uses the kernel's counts, with a real process that takes half of the home core."""
    home = CoreAffinity(OWN, ALL, ALL, waited_by)
    command = f"import os; os.sched_setaffinity(0, {set(OWN)}); print('on', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"on\n"
            deadline_s, was_home = time.monotonic() + DEADLINE_S, True
            while was_home:
                home.begin()
                home.take(1)
                was_home = here() == OWN
                end_s = time.monotonic() + 0.02
                while time.monotonic() < end_s:
                    pass
                home.end()
                assert time.monotonic() < deadline_s, "the home was never left"
        finally:
            other.kill()


@needs_counts
def test_waiting_is_told_by_thread() -> None:
    """The kernel counts waiting time per thread; for an ended thread it is 0."""
    assert waited_by(threading.get_native_id()) > 0 or time.thread_time() > 0
    done = threading.Event()
    sleeper = threading.Thread(target=done.wait, args=(DEADLINE_S,))
    sleeper.start()
    assert sleeper.native_id is not None
    assert 0 <= waited_by(sleeper.native_id) < DEADLINE_S
    done.set()
    deadline_s = time.monotonic() + DEADLINE_S
    while Path(f"/proc/self/task/{sleeper.native_id}").exists():
        assert time.monotonic() < deadline_s
    assert waited_by(sleeper.native_id) == 0


@needs_two_cores
def test_the_thread_of_a_team_that_waits_most_counts(at: Time) -> None:
    """The thread that waits most counts, because its team waits for it. Of many threads, each step measures some."""
    threads = list(range(1000, 1000 + 8 * MEASURED_AT_ONCE))
    waited = dict.fromkeys(threads, 0.0)
    asked: list[int] = []

    def waited_of(thread: int) -> float:
        asked.append(thread)
        return waited.get(thread, 0.0)  # a step's team may be unknown when it is measured first

    cores = OWN | {max(ALL) + 4000 + core for core in range(len(threads) - 1)}  # the kernel ignores missing cores
    home = CoreAffinity(cores, ALL, ALL, waited_of, lambda num_threads, cores: threads[:num_threads], lambda: at.now_s)
    steps = 0
    while home.clock() >= home._away_until_s:
        home.begin()
        home.take(len(threads))
        at.now_s += 0.01
        waited[threads[-1]] += 0.004
        home.end()
        steps += 1
        assert steps < 1000, "the home was never left"
    assert steps >= 400
    assert len(asked) / steps <= 2.2 * MEASURED_AT_ONCE


@needs_two_cores
def test_a_home_is_used_only_while_it_may_be(at: Time) -> None:
    """A home is used only while `may_bind` allows it, as it does if all ranks of the host can be seen."""
    home = home_with(at)
    home.may_bind = lambda: at.now_s >= 101
    assert [step(home, at, 0.5) for _ in range(3)] == [ALL, ALL, OWN]


# ---- what the kernel refuses


def test_a_core_that_is_taken_away_ends_the_binding_and_no_step(at: Time, caplog: pytest.LogCaptureFixture) -> None:
    home = home_with(at, MISSING)
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert step(home, at, 1.0) == ALL
    assert caplog.text.count("steps run on all cores from now on: threads cannot be bound") == 1
    with home.loading():
        assert here() == ALL


@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_kernel_that_tells_no_waiting_ends_the_binding(at: Time, when: str, caplog: pytest.LogCaptureFixture) -> None:
    home = home_with(at)
    if when == "end":
        home.begin()
        home.take(1)
    at.is_told = False
    with caplog.at_level("INFO"):
        if when == "begin":
            home.begin()
            home.take(1)
        home.end()
        assert here() == ALL
        assert step(home, at, 1.0) == ALL
    assert "no schedstat" in caplog.text


def test_a_team_that_cannot_be_bound_ends_the_binding(at: Time) -> None:
    def refuse(num_threads: int, cores: frozenset[int]) -> list[int]:
        refused.append(num_threads)
        raise PermissionError(1, "Operation not permitted")

    refused: list[int] = []
    home = CoreAffinity(OWN | MISSING, ALL, ALL, lambda thread: 0.0, refuse, lambda: at.now_s)
    for _ in range(3):
        home.begin()
        home.take(2)
        assert here() == ALL
        home.end()
    assert refused == [2]


def test_a_model_is_read_near_its_home(at: Time) -> None:
    """While a model is read, the calling thread and those that it starts run on the home's memory node."""
    seen: list[frozenset[int]] = []
    home = CoreAffinity(OWN, ALL, OWN, lambda thread: 0.0)
    with home.loading():
        reader = threading.Thread(target=lambda: seen.append(here()))
        reader.start()
        reader.join(DEADLINE_S)
        seen.append(here())
    assert [*seen, here()] == [OWN, OWN, ALL]
