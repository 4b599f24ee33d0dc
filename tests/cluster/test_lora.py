"""Adapters over real processes: listed, chosen as the model, handed over with their prompts, and replayed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.cluster.test_death import NUM_TOKENS, PROMPT, caught
from tests.cluster.test_lora_runtime import Served
from tests.support.adapted_asks import AtOnce, assert_own_tokens, completing, naming
from tests.support.adapters import loaded, merged_models
from tests.support.cluster import LiveCluster
from tests.support.engines import generate, make_core, random_prompt, run
from tests.support.prompt_adapters import make_prompt_adapter, peft_greedy

Checkpoints = Callable[..., Path]
MAX_TOKENS = 12
NAMES = ("", "french", "formal", "wide")  # "": the base model
NUM_VIRTUAL = {"soft": 5, "prefix": 21}  # virtual tokens of prompt adapters


@pytest.fixture(scope="module")
def models(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base, folder = checkpoint("llama", max_position_embeddings=2048), tmp_path_factory.mktemp("adapters")
    return merged_models(base, folder, {"french": 4, "formal": 4, "wide": 16})


@pytest.fixture(scope="module")
def prompted(models: dict[str, Path]) -> dict[str, Path]:
    """Returns the prompt adapters' folders by name; `late` is not loaded at the start."""
    base, folder = models[""], models["wide"].parent
    return {
        "soft": make_prompt_adapter(folder / "soft", base, "p-tuning", NUM_VIRTUAL["soft"]),
        "prefix": make_prompt_adapter(folder / "prefix", base, "prefix", NUM_VIRTUAL["prefix"]),
        "late": make_prompt_adapter(folder / "late", base, "prompt", 3, seed=3),
    }


