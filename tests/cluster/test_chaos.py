"""Instances die, hang and are cut off under load: requests continue elsewhere, and no token is wrong.

Failing requests end in time with an error that names an instance. Afterwards the cluster recovers by itself and holds
nothing.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt
from tests.support.netns import Network, SpreadCluster, visited
from tests.support.nixl import needs_nixl
from tests.support.traffic import Ask, Judge, Outcome, Traffic, make_asks

Checkpoints = Callable[..., Path]
REQUEST_TIMEOUT_S = 60
CONCURRENCY = 32
STANDSTILL_S = 20.0
CUT_S = 8.0
PACE_S = 0.25  # between requests while faults last
LONGEST, MAX_TOKENS = 400, 64
FLAGS = [
    "--block-size=8",
    "--num-blocks=128",
    "--max-model-len=512",
    "--max-num-batched-tokens=256",
    "--growth-tokens=16",
    "--transfer-timeout=10",
    f"--request-timeout={REQUEST_TIMEOUT_S}",
]


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", max_position_embeddings=1024)


class Trouble:
    """Sends traffic to a cluster and injects faults. `burst`: number of requests sent just before a fault.

    `busy`: number of requests that an instance must have when a fault hits it.
    """

    def __init__(self, cluster: LiveCluster, traffic: Traffic, burst: int, busy: int = 4) -> None:
        self.cluster = cluster
        self.traffic = traffic
        self._burst, self._busy = burst, busy
        self._next_s = 0.0

    def await_busy(self, name: str) -> None:
        """Sends requests until the instance has several, so that the fault hits some."""

        def busy() -> bool:
            self.traffic.more(self._burst)
            return bool(self.cluster.instance(name)["num_outstanding"] >= self._busy)

        self.cluster.wait_until(f"{name} is busy", busy)

    def go_on_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits until the condition holds, sending occasional requests."""

        def holds() -> bool:
            if time.monotonic() >= self._next_s:
                self._next_s = time.monotonic() + PACE_S
                self.traffic.more(1)
            return condition()

        self.cluster.wait_until(what, holds)

    def go_on_for(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        self.go_on_until(f"{seconds:g} s are over", lambda: time.monotonic() > end_s)

    def kill(self, name: str) -> None:
        """Kills a busy worker with SIGKILL."""
        self.await_busy(name)
        self.cluster.kill(name)
        assert self.traffic.in_flight, "the fault hit no request"
        self.cluster.await_exit(name)
        self.await_lost(name)
        met = self.traffic.in_flight  # including those sent meanwhile
        self.traffic.more(2 * len(met))
        # A request is not retried after two deaths, so the next fault waits until these requests have ended.
        self.go_on_until("those that met the fault have ended", lambda: not met & self.traffic.in_flight)

    def await_lost(self, *names: str) -> None:
        def lost() -> bool:
            return all(i["state"] != "ready" for i in self.cluster.instances() if i["instance_id"] in names)

        self.go_on_until(f"{', '.join(names)} is lost", lost)

    def restart(self, *names: str) -> None:
        for name in names:
            self.cluster.start_member(name)
        self.await_whole()

    def await_whole(self) -> None:
        self.go_on_until("the cluster is whole again", self.cluster.is_whole)

    def stand_still(self, name: str, seconds: float) -> None:
        """Stops the rank process under load for some seconds, then continues it."""
        self.await_busy(name)
        self.cluster.kill_rank(name, signal.SIGSTOP)
        try:
            self.await_lost(name)
            self.go_on_for(seconds)
        finally:
            self.traffic.more(self._burst)
            self.cluster.kill_rank(name, signal.SIGCONT)
        self.await_whole()


def assert_every_pair_serves(cluster: LiveCluster, model: Path, enter: Callable[[], None] = lambda: None) -> None:
    """Sends new prompts until every prefill instance has served with every decode instance; all must be exact."""
    found = cluster.instances()
    names = {role: [i["instance_id"] for i in found if i["role"] == role] for role in ("prefill", "decode")}
    wanted = {f"{p},{d}" for p in names["prefill"] for d in names["decode"]}
    rng = random.Random(44)

    def complete() -> bool:
        asks = [Ask(tuple(random_prompt(rng, rng.randrange(9, 40))), rng.randrange(4, 12)) for _ in range(8)]
        with Traffic(cluster.url, asks, len(asks), enter) as traffic:
            traffic.finish()
        counts = Judge(model, asks, REQUEST_TIMEOUT_S).check(traffic.outcomes)
        assert counts == {"answered": len(asks)}, counts
        wanted.difference_update(outcome.served_by for outcome in traffic.outcomes)
        return not wanted

    cluster.wait_until("every pair has served", complete)


def assert_good_end(
    cluster: LiveCluster,
    model: Path,
    judge: Judge,
    outcomes: list[Outcome],
    enter: Callable[[], None] = lambda: None,
    share: float = 0.99,
) -> None:
    """Asserts after traffic and faults that all answers are right, and the cluster holds nothing and serves exactly."""
    cluster.await_ready()
    cluster.assert_home()
    counts = judge.check(outcomes)
    print(f"{len(outcomes)} requests:", dict(counts.most_common()))
    assert counts["answered"] >= share * len(outcomes), counts
    assert "continues at" in cluster.log_file("scheduler").read_text(), "no request had to continue elsewhere"
    assert_every_pair_serves(cluster, model, enter)
    cluster.assert_home()


def test_kill_9_of_a_prefill_and_a_decode_instance_under_load(model: Path, tmp_path: Path) -> None:
    asks = make_asks(random.Random(41), 200, 16, LONGEST, MAX_TOKENS)
    judge = Judge(model, asks, REQUEST_TIMEOUT_S)
    with LiveCluster(tmp_path, model, 2, 2, FLAGS) as cluster:
        with Traffic(cluster.url, asks, CONCURRENCY) as traffic:
            trouble = Trouble(cluster, traffic, burst=40)
            trouble.kill("prefill-0")
            trouble.kill("decode-1")
            trouble.restart("prefill-0", "decode-1")
            traffic.finish()
        assert_good_end(cluster, model, judge, traffic.outcomes)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["shm", "dist"])
