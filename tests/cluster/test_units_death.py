"""If a unit's member dies or hangs, all its members end, streams continue elsewhere, and the unit forms again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster.types import Sampling
from tests.cluster.test_death import PROMPT, Streaming
from tests.support.checkpoints import assert_greedy, make_checkpoint
from tests.support.cluster import LiveCluster, together
from tests.support.engines import assert_all_same, generate, make_core
from tests.support.units import KILLED_S, UnitShape, Watched, members_of, prompts_of, unit_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHAPE = UnitShape(2, tp_size=2)
NUM_STREAMS, NUM_TOKENS = 4, 200
DEAD_AFTER_S = 3.0
FLAGS = [f"--dead-after={DEAD_AFTER_S:g}", "--num-blocks=256", "--max-num-batched-tokens=40", "--block-size=8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", max_position_embeddings=1024)


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with unit_cluster(tmp_path_factory.mktemp("units"), folder, SHAPE, SHAPE, FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Returns the streams' tokens without faults."""
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return generate(make_core(folder, num_blocks=256), prompts(), sampling)


@pytest.fixture(autouse=True)
def whole_again(cluster: LiveCluster) -> Iterator[None]:
    """Restarts afterwards whatever a failed test killed."""
    yield
    if any(process.poll() is not None for process in cluster.processes.values()):
        for name, process in cluster.processes.items():
            if process.poll() is not None:
                cluster.start_member(name)
        cluster.await_ready()


def prompts() -> list[list[int]]:
    return [[at, *PROMPT] for at in range(NUM_STREAMS)]


class Streams:
    """Concurrent long streams that have been observed to run on the decode unit."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._streams = [Streaming(cluster.url, NUM_TOKENS, prompt=prompt) for prompt in prompts()]

        def busy() -> bool:
            running = [i["num_running"] for i in cluster.instances() if i["role"] == "decode"]
            return sum(running) == NUM_STREAMS

        cluster.wait_until("all decode", busy)
        assert not any(stream.has_ended for stream in self._streams)

    def assert_exact(self, folder: Path, expected: list[list[int]]) -> None:
        found = [tokens for (tokens,) in together([stream.to_the_end for stream in self._streams])]
        for prompt, output, wanted in zip(prompts(), found, expected, strict=True):
            if output != wanted:  # another order of summation
                assert len(output) == NUM_TOKENS
                assert_greedy(folder, prompt, output)


def rank_0(cluster: LiveCluster, name: str) -> int:
    return cluster.rank_pids(name)[0]


def follower(cluster: LiveCluster, name: str) -> int:
    return cluster.rank_pids(name)[1]


def parent(cluster: LiveCluster, name: str) -> int:
    return cluster.processes[name].pid


@pytest.mark.parametrize("process", [rank_0, follower, parent])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kill_9_in_mid_request(
    cluster: LiveCluster,
    folder: Path,
    expected: list[list[int]],
    role: str,
    process: Callable[[LiveCluster, str], int],
) -> None:
    victim, streams = f"{role}-1", Streams(cluster)
    pid, unit = process(cluster, victim), Watched(cluster, members_of(role, SHAPE))
    os.kill(pid, signal.SIGKILL)
    unit.assert_lost(victim, KILLED_S, but=[victim] if process is parent else [])
    streams.assert_exact(folder, expected)
    unit.start_again()
    cluster.await_ready()
    assert_serves(cluster, folder)


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "asleep"])
def test_a_member_that_stands_still(
    cluster: LiveCluster, folder: Path, expected: list[list[int]], is_busy: bool
) -> None:
    """The other members end; once continued, the stopped one ends, too."""
    victim, streams = "decode-0", Streams(cluster) if is_busy else None
    pid, unit = rank_0(cluster, victim), Watched(cluster, members_of("decode", SHAPE))
    os.kill(pid, signal.SIGSTOP)
    try:
        unit.assert_lost(victim, DEAD_AFTER_S + 2.0, but=[victim])
        if streams is not None:
            streams.assert_exact(folder, expected)
    finally:
        os.kill(pid, signal.SIGCONT)
    unit.start_again()
    cluster.await_ready()
    assert_serves(cluster, folder)


def assert_serves(cluster: LiveCluster, folder: Path) -> None:
    """Asserts that new prompts are answered and nothing stays held."""
    asked = prompts_of(len(cluster.logs()), (1, 17, 41, 90))
    assert_all_same(folder, asked, cluster.complete_together(asked, 12), 12)
    cluster.assert_home()
