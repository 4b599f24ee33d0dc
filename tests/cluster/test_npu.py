"""A whole cluster with `--device npu` over simulated NPUs: real processes, torch-npu's real schemas, a real client."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster.client.instances import links_of
from tests.support import npu_wheel
from tests.support.cluster import LiveCluster, in_parallel
from tests.support.engines import assert_same, random_prompt

MAX_TOKENS = 10
ARGUMENTS = ["--spawn", "--dtype=float32", "--num-blocks=24", "--max-model-len=300", "--kv-transport=dist"]
ON_NPU = ["--device=npu", "--max-num-seqs=2"]  # each captured size takes a second in Python


def test_prompts_are_prefilled_on_one_npu_and_decoded_on_another_or_on_the_cpu(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's blocks have another size."""
    for name, value in npu_wheel.environment().items():
        monkeypatch.setenv(name, value)
    model = checkpoint("llama", head_dim=128)
    members = {
        "prefill-0": [*ON_NPU, "--enforce-eager"],
        "decode-0": ON_NPU,
        "decode-1": ["--device=cpu", "--block-size=16", "--num-blocks=128"],
    }
    with LiveCluster(tmp_path, model, num_decode=2, arguments=ARGUMENTS, member_arguments=members) as cluster:
        rng = random.Random(6)
        prompts = [random_prompt(rng, length) for length in (3, 140, 129, 20)]

        def job(prompt: list[int]) -> Callable[[], None]:
            return lambda: assert_same(model, prompt, cluster.complete(prompt, MAX_TOKENS), MAX_TOKENS)

        errors = in_parallel([job(prompt) for prompt in prompts], concurrency=len(prompts))  # so that both are wanted
        assert not errors, errors[0]
        cluster.assert_home()  # which waits until the instances have told what they did
        for name in ("decode-0", "decode-1"):
            assert cluster.instance(name)["kv_received_nbytes"] > 0
        links = links_of(cluster.instance("prefill-0"))
        assert {peer: link.over for peer, link in links.items()} == {"decode-0": "hccl", "decode-1": "dist"}
        logs = {name: cluster.log_file(name).read_text() for name in members}
        assert [name for name in logs if "attention by torch-npu (TND)" in logs[name]] == ["prefill-0", "decode-0"]
