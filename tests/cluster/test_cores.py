"""Instances lend each other cores: answers stay exact, and faults of lenders or borrowers block nothing."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster.devices.core_affinity import CoreAffinity, as_list
from tests.cluster.test_death import PROMPT, Streaming
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, random_prompt

NUM_TOKENS = 700
FLAGS = [
    "--lend-cores=on",
    "--bind-cores=on",
    "--log-level=debug",
    "--dead-after=6",  # so that a busy machine is not taken for a death
    "--heartbeat-interval=0.2",
    "--num-blocks=2048",
]

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: there is nothing to lend")


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)
        with LiveCluster(tmp_path_factory.mktemp("cores"), model, num_decode=2, arguments=FLAGS) as running:
            yield running


def num_changes(cluster: LiveCluster, name: str) -> int:
    """Returns how many times the instance's number of threads has changed."""
    return cluster.log_file(name).read_text().count("step continues with")


def complete_all(cluster: LiveCluster, model: Path, seed: int, num_requests: int = 24) -> None:
    """Sends random prompts with random lengths; compares each with transformers' output."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.randrange(1, 300)) for _ in range(num_requests)]
    lengths = [rng.randrange(2, 40) for _ in prompts]
    outputs = cluster.complete_together(prompts, lengths, concurrency=8, ignore_eos=True)
    assert_all_same(model, prompts, outputs, lengths)


def test_random_traffic_is_exact_while_cores_change_hands(cluster: LiveCluster, model: Path) -> None:
    before = {name: num_changes(cluster, name) for name in ("prefill-0", "decode-0", "decode-1")}
    complete_all(cluster, model, seed=1)
    assert any(num_changes(cluster, name) > before[name] for name in before), "no step had borrowed cores"
    cluster.assert_home()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_holds_nobody_up(
    cluster: LiveCluster, model: Path, name: str, number: signal.Signals
) -> None:
    """Kills or stops a computing or idle rank while ranks use each other's cores: other streams end.

    A killed rank's cores become free; a stopped one takes part again once it is continued.
    """
    expected = cluster.complete(PROMPT, NUM_TOKENS, ignore_eos=True)
    streams = [Streaming(cluster.url, NUM_TOKENS) for _ in range(2)]
    tokens = [stream.some() for stream in streams]
    cluster.kill_rank(name, number)
    try:
        if number == signal.SIGKILL:
            cluster.await_exit(name)
        for own, stream in zip(tokens, streams, strict=True):
            assert own + stream.to_the_end()[0] == expected
    finally:
        if number == signal.SIGSTOP:
            cluster.kill_rank(name, signal.SIGCONT)
    if number == signal.SIGKILL:
        cluster.start_member(name)
        cluster.await_ready()
    cluster.wait_until("the cluster is whole again", cluster.is_whole)
    complete_all(cluster, model, seed=2, num_requests=8)
    cluster.assert_home()


def test_steps_run_on_the_cores_of_their_rank(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the kernel's view of two instances' ranks; without lending, so that steps never leave their cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    everywhere = os.sched_getaffinity(0)
    prompt, num_tokens = random_prompt(random.Random(4), 700), 50
    outputs: list[list[int]] = []
    seen = threading.Event()
    flags = ["--lend-cores=off", "--bind-cores=on"]
    with LiveCluster(tmp_path, model, arguments=flags) as cluster:

        def ask() -> None:
            while not seen.is_set():
                outputs.append(cluster.complete(prompt, num_tokens, ignore_eos=True))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            for index, name in enumerate(("prefill-0", "decode-0")):
                (pid,), home = cluster.rank_pids(name), CoreAffinity.of(index, 2, {}).cores
                cluster.wait_until(
                    f"{name} computes at home", lambda pid=pid, home=home: os.sched_getaffinity(pid) == home
                )
                cluster.wait_until(f"{name} is between steps", lambda pid=pid: os.sched_getaffinity(pid) == everywhere)
                assert f"own cores are {as_list(home)}, for" in cluster.log_file(name).read_text()
        finally:
            seen.set()
            asking.join(60.0)
        cluster.assert_home()
    assert_all_same(model, [prompt], [outputs[0]], [num_tokens])
    assert all(output == outputs[0] for output in outputs)
