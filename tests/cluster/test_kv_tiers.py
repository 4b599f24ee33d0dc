"""`--kv-disk-cache` with real processes: two ranks that must agree, kill -9 during a write, and a restart."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import LiveCluster
from tests.support.engines import assert_same, random_prompt

pytestmark = pytest.mark.slow  # starts two clusters of four processes in turn

NUM_PROMPTS, LENGTH, BLOCK = 12, 200, 8


def counts(cluster: LiveCluster, name: str) -> dict[str, float]:
    """Returns the instance's metrics by name."""
    page = cluster.client.get(f"{cluster.url}/metrics").text
    lines = [line for line in page.splitlines() if line.startswith(f"{name}{{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_after_a_restart_of_everything_the_disk_serves_what_it_had(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = checkpoint("llama")
    arguments = ["--num-blocks=48", f"--block-size={BLOCK}", "--max-model-len=256", "--kv-host-cache=0.05"]
    arguments += [f"--kv-disk-cache={tmp_path / 'cache'}", "--kv-disk-cache-size=1"]
    rng = random.Random(1)
    prompts = [random_prompt(rng, LENGTH) for _ in range(NUM_PROMPTS)]
    started = tmp_path / "cluster"
    started.mkdir()
    with LiveCluster(started, model, 1, 1, arguments, tp_sizes={"prefill-0": 2}) as cluster:
        for prompt in prompts:
            assert_same(model, prompt, cluster.complete(prompt, 8), 8)
        cluster.wait_until(
            "blocks are on both instances' disks",
            lambda: len(found := counts(cluster, "pd_cluster:disk_cache_blocks")) == 2 and min(found.values()) > 0,
        )
        pids = [pid for name in ("prefill-0", "decode-0") for pid in cluster.rank_pids(name)]
        cluster.complete(random_prompt(rng, LENGTH), 8)  # evicts blocks, so that some are being written
        for name in ("prefill-0", "decode-0", "scheduler"):
            cluster.kill(name)  # its ranks end, too
        for name in ("prefill-0", "decode-0", "scheduler"):
            cluster.await_exit(name)
        assert len(pids) == 3
    with LiveCluster(started, model, 1, 1, arguments, tp_sizes={"prefill-0": 2}) as cluster:
        least = (NUM_PROMPTS - 3) * (LENGTH // BLOCK)
        cluster.wait_until(
            "the index is read again, by heartbeat",
            lambda: len(had := counts(cluster, "pd_cluster:disk_cache_blocks")) == 2 and min(had.values()) > least,
        )
        had = counts(cluster, "pd_cluster:disk_cache_blocks")
        for prompt in prompts:
            assert_same(model, prompt, cluster.complete(prompt, 8), 8)
        cluster.assert_home()
        served = counts(cluster, "pd_cluster:disk_cache_hit_tokens_total")
        assert served["prefill-0"] >= 0.9 * (NUM_PROMPTS - 3) * (LENGTH // BLOCK) * BLOCK, (served, had)
        assert not any(counts(cluster, "pd_cluster:kv_tier_blocks_bad_total").values())
