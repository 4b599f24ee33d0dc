"""Quantized weights and LoRA adapters across the split on simulated NPUs, with two cards per instance."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pd_cluster.client.instance_list import links_of
from tests.support import npu_wheel
from tests.support.adapters import make_adapter, merged
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster, in_parallel
from tests.support.engines import assert_same, random_prompt
from tests.support.quantized import FORMATS, rewritten

MAX_TOKENS = 10
ANSWER_S = 300.0  # operators run in Python
LENS = (3, 140, 20)
# Quantized weights with floating-point activations. Groups of 32: the operators' smallest, and a divisor of
# each rank's share.
FORM = replace(FORMATS["msmodelslim W4A16, pairs"], group=32)
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 128, "max_position_embeddings": 1024}
ADAPTERS = ("french", "formal")
CARDS = {"prefill-0": 2, "decode-0": 2}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_request_has_the_tokens_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens equal those of the dequantized model with the adapter, twice, so that prefixes are cached."""
    base = make_checkpoint(tmp_path / "given", "llama", **SHAPE)
    coded, plain = rewritten(base, tmp_path, FORM)
    models = {"": plain}
    for seed, name in enumerate(ADAPTERS):
        models[name] = merged(plain, make_adapter(tmp_path / name, base, seed), tmp_path / f"merged-{name}")
    for name, value in npu_wheel.environment().items():
        monkeypatch.setenv(name, value)
    arguments = [
        *("--spawn", "--device=npu", "--dtype=float32", "--num-blocks=24", "--max-model-len=300"),
        *("--max-num-seqs=4", "--kv-transport=dist", "--enable-lora", "--max-loras=2"),
        *(f"--lora-modules={name}={tmp_path / name}" for name in ADAPTERS),
    ]
    with LiveCluster(tmp_path / "npu", coded, arguments=arguments, tp_sizes=CARDS) as cluster:
        cluster.client.timeout = httpx.Timeout(ANSWER_S)
        rng = random.Random(8)
        asks = [(name, random_prompt(rng, length)) for name in models for length in LENS]

        def job(name: str, prompt: list[int]) -> Callable[[], None]:
            naming = {"model": name} if name else {}
            return lambda: assert_same(models[name], prompt, cluster.complete(prompt, MAX_TOKENS, **naming), MAX_TOKENS)

        for _ in range(2):
            errors = in_parallel([job(*ask) for ask in asks], concurrency=4, timeout_s=2 * ANSWER_S)
            assert not errors, errors[0]
        cluster.assert_home()
        assert cluster.instance("decode-0")["kv_received_nbytes"] > 0
        links = links_of(cluster.instance("prefill-0"))
        assert {peer: link.over for peer, link in links.items()} == {"decode-0": "hccl"}
        for name, cards in CARDS.items():
            assert "NPU kernels, attention by torch-npu (TND)" in cluster.log_file(name).read_text()
            assert len(cluster.rank_pids(name)) == cards
