"""Adapters combined with other features: cold adapters on several instances, n, beams, guides, unequal ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.adapters import make_adapter, merged
from tests.support.checkpoints import EOS_ID, until_end
from tests.support.cluster import LiveCluster, together
from tests.support.engines import assert_all_same, random_prompt
from tests.support.prompt_adapters import make_prompt_adapter, peft_greedy

Checkpoints = Callable[..., Path]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MAX_TOKENS = 8
LORAS = ("a", "b", "c")
PROMPTS = ("soft", "prefix")


@pytest.fixture(scope="module")
def folders(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns folders by name: the model, the adapters, and the model with each LoRA adapter merged in."""
    base, folder = checkpoint("llama", max_position_embeddings=2048), tmp_path_factory.mktemp("met")
    found = {"": base}
    for seed, name in enumerate(LORAS):
        found[name] = make_adapter(folder / name, base, seed)
        found[f"merged {name}"] = merged(base, found[name], folder / f"merged-{name}")
    found["soft"] = make_prompt_adapter(folder / "soft", base, "p-tuning", 5)
    found["prefix"] = make_prompt_adapter(folder / "prefix", base, "prefix", 21)
    return found


@pytest.fixture(scope="module")
def cluster(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a two-rank prefill instance, and decode instances over gloo and shared memory; each holds two adapters."""
    flags = ["--enable-lora", "--enable-prompt-adapter", "--max-loras=2", "--max-cpu-loras=2", "--num-blocks=512"]
    flags += [f"--lora-modules={name}={folders[name]}" for name in LORAS]
    flags += [f"--prompt-adapters={name}={folders[name]}" for name in PROMPTS]
    members = {
        "decode-0": ["--kv-transport=dist"],
        "decode-1": ["--kv-transport=shm"],
        "scheduler": ["--routing-policy=session"],
    }
    with LiveCluster(
        tmp_path_factory.mktemp("met-cluster"),
        folders[""],
        1,
        2,
        arguments=flags,
        member_arguments=members,
        tp_sizes={"prefill-0": 2},
    ) as running:
        yield running


def num_loads(cluster: LiveCluster, name: str, folder: Path) -> int:
    """Returns how many times an instance's ranks have read this adapter."""
    return cluster.log_file(name).read_text().count(f" parts of {folder}\n")


def sessions(cluster: LiveCluster) -> dict[str, str]:
    """Returns decode instance -> a session that is routed to it."""
    found: dict[str, str] = {}
    for at in range(40):
        before = {each["instance_id"]: each["kv_received_nbytes"] for each in cluster.instances()}
        cluster.complete(random_prompt(random.Random(at), 40), 4, prompt_cache_key=f"s{at}")
        cluster.assert_home()
        for each in cluster.instances():
            if each["kv_received_nbytes"] > before[each["instance_id"]]:
                found.setdefault(each["instance_id"], f"s{at}")
        if len(found) == 2:
            return found
    raise AssertionError(f"40 sessions were all routed to {found}")


def test_two_requests_for_a_cold_adapter(cluster: LiveCluster, folders: dict[str, Path]) -> None:
    """If two requests wait for an adapter on each decode instance, each rank reads it only once."""
    own = sessions(cluster)
    assert set(own) == {"decode-0", "decode-1"}
    for name in ("b", "c"):  # evicts "a" everywhere
        for session in own.values():
            cluster.complete(random_prompt(random.Random(1), 40), 4, model=name, prompt_cache_key=session)
    names = ("prefill-0", *own)
    before = {name: num_loads(cluster, name, folders["a"]) for name in names}
    prompts = [random_prompt(random.Random(seed), 30) for seed in range(4)]
    keys = [*own.values()] * 2
    asks = [
        partial(cluster.complete, prompt, MAX_TOKENS, model="a", prompt_cache_key=key)
        for prompt, key in zip(prompts, keys, strict=True)
    ]
    assert_all_same(folders["merged a"], prompts, together(asks), MAX_TOKENS)
    expected = {"prefill-0": 2, "decode-0": 1, "decode-1": 1}  # once per rank
    assert {name: num_loads(cluster, name, folders["a"]) - before[name] for name in names} == expected
    cluster.assert_home()


@pytest.mark.parametrize("name", ["", *LORAS, *PROMPTS])
def test_two_ranks_to_one_over_gloo_and_over_shm(cluster: LiveCluster, folders: dict[str, Path], name: str) -> None:
    rng = random.Random(5)
    for at, prompt in enumerate([random_prompt(rng, n) for n in (1, 16, 33, 70) for _ in range(3)]):
        naming = {"model": name} if name else {}
        found = cluster.complete(prompt, MAX_TOKENS, **naming, prompt_cache_key=f"s{at}")
        if name in PROMPTS:
            expected = peft_greedy(folders[""], folders[name], prompt, MAX_TOKENS)
            assert found == until_end(expected, {EOS_ID})
        else:
            assert_all_same(folders[f"merged {name}" if name else ""], [prompt], [found], MAX_TOKENS)
    cluster.await_received("decode-0", "decode-1")