def test_500_requests_while_instances_die_and_stand_still(model: Path, tmp_path: Path, transport: str) -> None:
    asks = make_asks(random.Random(42), 500, 40, LONGEST, MAX_TOKENS)
    judge = Judge(model, asks, REQUEST_TIMEOUT_S)
    with LiveCluster(tmp_path, model, 2, 2, [*FLAGS, f"--kv-transport={transport}"]) as cluster:
        with Traffic(cluster.url, asks, CONCURRENCY) as traffic:
            trouble = Trouble(cluster, traffic, burst=60)
            trouble.kill("prefill-1")
            trouble.restart("prefill-1")
            trouble.kill("decode-0")
            trouble.restart("decode-0")
            trouble.stand_still("decode-1", STANDSTILL_S)
            traffic.finish()
        assert_good_end(cluster, model, judge, traffic.outcomes)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_prefill_instance_that_stood_still_serves_as_soon_as_it_is_ready(model: Path, tmp_path: Path) -> None:
    """Its peers closed its connections during the pause; it must notice before it reports ready."""
    asks = make_asks(random.Random(45), 200, 16, LONGEST, MAX_TOKENS)
    judge = Judge(model, asks, REQUEST_TIMEOUT_S)
    with LiveCluster(tmp_path, model, 2, 2, FLAGS) as cluster:
        with Traffic(cluster.url, asks, CONCURRENCY) as traffic:
            trouble = Trouble(cluster, traffic, burst=40)
            trouble.stand_still("prefill-0", 0.0)
            num_before = len(traffic.outcomes)
            traffic.finish()
        counts = judge.check(traffic.outcomes)
        assert judge.check(traffic.outcomes[num_before + CONCURRENCY :]).keys() == {"answered"}, counts


@pytest.fixture
def network() -> Iterator[Network]:
    with visited(["left", "right", "far"]) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["dist", pytest.param("nixl", marks=needs_nixl)])
def test_hosts_are_cut_off_under_load(
    model: Path, tmp_path: Path, network: Network, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV cache goes over the network while a host is isolated, two hosts are separated, and all prefill is lost."""
    asks = make_asks(random.Random(43), 500, 40, LONGEST, MAX_TOKENS)
    judge = Judge(model, asks, REQUEST_TIMEOUT_S)
    where = {"prefill-0": "left", "prefill-1": "left", "decode-0": "right", "decode-1": "far"}
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # all simulated hosts share this machine's memory
    flags = [*FLAGS, f"--kv-transport={transport}", "--trust-network"]
    with SpreadCluster(network, where, tmp_path, model, arguments=flags) as cluster:
        with Traffic(cluster.url, asks, CONCURRENCY, network.enter) as traffic:
            trouble = Trouble(cluster, traffic, burst=60)
            trouble.await_busy("decode-1")
            network.pull("far")
            trouble.await_lost("decode-1")
            trouble.go_on_for(CUT_S)
            network.plug("far")
            trouble.await_whole()
            trouble.await_busy("decode-1")
            network.part("left", "far")
            trouble.go_on_until("the links are down", lambda: not cluster.is_whole())
            trouble.go_on_for(CUT_S)
            network.join("left", "far")
            trouble.await_whole()
            trouble.await_busy("prefill-0")
            network.pull("left")
            trouble.await_lost("prefill-0", "prefill-1")
            trouble.go_on_for(CUT_S)
            network.plug("left")
            trouble.await_whole()
            traffic.finish()
        assert_good_end(cluster, model, judge, traffic.outcomes, network.enter, share=0.9)
