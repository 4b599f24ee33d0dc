"""A cluster with `--device npu` over simulated NPUs: real processes, torch-npu's real schemas, a real client."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from pd_cluster.client.instance_list import links_of
from tests.support import npu_wheel
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster, in_parallel
from tests.support.engines import assert_all_same, assert_same, random_prompt

MAX_TOKENS = 10
ANSWER_S = 300.0  # operators run in Python
ARGUMENTS = ["--spawn", "--dtype=float32", "--num-blocks=24", "--max-model-len=300", "--kv-transport=dist"]
ON_NPU = ["--device=npu", "--max-num-seqs=2"]  # capturing a size takes a second in Python
MEMBERS = {
    "prefill-0": [*ON_NPU, "--enforce-eager"],
    "decode-0": ON_NPU,
    "decode-1": ["--device=cpu", "--block-size=16", "--num-blocks=128"],
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in npu_wheel.environment().items():
        monkeypatch.setenv(name, value)


def test_prompts_are_prefilled_on_one_npu_and_decoded_on_another_or_on_the_cpu(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Decodes on an NPU or on the CPU, whose blocks have another size."""
    model = checkpoint("llama", head_dim=128)
    with LiveCluster(tmp_path, model, num_decode=2, arguments=ARGUMENTS, member_arguments=MEMBERS) as cluster:
        rng = random.Random(6)
        prompts = [random_prompt(rng, length) for length in (3, 140, 129, 20)]

        def job(prompt: list[int]) -> Callable[[], None]:
            return lambda: assert_same(model, prompt, cluster.complete(prompt, MAX_TOKENS), MAX_TOKENS)

        errors = in_parallel([job(prompt) for prompt in prompts], concurrency=len(prompts))  # so both are used
        assert not errors, errors[0]
        cluster.assert_home()  # waits for the instances' reports
        for name in ("decode-0", "decode-1"):
            assert cluster.instance(name)["kv_received_nbytes"] > 0
        links = links_of(cluster.instance("prefill-0"))
        assert {peer: link.over for peer, link in links.items()} == {"decode-0": "hccl", "decode-1": "dist"}
        logs = {name: cluster.log_file(name).read_text() for name in MEMBERS}
        assert [name for name in logs if "attention by torch-npu (TND)" in logs[name]] == ["prefill-0", "decode-0"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_latents_go_from_an_npu_to_another_and_to_the_cpu(tmp_path: Path) -> None:
    """Latents' planes are separate on NPUs and together on the CPU, whose blocks have another size."""
    model = make_checkpoint(tmp_path / "model", "youtu", kv_lora_rank=512, qk_rope_head_dim=64, head_dim=64)
    with LiveCluster(tmp_path, model, num_decode=2, arguments=ARGUMENTS, member_arguments=MEMBERS) as cluster:
        cluster.client.timeout = httpx.Timeout(ANSWER_S)
        prompts = [random_prompt(random.Random(6), length) for length in (3, 140, 129, 20)]
        assert_all_same(model, prompts, cluster.complete_together(prompts, MAX_TOKENS), MAX_TOKENS)
        cluster.await_received("decode-0", "decode-1")
        cluster.assert_home()
        logs = {name: cluster.log_file(name).read_text() for name in MEMBERS}
        on_npus = "NPU kernels, attention by torch-npu (latents)"
        assert [name for name in logs if on_npus in logs[name]] == ["prefill-0", "decode-0"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_units_exchange_rows_between_npus(tmp_path: Path) -> None:
    """One unit per role: two prefill instances with one card each, and two decode instances with two cards each."""
    model = make_checkpoint(tmp_path / "model", "qwen3_moe", head_dim=128, max_position_embeddings=1024)
    arguments = [*ARGUMENTS, "--device=npu", "--data-parallel-size=2", "--max-num-batched-tokens=64"]
    cards = {"decode-0": 2, "decode-1": 2}
    with LiveCluster(tmp_path, model, 2, 2, arguments, tp_sizes=cards) as cluster:
        cluster.client.timeout = httpx.Timeout(ANSWER_S)
        prompts = [random_prompt(random.Random(9), length) for length in (3, 140, 60)]
        outputs = cluster.complete_together(prompts, MAX_TOKENS)
        outputs.append(cluster.complete(prompts[0], MAX_TOKENS))
        assert_all_same(model, [*prompts, prompts[0]], outputs, MAX_TOKENS)
        cluster.assert_home()
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            log = cluster.log_file(name).read_text()
            assert "decode steps run eagerly: instances of a unit agree on each step" in log
            assert "NPU kernels, attention by torch-npu (TND)" in log
