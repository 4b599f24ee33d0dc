"""Coded weights and LoRA adapters across the split on simulated NPUs, with one card an instance and with two."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from pd_cluster.client.instances import links_of
from tests.support import npu_wheel
from tests.support.adapters import make_adapter, merged
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster, in_parallel
from tests.support.engines import assert_same, random_prompt
from tests.support.quantized import FORMATS, rewritten

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MAX_TOKENS = 10
ANSWER_S = 300.0  # every operator is computed by Python
LENS = (3, 140, 20)
FORM = "msmodelslim W4A16, pairs"  # products of codes and floating-point activations
GROUP = 32  # the least that the operators take, and a divisor of each rank's share
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 128, "max_position_embeddings": 1024}
ADAPTERS = ("french", "formal")


@dataclass(frozen=True, slots=True)
class Served:
    """A running cluster, and by name ("": without an adapter) the models whose tokens it must have."""

    cluster: LiveCluster
    models: dict[str, Path]
    cards: int


@pytest.fixture(scope="module", params=[1, 2], ids=["one card", "two cards"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, cards = tmp_path_factory.mktemp("model"), request.param
    base = make_checkpoint(folder / "given", "llama", **SHAPE)
    coded, plain = rewritten(base, folder, replace(FORMATS[FORM], group=GROUP))
    models = {"": plain}
    for seed, name in enumerate(ADAPTERS):
        adapter = make_adapter(folder / name, base, seed)
        models[name] = merged(plain, adapter, folder / f"merged-{name}")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in npu_wheel.environment().items():
            patch.setenv(name, value)
        with LiveCluster(
            tmp_path_factory.mktemp("npu"),
            coded,
            arguments=[
                *("--spawn", "--device=npu", "--dtype=float32", "--num-blocks=24", "--max-model-len=300"),
                *("--max-num-seqs=4", "--kv-transport=dist", "--enable-lora", "--max-loras=2"),
                *(f"--lora-modules={name}={folder / name}" for name in ADAPTERS),
            ],
            tp_sizes={"prefill-0": cards, "decode-0": cards},
        ) as running:
            running.client.timeout = httpx.Timeout(ANSWER_S)
            yield Served(running, models, cards)


def test_each_request_has_the_tokens_of_its_model(served: Served) -> None:
    """Those of the numbers that the codes stand for, with the adapter added: twice, so that prefixes are found."""
    cluster, rng = served.cluster, random.Random(8)
    asks = [(name, random_prompt(rng, length)) for name in served.models for length in LENS]

    def job(name: str, prompt: list[int]) -> Callable[[], None]:
        naming = {"model": name} if name else {}
        folder = served.models[name]
        return lambda: assert_same(folder, prompt, cluster.complete(prompt, MAX_TOKENS, **naming), MAX_TOKENS)

    for _ in range(2):
        errors = in_parallel([job(*ask) for ask in asks], concurrency=4, timeout_s=2 * ANSWER_S)
        assert not errors, errors[0]
    cluster.assert_home()
    assert cluster.instance("decode-0")["kv_received_nbytes"] > 0
    assert {peer: link.over for peer, link in links_of(cluster.instance("prefill-0")).items()} == {"decode-0": "hccl"}


def test_products_are_those_of_npus(served: Served) -> None:
    for name in ("prefill-0", "decode-0"):
        assert "NPU kernels, attention by torch-npu (TND)" in served.cluster.log_file(name).read_text()
        assert len(served.cluster.rank_pids(name)) == served.cards
