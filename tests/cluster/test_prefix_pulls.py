"""Prefill instances pull cached prefixes from each other: tokens are the same; nothing stays held if an end dies."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt

pytestmark = pytest.mark.slow  # two minutes: four processes per cluster, some of which are killed

Checkpoints = Callable[..., Path]
BLOCK_SIZE = 16
NUM_TOKENS = 3000  # prompt length at which computing takes longer than copying
FLAGS = ["--num-blocks=1024", "--prefix-pull", "--dead-after=6", "--kv-max-quarantine=1"]


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", max_position_embeddings=16384)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with LiveCluster(tmp_path_factory.mktemp("pulls"), model, 2, 1, FLAGS) as running:
        yield running


def steer(cluster: LiveCluster, target: str) -> None:
    """Drains the other prefill instance, whose cache stays."""
    other = "prefill-0" if target == "prefill-1" else "prefill-1"
    for name, command, wanted in ((target, "undrain", "ready"), (other, "drain", "drained")):
        if cluster.instance(name)["state"] != wanted:
            cluster.order(f"/instances/{name}/{command}")
            cluster.wait_until(f"{name} is {wanted}", lambda: cluster.instance(name)["state"] == wanted)  # noqa: B023
    after = cluster.instance(other)["num_heartbeats"] + 2  # by then it has reported all its blocks
    cluster.wait_until("its blocks are known", lambda: cluster.instance(other)["num_heartbeats"] >= after)


def pulled(cluster: LiveCluster, name: str) -> tuple[int, int]:
    """Returns the numbers of failed pulls and of pulled tokens."""
    found = cluster.instance(name)
    return found["num_failed_pulls"], found["num_pulled_tokens"]


def test_a_prefix_comes_from_the_other_prefill_instance(cluster: LiveCluster) -> None:
    """A longer prompt is pulled in the other direction; prompts with different salts are never shared."""
    prompt = random_prompt(random.Random(1), NUM_TOKENS)
    steer(cluster, "prefill-0")
    expected = cluster.complete(prompt, 12)
    steer(cluster, "prefill-1")
    assert cluster.complete(prompt, 12) == expected
    cluster.assert_home()
    num_failed, num_tokens = pulled(cluster, "prefill-1")
    assert num_failed or num_tokens == (NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    longer = [*prompt, *random_prompt(random.Random(2), NUM_TOKENS)]
    expected = cluster.complete(longer, 12)
    steer(cluster, "prefill-0")
    assert cluster.complete(longer, 12) == expected
    before = pulled(cluster, "prefill-0")
    assert cluster.complete(longer, 12, cache_salt="another") == expected
    cluster.assert_home()
    assert pulled(cluster, "prefill-0") == before


@pytest.mark.parametrize("victim", ["prefill-0", "prefill-1"], ids=["the lender", "the puller"])
def test_either_end_is_killed_in_mid_pull(cluster: LiveCluster, model: Path, tmp_path: Path, victim: str) -> None:
    """A slow link keeps the pull running until the kill. The answer is the same, and the other end holds nothing."""
    prompt = random_prompt(random.Random(3), NUM_TOKENS)
    expected = cluster.complete(prompt, 12)
    with LiveCluster(tmp_path, model, 2, 1, [*FLAGS, "--kv-rate-limit=4"]) as running:
        steer(running, "prefill-0")
        assert running.complete(prompt, 12) == expected
        steer(running, "prefill-1")
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(running.complete(prompt, 12)))
        asking.start()
        running.wait_until("the pull is under way", lambda: running.instance("prefill-1")["num_landing"] == 1)
        running.kill_rank(victim)
        asking.join(100)
        assert answers == [expected], running.logs()
        running.await_exit(victim)
        running.start_member(victim)
        states = ("ready", "drained")
        running.wait_until("it is back", lambda: running.instance(victim)["state"] in states)
        other = "prefill-1" if victim == "prefill-0" else "prefill-0"
        running.wait_until("nothing is held", lambda: running.instance(other)["num_held_blocks"] == 0)


def test_a_pull_wakes_a_link_at_rest(tmp_path: Path, checkpoint: Checkpoints) -> None:
    """Each prefill instance may have one open communicator, which the transfer to the decode instance uses.

    Computing is so slow that a pull pays even if it must first open a link.
    """
    model = checkpoint("llama", max_position_embeddings=16384, num_hidden_layers=12)
    prompt, flags = random_prompt(random.Random(5), 8000), ["--kv-transport=dist", "--kv-open-links=1"]
    with LiveCluster(tmp_path, model, 2, 1, [*FLAGS, *flags]) as running:
        running.client.timeout = httpx.Timeout(300)
        steer(running, "prefill-0")
        expected = running.complete(prompt, 12)

        def rests() -> bool:
            links = running.instance("prefill-0")["links"]
            return any(state.startswith("resting") for name, state in links.items() if name.startswith("prefill"))

        running.wait_until("the link between the prefill instances rests", rests)
        steer(running, "prefill-1")
        assert running.complete(prompt, 12) == expected
        running.assert_home()
        num_failed, num_tokens = pulled(running, "prefill-1")
        assert num_failed or num_tokens, running.logs()


def test_a_hybrid_pulls_to_a_kept_state(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_next", max_position_embeddings=16384)
    prompt = random_prompt(random.Random(4), NUM_TOKENS)
    with LiveCluster(tmp_path, folder, 2, 1, FLAGS) as running:
        steer(running, "prefill-0")
        expected = running.complete(prompt, 12)
        steer(running, "prefill-1")
        assert running.complete(prompt, 12) == expected
        running.assert_home()
        num_failed, num_tokens = pulled(running, "prefill-1")
        assert num_failed or num_tokens
        assert running.instance("prefill-1")["num_prefix_hit_tokens"] >= num_tokens
