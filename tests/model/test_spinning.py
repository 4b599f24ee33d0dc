"""OpenMP's threads of a user's own process sleep while others want the cores, and spin while nobody does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pd_cluster.devices.spinning import QUIET_S, WINDOW_S, Spinning
from pd_cluster.native.build import openmp_runtime
from tests.support.held import held, more_than

pytestmark = pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="torch has one thread")
SCRIPT = Path(__file__).parents[1] / "support" / "neighbours_script.py"
NUM_THREADS = 2


class World:
    """A clock, and how long every thread has waited for a core."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = 0.0
        self.spinning = Spinning(openmp_runtime(), NUM_THREADS, lambda thread: self.waited_s, lambda: self.now_s)

    def window(self, waits: float, seconds: float = WINDOW_S) -> bool:
        """Lets a window pass in which threads waited for this part of it. Returns whether they sleep now."""
        self.now_s += seconds
        self.waited_s += waits * seconds
        self.spinning.tick()
        return self.spinning.is_quiet


def test_threads_sleep_while_others_want_the_cores() -> None:
    before = held()
    world = World()
    assert world.spinning.is_quiet, "a model is loaded as quickly beside busy programs"
    assert not world.window(waits=0.0)
    assert more_than(before) == Counter()
    assert world.window(waits=0.5)
    assert world.window(waits=0.0), "not for a moment"
    assert world.window(waits=0.5, seconds=QUIET_S)
    assert world.window(waits=0.15, seconds=QUIET_S), "still busy"
    assert not world.window(waits=0.0, seconds=QUIET_S)
    world.window(waits=0.5)
    world.spinning.close()
    world.spinning.close()
    assert not world.window(waits=0.5)
    assert more_than(before) == Counter()


def test_more_threads_than_cores() -> None:
    """libgomp compares all its threads with the cores: the sleepers make up for threads that a step does not have."""
    before = len(os.listdir("/proc/self/task"))
    world = World()
    try:
        added = len(os.listdir("/proc/self/task")) - before  # one of them is Python's
        assert NUM_THREADS + added - 1 > (os.cpu_count() or 1)
    finally:
        world.spinning.close()


@pytest.mark.parametrize("own", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_users_own_policy_stays(own: str) -> None:
    assert Spinning.here(NUM_THREADS, {own: "1"}) is None
    assert Spinning.here(1, {}) is None
    spinning = Spinning.here(NUM_THREADS, {})
    assert spinning is not None
    spinning.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_beside_a_busy_program_on_each_core(checkpoint: Callable[..., Path]) -> None:
    """Prints tokens/s alone and beside the programs, first as libgomp does by default, in turns."""
    spins = {"GOMP_SPINCOUNT": "300000"}  # libgomp's default, given by the user
    rates: dict[str, list[dict[str, float]]] = {"spins": [], "sleeps": []}
    for _ in range(3):
        for name, own in (("spins", spins), ("sleeps", {})):
            env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")} | own
            command = [sys.executable, str(SCRIPT), str(checkpoint("llama"))]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=180)
            rates[name].append(json.loads(done.stdout))
            print(name, rates[name][-1])
    best = {name: {at: max(each[at] for each in found) for at in found[0]} for name, found in rates.items()}
    print(best)
    assert best["sleeps"]["busy"] > 2 * best["spins"]["busy"]
    assert best["sleeps"]["alone"] > 0.7 * best["spins"]["alone"]
