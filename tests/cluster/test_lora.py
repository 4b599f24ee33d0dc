"""Adapters over real processes: listed, chosen as the model, handed over with their prompts, and replayed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.types import Order, Request, Sampling
from tests.cluster.test_death import NUM_TOKENS, PROMPT, caught
from tests.support.adapted_asks import assert_own_tokens, completing, naming
from tests.support.adapters import loaded, make_adapter, merged
from tests.support.cluster import LiveCluster
from tests.support.engines import generate, make_core, random_prompt, run

Checkpoints = Callable[..., Path]
MAX_TOKENS = 12
NAMES = ("", "french", "formal", "wide")  # "": the model itself


@pytest.fixture(scope="module")
def models(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of the model and of three adapters merged into it, by their names."""
    base, folder = checkpoint("llama", max_position_embeddings=2048), tmp_path_factory.mktemp("adapters")
    found = {"": base}
    for seed, name in enumerate(NAMES[1:]):
        adapter = make_adapter(folder / name, base, seed, rank=16 if name == "wide" else 4)
        found[name] = merged(base, adapter, folder / f"merged-{name}")
    return found


def flags_of(models: dict[str, Path]) -> list[str]:
    folder = models["wide"].parent
    modules = [f"french={folder}/french", f'{{"name": "formal", "path": "{folder}/formal"}}', f"wide={folder}/wide"]
    return ["--enable-lora", *(f"--lora-modules={each}" for each in modules), "--max-loras=2", "--num-blocks=512"]


@pytest.fixture(scope="module")
def cluster(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Two prefill instances; KV cache goes to one decode instance over shared memory, to the other over gloo."""
    transports = {"decode-0": ["--kv-transport=shm"], "decode-1": ["--kv-transport=dist"]}
    folder, flags = tmp_path_factory.mktemp("lora"), flags_of(models)
    with LiveCluster(folder, models[""], 2, 2, arguments=flags, member_arguments=transports) as running:
        yield running


def test_models_are_listed_with_their_parent(cluster: LiveCluster, models: dict[str, Path]) -> None:
    listed = httpx.get(f"{cluster.url}/v1/models", trust_env=False).json()["data"]
    assert [each["id"] for each in listed[1:]] == list(NAMES[1:])
    assert {each["parent"] for each in listed[1:]} == {listed[0]["id"]}
    assert "parent" not in listed[0]
    assert not [each for each in listed[1:] if str(models["wide"].parent) in str(each)]
    assert httpx.get(f"{cluster.url}/v1/models/french", trust_env=False).json()["id"] == "french"
    body = {"model": "german", "prompt": [1], "max_tokens": 1}
    refused = httpx.post(f"{cluster.url}/v1/completions", json=body, trust_env=False)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert "french" in refused.json()["error"]["message"]


def test_each_request_gets_its_own_adapter_s_tokens(cluster: LiveCluster, models: dict[str, Path]) -> None:
    """Many at once, over both transports and twice, so that the second time finds prefixes: never another's."""
    rng = random.Random(1)
    prompts = [random_prompt(rng, n) for n in (1, 16, 33, 70)]
    asks = [(name, prompt) for prompt in prompts for name in NAMES]
    for _ in range(2):
        outputs = completing(cluster, asks, MAX_TOKENS).run()
        assert_own_tokens(models, asks, outputs, MAX_TOKENS)
    assert len({tuple(outputs[at]) for at in range(len(NAMES))}) == len(NAMES)
    for name in ("decode-0", "decode-1"):
        cluster.wait_until(f"{name} reports", lambda: cluster.instance(name)["kv_received_nbytes"] > 0)  # noqa: B023
    cluster.assert_home()


def test_cached_tokens_are_an_adapter_s_own(cluster: LiveCluster) -> None:
    """One prompt, whose prefix the model and another adapter have: a third computes all of it."""
    prompt = random_prompt(random.Random(7), 80)

    def num_cached(name: str) -> int:
        body = {"prompt": prompt, "max_tokens": 1, **naming(name)}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [num_cached(name) for name in ("", "french", "formal")] == [0, 0, 0]
    cluster.wait_until("a prefix is found again", lambda: num_cached("french") >= 64)
    assert num_cached("wide") == 0


def test_chats_several_answers_and_beams(cluster: LiveCluster, models: dict[str, Path]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
    answers = {}
    for name in NAMES:
        url = f"{cluster.url}/v1/chat/completions"
        answer = httpx.post(url, json={**body, **naming(name)}, timeout=60, trust_env=False).json()
        answers[answer["choices"][0]["message"]["content"]] = answer["model"]
    assert list(answers.values())[1:] == list(NAMES[1:])
    prompt = random_prompt(random.Random(3), 20)
    adapter = models["formal"].parent / "formal"
    core = make_core(models[""], num_blocks=128, adapters=loaded(adapter))
    variant = LoraFolder.read(adapter, 16).digest
    for sampling, fields in [
        (Sampling(n=3, max_tokens=8, temperature=0.8, seed=5), {"n": 3, "temperature": 0.8, "seed": 5}),
        (
            Sampling(n=2, max_tokens=8, temperature=0.0, beam_width=2),
            {"n": 2, "best_of": 2, "use_beam_search": True},
        ),
    ]:
        alone = run(core, [Request("r", Order(prompt, sampling, variant=variant))])["r"]
        expected = [[token.token_id for token in alone[index]] for index in sorted(alone)]
        assert cluster.complete_choices(prompt, 8, **fields, **naming("formal")) == expected


@pytest.mark.parametrize("name", ["french", ""])
def test_a_decode_instance_s_death_changes_no_token(cluster: LiveCluster, models: dict[str, Path], name: str) -> None:
    """kill -9 of the one that has the request: another computes all again, with the same adapter."""
    cluster.await_ready()
    core = make_core(models[name], num_blocks=128)
    (expected,) = generate(core, [PROMPT], Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))
    stream, begun, busy = caught(cluster, **naming(name))
    cluster.kill(busy)
    assert begun[0] + stream.to_the_end()[0] == expected
    cluster.await_exit(busy)
    cluster.start_member(busy)
    cluster.await_ready()
    cluster.assert_home()


def test_a_prefill_instance_s_death_changes_no_token(cluster: LiveCluster, models: dict[str, Path]) -> None:
    """kill -9 while it computes prompts, which another then computes with the same adapters."""
    rng, busy = random.Random(9), list[str]()

    def kill() -> None:
        def computes() -> bool:
            busy[:] = [i["instance_id"] for i in cluster.instances() if i["role"] == "prefill" and i["num_outstanding"]]
            return bool(busy) or asked.is_over

        cluster.wait_until("a prefill instance computes", computes)
        if busy:
            cluster.kill(busy[0])
            cluster.await_exit(busy[0])
            cluster.start_member(busy[0])

    for _ in range(10):  # all may be over before anyone has looked
        cluster.await_ready()
        asks = [(NAMES[at % len(NAMES)], random_prompt(rng, 1000)) for at in range(16)]
        asked = completing(cluster, asks, 4)
        assert_own_tokens(models, asks, asked.run(kill), 4)
        if busy:
            break
    assert busy
    cluster.await_ready()
    cluster.assert_home()
