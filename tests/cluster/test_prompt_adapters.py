"""Prompt adapters over real processes: listed, chosen as the model, handed over, replayed, and loaded at run time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.test_death import NUM_TOKENS, PROMPT, caught
from tests.cluster.test_lora_runtime import Served
from tests.support.adapted_asks import AtOnce, naming
from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt
from tests.support.prompt_adapters import make_prompt_adapter, peft_greedy

Checkpoints = Callable[..., Path]
MAX_TOKENS = 8
NUM_VIRTUAL = {"": 0, "soft": 5, "prefix": 21}


@pytest.fixture(scope="module")
def folders(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model's folder, and those of the adapters, by their names; `late` is not loaded at the start."""
    base, folder = checkpoint("llama", max_position_embeddings=2048), tmp_path_factory.mktemp("prompt-adapters")
    soft, prefix, late = (
        make_prompt_adapter(folder / "soft", base, "p-tuning", NUM_VIRTUAL["soft"]),
        make_prompt_adapter(folder / "prefix", base, "prefix", NUM_VIRTUAL["prefix"]),
        make_prompt_adapter(folder / "late", base, "prompt", 3, seed=3),
    )
    return {"": base, "soft": soft, "prefix": prefix, "late": late}


@pytest.fixture(scope="module")
def cluster(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """KV cache goes to one decode instance over shared memory, to the other over gloo."""
    named = [f"--prompt-adapters={name}={folders[name]}" for name in ("soft", "prefix")]
    flags = ["--enable-prompt-adapter", *named, "--num-blocks=512"]
    root = ["--allow-runtime-lora", f"--lora-root={folders['soft'].parent}"]
    members = {
        "decode-0": ["--kv-transport=shm"],
        "decode-1": ["--kv-transport=dist"],
        "scheduler": root,
    }
    folder = tmp_path_factory.mktemp("prompt-adapter-cluster")
    with Served(folder, folders[""], 1, 2, arguments=flags, member_arguments=members) as running:
        yield running


def asked(cluster: LiveCluster, name: str, prompt: list[int], **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = {**body, **naming(name), **fields}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=whole, timeout=60, trust_env=False)
    return answer.json()


def test_each_request_gets_its_own_adapter_s_tokens(cluster: LiveCluster, folders: dict[str, Path]) -> None:
    listed = httpx.get(f"{cluster.url}/v1/models", trust_env=False).json()["data"]
    assert [(each["id"], each.get("parent")) for each in listed[1:]] == [
        ("soft", listed[0]["id"]),
        ("prefix", listed[0]["id"]),
    ]
    rng = random.Random(1)
    asks = [(name, random_prompt(rng, n)) for n in (1, 16, 33, 70) for name in NUM_VIRTUAL]
    for _ in range(2):  # the second time finds prefixes
        found = AtOnce(asks, lambda name, prompt: asked(cluster, name, prompt)).run()
        for at, (name, prompt) in enumerate(asks):
            adapter = folders[name] if name else None
            choice = found[at]["choices"][0]
            assert choice["token_ids"] == peft_greedy(folders[""], adapter, prompt, MAX_TOKENS)
            assert choice["prompt_token_ids"] == prompt
            assert found[at]["usage"]["prompt_tokens"] == len(prompt)
    for name in ("decode-0", "decode-1"):
        cluster.wait_until(f"{name} reports", lambda: cluster.instance(name)["kv_received_nbytes"] > 0)  # noqa: B023


def test_echo_and_the_context(cluster: LiveCluster, folders: dict[str, Path]) -> None:
    """Virtual tokens are not shown and have no logprobs, but they take room in the context."""
    prompt = random_prompt(random.Random(2), 20)
    answer = asked(cluster, "soft", prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert len(answer["logprobs"]["tokens"]) == len(prompt) + 1
    assert answer["logprobs"]["token_logprobs"][0] is None
    room = 2048 - NUM_VIRTUAL["prefix"] - len(prompt)
    assert asked(cluster, "", prompt, max_tokens=room + 1, ignore_eos=False)["choices"]
    fits = asked(cluster, "prefix", random_prompt(random.Random(3), 2048 - NUM_VIRTUAL["prefix"] - 1), max_tokens=9)
    assert fits["usage"]["completion_tokens"] == 1
    refused = asked(cluster, "prefix", random_prompt(random.Random(3), 2048 - NUM_VIRTUAL["prefix"]))
    assert refused["error"]["code"] == "context_length_exceeded"
    body = {"model": "soft", "input": "a"}
    vectors = httpx.post(f"{cluster.url}/v1/embeddings", json=body, timeout=60, trust_env=False)
    assert (vectors.status_code, "makes no vectors" in vectors.text) == (400, True)


@pytest.mark.parametrize("name", ["soft", "prefix"])
def test_a_decode_instance_s_death_changes_no_token(cluster: LiveCluster, folders: dict[str, Path], name: str) -> None:
    """kill -9 of the one that has the request: another computes all again, the virtual tokens too."""
    cluster.await_ready()
    stream, begun, busy = caught(cluster, model=name)
    cluster.kill(busy)
    found = begun[0] + stream.to_the_end()[0]
    assert found == peft_greedy(folders[""], folders[name], PROMPT, NUM_TOKENS, guess=found)
    cluster.await_exit(busy)
    cluster.start_member(busy)
    cluster.await_ready()
    cluster.assert_home()


def test_one_is_loaded_and_unloaded_while_requests_run(cluster: Served, folders: dict[str, Path]) -> None:
    prompt = random_prompt(random.Random(4), 30)
    cluster.load("late", "late")
    found = asked(cluster, "late", prompt)["choices"][0]["token_ids"]
    assert found == peft_greedy(folders[""], folders["late"], prompt, MAX_TOKENS)
    cluster.unload("late")
    assert asked(cluster, "late", prompt)["error"]["code"] == "model_not_found"
