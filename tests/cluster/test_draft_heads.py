"""Draft heads in clusters of real processes: answers are the same whether both instances have the same head or not.

Slow tests cover gloo and deaths: `pytest -m slow tests/cluster/test_draft_heads.py`, a minute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_death import Streaming
from tests.cluster.test_drafts import ASKS, FLAGS, LONG, PLAIN, begun
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster, together
from tests.support.eagle3_heads import make_eagle3_head
from tests.support.engines import random_prompt
from tests.support.metrics import told
from tests.support.mtp import add_mtp_layer

TAPS: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
MTP = ["--spec-method=mtp", "--spec-tokens=3"]


def eagle3(folder: Path) -> list[str]:
    return ["--spec-method=eagle3", f"--spec-model={folder}", "--spec-tokens=4"]


def compare(cluster: LiveCluster, num_asks: int, max_tokens: int) -> None:
    """Compares answers with and without drafts for prompt lengths around block boundaries."""
    rng = random.Random(3)
    lengths = [(1, 15, 16, 17, 32, 40)[at % 6] for at in range(num_asks)]
    asks = [
        {"prompt": random_prompt(rng, length), "max_tokens": max_tokens, "logprobs": 1, **ASKS[at % len(ASKS)]}
        for at, length in enumerate(lengths)
    ]
    ask = partial(cluster.ask, "/v1/completions")
    plain, drafted = (together([partial(ask, {**each, **own}) for each in asks]) for own in (PLAIN, {}))
    assert [each["choices"] for each in drafted] == [each["choices"] for each in plain]


def await_drafts(cluster: LiveCluster) -> None:
    name = "vllm:spec_decode_num_draft_tokens_total"

    def are_counted() -> bool:  # on a busy machine, measured costs may prevent drafts for a while
        cluster.complete([1, 2, 3], 60)
        return any(value > 0 for key, value in told(cluster).items() if key[0] == name)

    cluster.wait_until("drafts are counted", are_counted)


def test_the_same_head_on_both_sides(tmp_path: Path) -> None:
    model = add_mtp_layer(make_checkpoint(tmp_path / "model", "glm4_moe", max_position_embeddings=4096))
    with LiveCluster(tmp_path, model, arguments=[*FLAGS, *MTP]) as cluster:
        compare(cluster, 6, 60)
        await_drafts(cluster)
        cluster.assert_home()


# ---- slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields two prefill instances, one without a head, and two decode instances with other heads, one over gloo."""
    folder = tmp_path_factory.mktemp("heads")
    model = make_checkpoint(folder / "model", "llama", max_position_embeddings=4096)
    one, other = (eagle3(make_eagle3_head(folder / f"{seed}", model, seed=seed, **TAPS)) for seed in (1, 2))
    own = {"prefill-0": one, "decode-0": one, "decode-1": [*other, "--kv-transport=dist"]}
    with LiveCluster(folder, model, 2, 2, arguments=FLAGS, member_arguments=own) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pairs_with_and_without_the_same_head(cluster: LiveCluster) -> None:
    compare(cluster, 24, 100)
    cluster.await_received("decode-0", "decode-1")
    await_drafts(cluster)
    cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["decode-0", "decode-1", "prefill-0"])
def test_kill_9_in_mid_answer(cluster: LiveCluster, victim: str) -> None:
    whole = together([partial(cluster.complete, [5, 6, 7], LONG, **PLAIN, **fields) for fields in ASKS])
    running = [Streaming(cluster.url, LONG, prompt=[5, 6, 7], **fields) for fields in ASKS]
    first = [begun(stream) for stream in running]
    cluster.kill(victim)
    for tokens, stream, expected in zip(first, running, whole, strict=True):
        assert tokens + stream.to_the_end()[0] == expected
    cluster.restart(victim)
    cluster.assert_home()