@pytest.fixture(scope="module")
def cluster(
    models: dict[str, Path], prompted: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Yields two prefill instances, a decode instance over shared memory, and one over gloo."""
    folder = models["wide"].parent
    modules = [f"french={folder}/french", f'{{"name": "formal", "path": "{folder}/formal"}}', f"wide={folder}/wide"]
    flags = ["--enable-lora", *(f"--lora-modules={each}" for each in modules), "--max-loras=2", "--num-blocks=512"]
    flags += ["--enable-prompt-adapter", *(f"--prompt-adapters={name}={prompted[name]}" for name in NUM_VIRTUAL)]
    own = {
        "decode-0": ["--kv-transport=shm"],
        "decode-1": ["--kv-transport=dist"],
        "scheduler": ["--allow-runtime-lora", f"--lora-root={folder}"],
    }
    with Served(tmp_path_factory.mktemp("lora"), models[""], 2, 2, arguments=flags, member_arguments=own) as running:
        yield running


def test_models_are_listed_with_their_parent(cluster: Served, models: dict[str, Path]) -> None:
    listed = httpx.get(f"{cluster.url}/v1/models", trust_env=False).json()["data"]
    assert {each["id"] for each in listed[1:]} == {*NAMES[1:], *NUM_VIRTUAL}
    assert {each["parent"] for each in listed[1:]} == {listed[0]["id"]}
    assert "parent" not in listed[0]
    assert not [each for each in listed[1:] if str(models["wide"].parent) in str(each)]
    assert httpx.get(f"{cluster.url}/v1/models/french", trust_env=False).json()["id"] == "french"
    assert cluster.status("german") == 404


def test_each_request_gets_its_own_adapter_s_tokens(cluster: LiveCluster, models: dict[str, Path]) -> None:
    """Many concurrent requests over both transports, twice, never use another adapter's cached prefixes."""
    rng = random.Random(1)
    prompts = [random_prompt(rng, n) for n in (1, 16, 33, 70)]
    asks = [(name, prompt) for prompt in prompts for name in NAMES]
    for _ in range(2):
        outputs = completing(cluster, asks, MAX_TOKENS).run()
        assert_own_tokens(models, asks, outputs, MAX_TOKENS)
    assert len({tuple(outputs[at]) for at in range(len(NAMES))}) == len(NAMES)
    cluster.await_received("decode-0", "decode-1")
    cluster.assert_home()


def test_cached_tokens_are_an_adapter_s_own(cluster: LiveCluster) -> None:
    """A third adapter computes the whole prompt, although the model and another adapter have it cached."""
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
        alone = run(core, [Request("r", RequestSpec(prompt, sampling, variant=variant))])["r"]
        expected = [[token.token_id for token in alone[index]] for index in sorted(alone)]
        assert cluster.complete_choices(prompt, 8, **fields, **naming("formal")) == expected


@pytest.mark.parametrize("name", ["french", "soft", "prefix"])
def test_a_decode_instance_s_death_changes_no_token(
    cluster: Served, models: dict[str, Path], prompted: dict[str, Path], name: str
) -> None:
    """After kill -9 of the request's instance, another one recomputes everything with the same adapter."""
    cluster.await_ready()
    stream, begun, busy = caught(cluster, **naming(name))
    cluster.kill(busy)
    found = begun[0] + stream.to_the_end()[0]
    if name in prompted:  # including virtual tokens
        assert found == peft_greedy(models[""], prompted[name], PROMPT, NUM_TOKENS, guess=found)
    else:
        core = make_core(models[name], num_blocks=128)
        sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        assert [found] == generate(core, [PROMPT], sampling)
    cluster.restart(busy)
    cluster.assert_home()


def test_a_prefill_instance_s_death_changes_no_token(cluster: LiveCluster, models: dict[str, Path]) -> None:
    """After kill -9 during prompts, another instance computes them with the same adapters."""
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

    for _ in range(10):  # all may end before they are observed
        cluster.await_ready()
        asks = [(NAMES[at % len(NAMES)], random_prompt(rng, 1000)) for at in range(16)]
        asked = completing(cluster, asks, 4)
        assert_own_tokens(models, asks, asked.run(kill), 4)
        if busy:
            break
    assert busy
    cluster.await_ready()
    cluster.assert_home()


# ---- prompt adapters


def answer_of(cluster: Served, name: str, prompt: list[int], **fields: Any) -> Any:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = {**body, **naming(name), **fields}
    return httpx.post(f"{cluster.url}/v1/completions", json=whole, timeout=60, trust_env=False).json()


def test_each_request_gets_its_own_prompt_adapter_s_tokens(
    cluster: Served, models: dict[str, Path], prompted: dict[str, Path]
) -> None:
    rng = random.Random(1)
    asks = [(name, random_prompt(rng, n)) for n in (1, 16, 33, 70) for name in ("", *NUM_VIRTUAL)]
    for _ in range(2):  # the second time with cached prefixes
        found = AtOnce(asks, lambda name, prompt: answer_of(cluster, name, prompt)).run()
        for answer, (name, prompt) in zip(found, asks, strict=True):
            (choice,) = answer["choices"]
            assert choice["token_ids"] == peft_greedy(models[""], prompted.get(name), prompt, 8)
            assert choice["prompt_token_ids"] == prompt
            assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_echo_and_the_context_of_prompt_adapters(cluster: Served) -> None:
    """Virtual tokens are not shown and have no logprobs, but count in the context length."""
    prompt = random_prompt(random.Random(2), 20)
    choice = answer_of(cluster, "soft", prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
    assert choice["logprobs"]["token_logprobs"][0] is None
    room = 2048 - NUM_VIRTUAL["prefix"]
    fits = answer_of(cluster, "prefix", random_prompt(random.Random(3), room - 1), max_tokens=9)
    assert fits["usage"]["completion_tokens"] == 1
    refused = answer_of(cluster, "prefix", random_prompt(random.Random(3), room))
    assert refused["error"]["code"] == "context_length_exceeded"
    body = {"model": "soft", "input": "a"}
    vectors = httpx.post(f"{cluster.url}/v1/embeddings", json=body, timeout=60, trust_env=False)
    assert (vectors.status_code, "makes no vectors" in vectors.text) == (400, True)


def test_one_is_loaded_and_unloaded(cluster: Served, models: dict[str, Path], prompted: dict[str, Path]) -> None:
    prompt = random_prompt(random.Random(4), 30)
    cluster.load("late", "late")
    found = answer_of(cluster, "late", prompt)["choices"][0]["token_ids"]
    assert found == peft_greedy(models[""], prompted["late"], prompt, 8)
    cluster.unload("late")
    assert cluster.status("late") == 404
