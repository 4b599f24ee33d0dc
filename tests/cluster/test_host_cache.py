"""`--kv-host-cache` between real processes: two ranks that must agree, a handover of loaded blocks, a decode side."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cluster import LiveCluster
from tests.support.engines import assert_same, random_prompt

pytestmark = pytest.mark.slow  # three rank processes

NUM_PROMPTS, LENGTH = 6, 200


def test_two_ranks_and_a_decode_instance_load_what_they_have_evicted(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = checkpoint("llama")
    arguments = ["--num-blocks=48", "--block-size=8", "--max-model-len=256", "--kv-host-cache=0.05"]
    with LiveCluster(tmp_path, model, 1, 1, arguments, tp_sizes={"prefill-0": 2}) as cluster:
        rng = random.Random(1)
        prompts = [random_prompt(rng, LENGTH) for _ in range(NUM_PROMPTS)]
        for _ in range(3):
            for prompt in prompts:
                assert_same(model, prompt, cluster.complete(prompt, 8), 8)
        cluster.assert_home()
        page = cluster.client.get(f"{cluster.url}/metrics").text
        lines = [line for line in page.splitlines() if line.startswith("pd_cluster:host_cache_hit_tokens_total")]
        found = {line.split('"')[1]: float(line.split()[-1]) for line in lines}
        assert len(found) == 2, lines
        assert any(found.values()), lines
