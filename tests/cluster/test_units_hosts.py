"""Units over simulated hosts: every fault of a member ends its whole unit, and no answer is wrong."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_chaos import Trouble
from tests.support.checkpoints import make_checkpoint
from tests.support.netns import Network, SpreadCluster, visited
from tests.support.traffic import Judge, Traffic, make_asks
from tests.support.units import KILLED_S, UnitShape, Watched, log_of, members_of, unit_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHAPE = UnitShape(2, tp_size=2)
WHERE = {"prefill-0": "p0", "prefill-1": "p1", "decode-0": "d0", "decode-1": "d1"}
UNITS = {role: members_of(role, SHAPE) for role in ("prefill", "decode")}
DEAD_AFTER_S = 3.0
REQUEST_TIMEOUT_S = 90
FLAGS = [
    *("--block-size=8", "--num-blocks=128", "--max-model-len=256", "--max-num-batched-tokens=64", "--growth-tokens=16"),
    *(f"--dead-after={DEAD_AFTER_S:g}", "--kv-transport=dist", f"--request-timeout={REQUEST_TIMEOUT_S}"),
]
NUM_REQUESTS, CONCURRENCY, BURST, BUSY = 600, 12, 24, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v3")


@pytest.fixture
def network() -> Iterator[Network]:
    with visited(sorted(WHERE.values())) as made:
        yield made


class Faults:
    """Injects faults into units under load, one after the other; each time all members must end and form again."""

    def __init__(self, cluster: SpreadCluster, network: Network, trouble: Trouble) -> None:
        self._cluster, self._network, self._trouble = cluster, network, trouble

    @contextlib.contextmanager
    def met(self, victim: str) -> Iterator[Watched]:
        """Waits until the victim is busy; after the fault, waits until its unit is back."""
        self._trouble.await_busy(victim)
        unit = Watched(self._cluster, UNITS[victim.partition("-")[0]])
        yield unit
        print(f"{victim}: over after {unit.age_s:.1f} s", flush=True)
        unit.start_again()
        self._trouble.await_whole()
        print(f"whole after {unit.age_s:.1f} s", flush=True)

    def kill(self, victim: str, pid: int) -> None:
        is_parent = pid == self._cluster.processes[victim].pid
        with self.met(victim) as unit:
            os.kill(pid, signal.SIGKILL)
            unit.assert_lost(victim, KILLED_S, but=[victim] if is_parent else [])

    def stop(self, victim: str) -> None:
        """Stops all of the victim's ranks, which must end once continued."""
        pids = self._cluster.rank_pids(victim)
        with self.met(victim) as unit:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                unit.assert_lost(victim, DEAD_AFTER_S + 2.0, but=[victim])
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)

    def part(self, *mates: str) -> None:
        """Cuts only the link between a unit's two hosts, so that each misses the other."""
        hosts = [WHERE[name] for name in mates]
        with self.met(mates[0]) as unit:
            self._network.part(*hosts)
            try:
                for victim in mates:
                    unit.assert_lost(victim, DEAD_AFTER_S + 2.0, but=[victim])
            finally:
                self._network.join(*hosts)


def test_faults_under_load(network: Network, folder: Path, tmp_path: Path) -> None:
    asks = make_asks(random.Random(46), NUM_REQUESTS, 24, 120, 40)
    judge = Judge(folder, asks, REQUEST_TIMEOUT_S)
    settings = unit_settings(SHAPE, SHAPE)
    with SpreadCluster(network, WHERE, tmp_path, folder, arguments=[*FLAGS, "--trust-network"], **settings) as cluster:
        with Traffic(cluster.url, asks, CONCURRENCY, network.enter) as traffic:
            trouble = Trouble(cluster, traffic, BURST, BUSY)
            faults = Faults(cluster, network, trouble)
            faults.kill("decode-1", cluster.rank_pids("decode-1")[0])
            faults.kill("decode-0", cluster.rank_pids("decode-0")[1])
            faults.kill("prefill-1", cluster.processes["prefill-1"].pid)
            faults.stop("decode-1")
            faults.part("decode-0", "decode-1")
            killed_s = time.monotonic()
            cluster.kill("scheduler")
            cluster.await_exit("scheduler")
            cluster.start_member("scheduler")
            trouble.await_whole()
            back_s = time.monotonic()
            traffic.finish()
        cluster.assert_home()
        cut_off = [each for each in traffic.outcomes if each.broken]
        for each in cut_off:  # only requests in flight during the fault
            assert each.sent_s < back_s, each
            assert each.sent_s + each.took_s > killed_s, each
        counts = judge.check([each for each in traffic.outcomes if not each.broken])
        print(f"{dict(counts)}, cut off: {len(cut_off)}")
        assert len(cut_off) <= 2 * CONCURRENCY
        assert counts["answered"] >= 0.9 * NUM_REQUESTS, counts


def test_hosts_that_are_not_trusted_have_no_unit(network: Network, folder: Path, tmp_path: Path) -> None:
    cluster = SpreadCluster(network, WHERE, tmp_path, folder, arguments=FLAGS, **unit_settings(SHAPE, SHAPE))
    try:
        cluster.members = {member.name: member for member in cluster.plan()}
        cluster.start_member("decode-1")
        assert cluster.await_exit("decode-1", 60) != 0
        (line,) = [line for line in log_of(cluster, "decode-1").splitlines() if "pd-cluster:" in line]
        addresses = ", ".join(network.addresses[host] for host in ("d0", "d1"))
        assert "decode-0..1" in line
        assert f"({addresses})" in line
        assert "--trust-network" in line
    finally:
        cluster.stop()
