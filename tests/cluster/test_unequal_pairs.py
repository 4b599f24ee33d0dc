"""Pairs of unequal pools, exact or with int8 on the wire. Workers that do not match the others are refused when they
connect, with an error that names them, and receive no requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ranktable_tools.cluster_keys import SECRET_FILE, read_secret, secret_text, write_keys
from ranktable_tools.table_files import PRIVATE, write_private
from tests.support.cluster import LiveCluster, together
from tests.support.engines import assert_same, random_prompt

Checkpoints = Callable[..., Path]
EXACT, CODED = "decode-0", "decode-1"
NUM_TOKENS = 10
REFUSED = {  # decode instance -> its text in /health
    "decode-2": "--dtype differs: float32 on the prefill instance and bfloat16 on",
    "decode-3": "serves another model",
    "decode-4": "another cluster.secret than the scheduler (the other end does not admit",
    "decode-5": "another cluster.secret than the scheduler (the other end has another secret",
}


def links_of(cluster: LiveCluster) -> dict[str, str]:
    """Returns decode instance -> state of prefill-0's link to it."""
    return {peer.partition("@")[0]: state for peer, state in cluster.instance("prefill-0")["links"].items()}


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields two decode instances with other block sizes, one with int8 over gloo, and four that are refused.

    The first of those has other numerics, the second other weights of the same shapes; the third pins another
    scheduler; the last admits the scheduler and cannot prove that it belongs to the cluster.
    """
    folder = tmp_path_factory.mktemp("unequal")
    write_keys(folder, PRIVATE)
    write_keys(folder / "another", PRIVATE)
    pinned = read_secret(folder / SECRET_FILE).schedulers
    guess = write_private(folder / "guess", secret_text(b"a guess of thirty-two bytes here", pinned))
    unlike = {
        EXACT: ["--block-size=8", "--kv-transport=shm"],
        CODED: ["--block-size=24", "--kv-transport=dist"],
        "decode-2": ["--dtype=bfloat16"],
        "decode-3": [f"--model={checkpoint('llama', seed=1)}"],
        "decode-4": [f"--secret-file={folder / 'another' / SECRET_FILE}"],
        "decode-5": [f"--secret-file={guess}"],
    }
    arguments = ["--kv-wire-dtype=int8"]
    running = LiveCluster(folder, checkpoint("llama"), num_decode=6, arguments=arguments, member_arguments=unlike)
    try:
        running.start()
        yield running
    finally:
        running.stop()


def test_those_that_do_not_fit_are_refused_by_name(cluster: LiveCluster) -> None:
    def refused() -> bool:
        health = cluster.health()[1]
        told = [*health.get("links", []), *(f"{n}: {s}" for n, s in health.get("instances", {}).items())]
        return all(any(name in line and why in line for line in told) for name, why in REFUSED.items())

    cluster.wait_until("/health names those that are refused", refused, 90)
    served = {EXACT: "up (shm)", CODED: "up (dist, int8)"}
    cluster.wait_until("the others serve", lambda: served.items() <= links_of(cluster).items())
    status, body = cluster.health()
    assert (status, body["status"]) == (200, "degraded")


def ask(cluster: LiveCluster, prompt: list[int]) -> tuple[str, tuple[int, ...]]:
    """Returns the decode instance that served the request, and its tokens."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    answer = cluster.client.post(f"{cluster.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-pd-served-by"].split(",")[1], tuple(answer.json()["choices"][0]["token_ids"])


def test_unequal_blocks_and_int8_on_the_wire(cluster: LiveCluster, checkpoint: Checkpoints) -> None:
    """Over shared memory, tokens are exact although block sizes differ. With int8 over gloo, the first token is exact,
    because prefill chooses it, and all tokens are the same each time.
    """
    model, rng = checkpoint("llama"), random.Random(1)
    for length in (1, 7, 8, 9, 23, 25, 64, 100):
        for attempt in range(20):  # one instance may get all, if it answers before each next request
            prompt = random_prompt(rng, length)
            outputs: dict[str, set[tuple[int, ...]]] = {EXACT: set(), CODED: set()}
            for name, tokens in together([partial(ask, cluster, prompt)] * 6):
                outputs[name].add(tokens)
            if all(outputs.values()) or length < 20:
                break
            assert attempt < 19, "a decode instance served nothing"
        for name, found in outputs.items():
            assert len(found) <= 1, f"{name} gives {found}"
        exact = list(next(iter(outputs[EXACT] or outputs[CODED])))
        if outputs[EXACT]:
            assert_same(model, prompt, exact, NUM_TOKENS)
        assert {tokens[0] for found in outputs.values() for tokens in found} == {exact[0]}
    cluster.assert_home()
    received = {name: cluster.instance(name)["kv_received_nbytes"] for name in (EXACT, CODED, *REFUSED)}
    assert received[EXACT] > 0 < received[CODED]
    assert not any(received[name] for name in REFUSED)
