"""Pairs of unequal pools, and int8 on the wire: results are exact or say otherwise; impossible pairs are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.support.cluster import LiveCluster, in_parallel
from tests.support.engines import assert_same, random_prompt

Checkpoints = Callable[..., Path]


def links_of(cluster: LiveCluster) -> dict[str, str]:
    """Decode instance -> what prefill-0 says of its link."""
    return {peer.partition("@")[0]: state for peer, state in cluster.instance("prefill-0")["links"].items()}


REFUSED = {  # decode instance -> its flag, and what the refusal names
    "decode-0": ("--kv-wire-dtype=int8", "--kv-wire-dtype differs: auto on the prefill instance and int8 on"),
    "decode-3": ("--attention-backend=sdpa", "--attention-backend differs: auto on the prefill instance and sdpa on"),
    "decode-4": ("--dtype=bfloat16", "--dtype differs: float32 on the prefill instance and bfloat16 on"),
    "decode-6": ("--deterministic", "--deterministic differs: off on the prefill instance and on on"),
    "decode-5": ("--rope-theta=5000", "it was started with --hf-overrides {"),  # than the scheduler
}


def test_unequal_pools_and_pairs_that_are_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Another block size is converted; other KV options or numerics are refused by name, and never routed to."""
    model = checkpoint("llama")
    unlike = {"decode-1": ["--block-size=8"], "decode-2": ["--block-size=24", "--kv-transport=dist"]}
    unlike |= {name: [flag] for name, (flag, _) in REFUSED.items()}
    cluster = LiveCluster(tmp_path, model, num_decode=7, member_arguments=unlike)
    try:
        cluster.start()

        def refused() -> bool:
            health = cluster.health()[1]
            told = [*health.get("links", []), *(f"{n}: {s}" for n, s in health.get("instances", {}).items())]
            return all(any(name in line and why in line for line in told) for name, (_, why) in REFUSED.items())

        cluster.wait_until("/health names the refused pairs", refused, 90)
        cluster.wait_until("the others serve", lambda: set(links_of(cluster).values()) >= {"up (shm)", "up (dist)"})
        status, body = cluster.health()
        assert (status, body["status"]) == (200, "degraded")
        assert "prefill-0 to decode-0: refused" in body["links"][0]
        rng = random.Random(1)
        prompts = [random_prompt(rng, length) for length in (1, 7, 8, 9, 16, 23, 25, 40, 64, 100)]

        def job(prompt: list[int]) -> Callable[[], None]:
            return lambda: assert_same(model, prompt, cluster.complete(prompt, 10), 10)

        for _ in range(2):  # the second time with cached prefixes on both sides, cut at unequal places
            errors = in_parallel([job([*prompt, 5]) for prompt in prompts], concurrency=4)
            assert not errors, errors[0]
            prompts = [[*prompt, 5, 6, 7] for prompt in prompts]
        assert not any(cluster.instance(name)["kv_received_nbytes"] for name in REFUSED)
        cluster.assert_home()
        assert all(cluster.instance(name)["kv_received_nbytes"] for name in ("decode-1", "decode-2"))
    finally:
        cluster.stop()


def test_int8_on_the_wire(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Over gloo a quarter of the bytes travels and the link says so; over shared memory nothing is lost."""
    model = checkpoint("llama")
    transports = {"decode-0": ["--kv-transport=dist"], "decode-1": ["--kv-transport=shm"]}
    arguments = ["--kv-wire-dtype=int8"]
    with LiveCluster(tmp_path, model, num_decode=2, arguments=arguments, member_arguments=transports) as cluster:
        assert links_of(cluster) == {"decode-0": "up (dist, int8)", "decode-1": "up (shm)"}
        rng, prompt = random.Random(3), list[int]()
        outputs: dict[str, set[tuple[int, ...]]] = {}

        def ask() -> None:
            answer = cluster.client.post(
                f"{cluster.url}/v1/completions",
                json={"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True},
            )
            served_by = answer.headers["x-pd-served-by"].split(",")[1]
            outputs[served_by].add(tuple(answer.json()["choices"][0]["token_ids"]))

        for _ in range(10):  # one may get all, if it has always answered before the next one is asked
            prompt[:] = random_prompt(rng, 96)
            outputs.update({"decode-0": set(), "decode-1": set()})
            errors = in_parallel([ask] * 8, concurrency=4)
            assert not errors, errors[0]
            if all(outputs.values()):
                break
        (exact,) = outputs["decode-1"]
        assert_same(model, prompt, list(exact), 8)
        (inexact,) = outputs["decode-0"]  # the same every time, also from its own prefix cache
        assert inexact[0] == exact[0], "token one is the prefill instance's, and exact"
        cluster.assert_home()
        sent = [cluster.instance(name)["kv_received_nbytes"] for name in ("decode-0", "decode-1")]
        assert 0 < sent[0] < sent[1]
