"""Processes that are stopped and continued (SIGSTOP, SIGCONT) do not count as dead, and nothing is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.test_death import PROMPT, Streaming
from tests.support.cluster import LiveCluster

NUM_PAUSES = 3  # more than the two deaths after which a request fails
NUM_TOKENS = 6000
NUM_STREAMS = 2
WORKERS = ("prefill-0", "decode-0", "decode-1")
TIMES = ["--dead-after=1", "--heartbeat-interval=0.2"]


@pytest.fixture(scope="module")
def cluster(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    model = checkpoint("llama", max_position_embeddings=8192)
    folder = tmp_path_factory.mktemp("pauses")
    with LiveCluster(folder, model, num_decode=2, arguments=["--num-blocks=2048", *TIMES]) as running:
        yield running


def count(cluster: LiveCluster, name: str, said: str) -> int:
    return cluster.log_file(name).read_text().count(said)


def assert_all_go_on(cluster: LiveCluster, pause: Callable[[], None]) -> None:
    """Asserts that long streams give the same tokens as without pauses; each one runs again before the next pause."""
    expected = cluster.complete(PROMPT, NUM_TOKENS, ignore_eos=True)
    before = count(cluster, "scheduler", "continues at")
    streams = [Streaming(cluster.url, NUM_TOKENS) for _ in range(NUM_STREAMS)]
    tokens: list[list[int]] = [[] for _ in streams]
    for _ in range(NUM_PAUSES):
        for own, stream in zip(tokens, streams, strict=True):
            own += stream.some()
        pause()
    for own, stream in zip(tokens, streams, strict=True):
        rest = stream.to_the_end()
        assert own + (rest[0] if rest else []) == expected
    assert count(cluster, "scheduler", "continues at") - before >= NUM_STREAMS * 2, "streams ended before the pauses"
    cluster.assert_home()


@pytest.mark.slow
def test_the_scheduler_pauses(cluster: LiveCluster) -> None:
    """Pauses the scheduler until every worker has given it up."""

    def pause() -> None:
        def num_reached() -> int:
            """Counts workers whose latest log line about the scheduler says that it is connected."""
            return sum(count(cluster, name, " is connected") > count(cluster, name, " is gone (") for name in WORKERS)

        cluster.kill("scheduler", signal.SIGSTOP)
        try:
            cluster.wait_until("all workers miss the scheduler", lambda: num_reached() == 0)
        finally:
            cluster.kill("scheduler", signal.SIGCONT)
        cluster.wait_until("all workers are reached again", lambda: num_reached() == len(WORKERS))
        cluster.await_ready()

    assert_all_go_on(cluster, pause)
    assert "instances have died while they served" not in cluster.log_file("scheduler").read_text()


@pytest.mark.slow
def test_workers_pause_in_turn(cluster: LiveCluster) -> None:
    """Pauses each worker until the scheduler has given it up; then the worker returns."""
    turn = iter(["decode-0", "decode-1"] * NUM_PAUSES)

    def pause() -> None:
        name = next(turn)
        before = count(cluster, "scheduler", f"{name} is unreachable")  # either end may notice first
        cluster.kill_rank(name, signal.SIGSTOP)
        try:
            cluster.wait_until(
                f"{name} is missed",
                lambda: count(cluster, "scheduler", f"{name} is unreachable") > before,
            )
        finally:
            cluster.kill_rank(name, signal.SIGCONT)
        cluster.await_ready()

    assert_all_go_on(cluster, pause)
