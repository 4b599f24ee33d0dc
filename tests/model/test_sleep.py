"""After sleep, an engine computes the same numbers, with everything loaded before and since."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ModelError
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.lora_settings import AdapterSettings, LoraModule
from pd_cluster.types import Request, RequestSpec, Sampling
from pd_cluster.types.variants import num_virtual_tokens
from pd_cluster.wire import SleepLevel
from tests.support.adapters import make_adapter
from tests.support.engines import make_core, random_prompt, run
from tests.support.pictures import make_vision, picture, shown
from tests.support.prompt_adapters import make_prompt_adapter, variant_of

Checkpoints = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [random_prompt(random.Random(5), num_tokens) for num_tokens in (1, 30, 50)]


def slept(core: EngineCore, *levels: SleepLevel) -> None:
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    core.scheduler.blocks.forget()
    for level in levels:
        runner.sleep(level)


def tokens_of(core: EngineCore, variants: tuple[str, ...] = ("",)) -> list[list[int]]:
    orders = [
        RequestSpec([0] * num_virtual_tokens(variant) + prompt, GREEDY, variant=variant)
        for prompt in PROMPTS
        for variant in variants
    ]
    requests = [Request(f"r{at}", order, arrival_s=float(at)) for at, order in enumerate(orders)]
    run(core, requests)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}),
        pytest.param("mixtral", {}, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
        pytest.param("gemma3_text", {"attention_backend": "sdpa"}, marks=pytest.mark.slow),
        pytest.param("qwen3", {"quantization": "int8"}, marks=pytest.mark.slow),
        pytest.param("llama", {"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_the_same_after_each_level(
    checkpoint: Checkpoints, architecture: str, settings: dict[str, Any]
) -> None:
    core = make_core(checkpoint(architecture), num_blocks=64, swap_space_gib=0.01, **settings)
    expected = tokens_of(core)
    for levels in ((1, 0), (1, 2, 2, 1, 0)):
        slept(core, *levels)
        assert tokens_of(core) == expected


@pytest.mark.slow
def test_adapters_stay(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Covers adapters loaded and dropped during the sleep."""
    base = checkpoint("llama")
    lora = [make_adapter(tmp_path / name, base, seed) for seed, name in enumerate(("first", "second", "third"))]
    soft = make_prompt_adapter(tmp_path / "soft", base, "prefix")
    names = [LoraModule(folder.name, str(folder)) for folder in lora]
    settings = AdapterSettings(
        enable_lora=True, lora_modules=tuple(names[:2]), enable_prompt_adapter=True,
        prompt_adapters=(LoraModule("soft", str(soft)),),
    )  # fmt: skip
    core = make_core(base, num_blocks=128, adapters=settings)
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    first, second, third = (LoraFolder.read(folder, 16) for folder in lora)
    variants = ("", first.digest, second.digest, variant_of(soft))
    expected = tokens_of(core, variants)
    assert len({tuple(tokens) for tokens in expected[-4:]}) == 4
    slept(core, 2)
    runner.held.load_adapter(third)
    runner.held.drop_adapter(second.digest)
    slept(core, 0)
    found = tokens_of(core, ("", first.digest, third.digest, variant_of(soft)))
    for at in (0, 1, 3):
        assert found[at::4] == expected[at::4]
    other = AdapterSettings(enable_lora=True, lora_modules=(names[2],))
    assert found[2::4] == tokens_of(make_core(base, num_blocks=128, adapters=other), (third.digest,))


@pytest.mark.slow
def test_pictures_are_seen_again(tmp_path: Path) -> None:
    folder = make_vision(tmp_path / "seeing", "qwen2_vl")
    core = make_core(folder, block_size=8, num_blocks=128)
    ask = shown(1, [5, 7], [picture(1)])

    def answer() -> list[int]:
        request = Request("r", ask.order(folder, GREEDY), arrival_s=0.0)
        run(core, [request])
        return request.output_token_ids

    expected = answer()
    slept(core, 2, 0)
    assert answer() == expected


def test_another_model_at_the_same_place_is_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    core = make_core(folder, num_blocks=64)
    slept(core, 2)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    name = next(iter(weights))
    save_file({**weights, name: torch.zeros_like(weights[name])}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="the model has changed during the sleep"):
        slept(core, 0)


def test_the_memory_of_blocks_is_returned(checkpoint: Checkpoints) -> None:
    """Memory is released except the extra blocks, which are used for link probes and keep their content."""
    core = make_core(checkpoint("llama"), num_blocks=64, block_size=64)
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    pool = runner.pool
    pool.data.fill_(3.0)
    slept(core, 1)
    whole_pages = pool.nbytes // 4096 * 4096
    assert whole_pages > 0.9 * pool.nbytes
    numbers = pool.flat().flatten()
    assert not numbers[:whole_pages].any()
    assert (pool.data[pool.num_blocks :] == 3.0).all()
