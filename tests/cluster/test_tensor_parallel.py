"""Instances with several rank processes: KV cache between unequal sizes, a follower's death, impossible sizes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, random_prompt

Checkpoints = Callable[..., Path]
FLAGS = ["--block-size=16", "--max-num-batched-tokens=40", "--num-blocks=128"]
MAX_TOKENS = 12
PAIRS = {
    "2 to 1 and 4, shared memory": ({"prefill-0": 2, "decode-1": 4}, "shm"),
    "1 and 4 to 2, gloo": ({"prefill-1": 4, "decode-0": 2}, "dist"),
}
ALWAYS, SOMETIMES = PAIRS  # each starts seven rank processes


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Path:
    """Returns a model whose four query heads share two KV heads, so that of four ranks two share each KV head."""
    return checkpoint("llama")


@pytest.fixture(params=[ALWAYS, pytest.param(SOMETIMES, marks=pytest.mark.slow)], scope="module")
def cluster(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveCluster]:
    tp_sizes, transport = PAIRS[request.param]
    num_prefill, num_decode = (2, 1) if "prefill-1" in tp_sizes else (1, 2)
    with LiveCluster(
        tmp_path_factory.mktemp("ranks"),
        model,
        num_prefill=num_prefill,
        num_decode=num_decode,
        arguments=[*FLAGS, f"--kv-transport={transport}", "--collective-timeout=3"],
        tp_sizes=tp_sizes,
    ) as running:
        yield running


def test_tokens_are_the_reference_s(cluster: LiveCluster, model: Path) -> None:
    """Sends lengths around block and chunk borders at once, so that all pairs of instances serve; then again cached."""
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 15, 16, 17, 40, 41, 63, 100)]

    for _ in range(2):
        assert_all_same(model, prompts, cluster.complete_together(prompts, MAX_TOKENS), MAX_TOKENS)
    cluster.assert_home()
    for each in cluster.instances():
        assert each["kv_received_nbytes" if each["role"] == "decode" else "kv_sent_nbytes"] > 0, each["instance_id"]


def test_a_follower_s_end_is_its_instance_s(cluster: LiveCluster, model: Path) -> None:
    """A follower dies, or hangs while nothing is computed. Its instance logs one clear line and leaves no process; the
    one with the hang is restarted and serves.
    """
    sizes = cluster.launch.tp_sizes
    stops = "prefill-0" in sizes
    name = (min if stops else max)(sizes, key=lambda each: sizes[each])  # a small instance restarts faster
    size = sizes[name]
    ranks = cluster.rank_pids(name)
    assert len(ranks) == size
    os.kill(ranks[-1], signal.SIGSTOP if stops else signal.SIGKILL)
    assert cluster.await_exit(name) == 1
    lines = cluster.log_file(name).read_text().splitlines()
    how = "has not answered for 3 s" if stops else f"(pid {ranks[-1]}) ended with code -9"
    line = f"pd-cluster: {name}: rank {size - 1} of {size} {how}"
    assert [each for each in lines if each.startswith("pd-cluster: ")] == [line]
    cluster.wait_until("no rank is left", lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    if not stops:
        return
    cluster.start_member(name)
    cluster.await_ready()
    prompt = random_prompt(random.Random(3), 30)
    assert_all_same(model, [prompt] * 2, [cluster.complete(prompt, MAX_TOKENS) for _ in range(2)], MAX_TOKENS)
    cluster.assert_home()
