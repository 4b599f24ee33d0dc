"""Adapters of embeddings, output layers, experts, routers and whole modules over real processes.

The expected tokens are those of generate() with the model into which PEFT merged the adapter.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transformers

from pd_cluster.types import Sampling
from tests.cluster.test_death import PROMPT, caught
from tests.model.test_lora_targets import EXPERTS, written
from tests.support.adapted_asks import assert_own_tokens, completing
from tests.support.adapters import linear_modules
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, generate, make_core, random_prompt

Checkpoints = Callable[..., Path]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NUM_TOKENS = 80
LONG = 300
NUM_BLOCKS = 48  # per decode instance; for six requests that grow to seven blocks each, and a long one
# Decode instance -> its ranks and its KV transport. The prefill instance's ranks come first.
LAYOUTS = {
    "two ranks, equal over shm": (2, {"decode-0": (2, "shm"), "decode-1": (1, "dist")}),
    "two ranks, equal over gloo": (2, {"decode-0": (2, "dist"), "decode-1": (1, "shm")}),
    "one rank to two": (1, {"decode-0": (2, "dist"), "decode-1": (2, "shm")}),
}


@pytest.fixture(scope="module")
def models(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns folders by adapter name: the model, and the models into which PEFT merged the adapters."""
    base, folder = checkpoint("qwen2_moe"), tmp_path_factory.mktemp("places")
    linear = list(linear_modules(transformers.AutoModelForCausalLM.from_pretrained(base)))
    configs = {
        "ends": {"target_modules": [*linear, "lm_head", "embed_tokens"]},
        "experts": {"target_parameters": [*EXPERTS, "mlp.gate.weight"]},
        "whole": {"modules_to_save": ["lm_head", "embed_tokens", "norm", "input_layernorm"]},
    }
    found = {"": base}
    for seed, (name, config) in enumerate(configs.items()):
        merged = written(folder / name, base, seed + 1, **config).merge_and_unload()
        found[name] = folder / f"merged-{name}"
        shutil.copytree(base, found[name], ignore=shutil.ignore_patterns("*.safetensors"))
        merged.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module", params=LAYOUTS)
def cluster(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveCluster]:
    num_ranks, decodes = LAYOUTS[request.param]
    folder = models["ends"].parent
    flags = ["--enable-lora", *(f"--lora-modules={name}={folder}/{name}" for name in models if name), "--max-loras=2"]
    pressed = [f"--num-blocks={NUM_BLOCKS}", "--growth-tokens=8"]
    own = {
        name: [*pressed, f"--kv-transport={transport}", f"--preemption-mode={mode}", "--swap-space=0.01"]
        for (name, (_, transport)), mode in zip(decodes.items(), ("swap", "recompute"), strict=True)
    }
    sizes = {"prefill-0": num_ranks, **{name: size for name, (size, _) in decodes.items()}}
    with LiveCluster(
        tmp_path_factory.mktemp("cluster"), models[""], 1, 2, arguments=flags, member_arguments=own, tp_sizes=sizes
    ) as running:
        yield running


def test_many_at_once_in_small_pools(cluster: LiveCluster, models: dict[str, Path]) -> None:
    """Repeats requests with all adapters and without one until each decode instance has preempted some."""
    for seed in range(8):
        rng = random.Random(seed)
        asks = [(name, random_prompt(rng, n)) for n in (1, 16, 33, 41, 7) for name in models]
        outputs = completing(cluster, asks, NUM_TOKENS).run()
        assert_own_tokens(models, asks, outputs, NUM_TOKENS)
        cluster.assert_home()
        decodes = [cluster.instance(name) for name in ("decode-0", "decode-1")]
        if all(each["num_preemptions"] for each in decodes):
            break
    else:
        raise AssertionError("an instance preempted nothing: its pool is too large for this test")
    assert all(each["kv_received_nbytes"] for each in decodes)


@pytest.mark.parametrize("name", ["ends", "experts", "whole"])
def test_a_decode_instance_s_death_changes_no_token(cluster: LiveCluster, models: dict[str, Path], name: str) -> None:
    core = make_core(models[name], num_blocks=64)
    (expected,) = generate(core, [PROMPT], Sampling(max_tokens=LONG, temperature=0.0, ignore_eos=True))
    assert_all_same(models[name], [PROMPT], [expected[:40]], 40)
    stream, begun, busy = caught(cluster, LONG, model=name)
    cluster.kill(busy)
    assert begun[0] + stream.to_the_end()[0] == expected
    cluster.restart(busy)
    cluster.assert_home()


def test_a_prefill_instance_s_death_changes_no_token(cluster: LiveCluster, models: dict[str, Path]) -> None:
    """After kill -9 during prompts, the restarted instance computes them with the same adapters."""
    rng = random.Random(9)
    asks = [(name, random_prompt(rng, 450)) for name in models for _ in range(2)]
    asked = completing(cluster, asks, 4)

    def kill() -> None:
        cluster.wait_until(
            "it computes", lambda: bool(cluster.instance("prefill-0")["num_outstanding"]) or asked.is_over
        )
        assert not asked.is_over
        cluster.kill("prefill-0")
        cluster.await_exit("prefill-0")
        cluster.start_member("prefill-0")

    assert_own_tokens(models, asks, asked.run(kill), 4)
    cluster.await_ready()
    cluster.assert_home()
