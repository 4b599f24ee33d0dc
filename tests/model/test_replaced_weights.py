"""Weights that are replaced in a loaded engine: the tokens are those of an engine that began with them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.lora_folder import LoraFolder
from pd_cluster.checkpoints.replaced_weights import check_replacement, version_files
from pd_cluster.engine.assembly.build_weights import weights_of
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ModelError
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.lora_settings import AdapterSettings, LoraModule
from pd_cluster.settings.speculation import Speculation
from pd_cluster.types import Request, RequestSpec, Sampling
from pd_cluster.wire import WeightVersion
from tests.support.adapters import make_adapter
from tests.support.engines import make_core, random_prompt, run, together
from tests.support.mtp import add_mtp_layer
from tests.support.pictures import make_vision, picture, shared_folder, shown
from tests.support.weight_versions import make_version, version_of

Checkpoints = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [random_prompt(random.Random(5), num_tokens) for num_tokens in (1, 40, 50)]


def change(core: EngineCore, version: WeightVersion) -> None:
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    source = weights_of(core, runner, runner)
    source.check(version)
    source.load(version)


def tokens_of(core: EngineCore, variant: str = "") -> list[list[int]]:
    orders = [RequestSpec(prompt, GREEDY, variant=variant) for prompt in PROMPTS]
    requests = [Request(f"r{at}", order, arrival_s=float(at)) for at, order in enumerate(orders)]
    run(core, requests)
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}),
        ("qwen3", {"quantization": "int8"}),
        pytest.param("mixtral", {}, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.slow),
        pytest.param("gemma3_text", {"attention_backend": "sdpa"}, marks=pytest.mark.slow),
    ],
)
def test_the_tokens_are_those_of_the_new_weights(
    checkpoint: Checkpoints, tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    base = checkpoint(architecture)
    other = make_version(base, tmp_path / "other", 1)
    core = make_core(base, num_blocks=64, block_size=8, **settings)
    before = tokens_of(core)
    change(core, version_of(base, other))
    hits = core.scheduler.num_prefix_hit_tokens
    after = tokens_of(core)
    assert core.scheduler.num_prefix_hit_tokens == hits, "blocks of the old weights were found"
    assert after != before
    assert after == tokens_of(make_core(other, num_blocks=64, block_size=8, **settings))
    change(core, version_of(base, base, 2))
    assert tokens_of(core) == before


@pytest.mark.slow
def test_mtp_layers_change_with_the_model(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Tokens are exact whatever the drafts are, so the head's own results are compared, too."""
    plain = checkpoint("deepseek_v3")
    base, other = (add_mtp_layer(make_version(plain, tmp_path / f"step-{seed}", seed), seed) for seed in (1, 2))
    settings: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "speculation": Speculation(methods=("mtp",))}
    core, fresh = make_core(base, **settings), make_core(other, **settings)
    before = tokens_of(core)
    change(core, version_of(base, other))
    assert isinstance(core.runner, ModelRunner)
    assert isinstance(fresh.runner, ModelRunner)
    own, wanted = (each.runner.head for each in (core, fresh))
    assert own is not None
    assert wanted is not None
    x = torch.arange(own.model.config.hidden_size, dtype=torch.float32)[None] / 64
    assert torch.equal(own.model.logits_of(x), wanted.model.logits_of(x))
    assert tokens_of(core) == tokens_of(fresh) != before


@pytest.mark.parametrize("name", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_version_of_a_model_with_pictures_has_only_config_and_weights(tmp_path: Path, name: str) -> None:
    """As in a copy, or in a folder of a trainer's tensors; also after a sleep."""
    base = shared_folder(make_vision, name)
    other = make_version(base, tmp_path / "other", 1)
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in version_files(other):
        shutil.copyfile(other / file, bare / file)
    settings = {"block_size": 8, "num_blocks": 128, "max_num_batched_tokens": 64}
    orders = [shown(1, [5, 7], [picture(at)]).order(base, GREEDY) for at in (1, 2)]
    expected = together(make_core(other, **settings), orders)
    core = make_core(base, **settings)
    assert together(core, orders) != expected
    change(core, version_of(base, bare))
    assert together(core, orders) == expected
    assert isinstance(core.runner, ModelRunner)
    core.scheduler.blocks.forget()
    core.runner.sleep(2)
    core.runner.sleep(0)
    assert together(core, orders) == expected


def test_base_weights_in_adapters_files_are_compared_with_the_new_ones(checkpoint: Checkpoints, tmp_path: Path) -> None:
    base = checkpoint("llama")
    other = make_version(base, tmp_path / "other", 1)
    core = make_core(base, num_blocks=64, adapters=AdapterSettings(enable_lora=True))
    change(core, version_of(base, other))
    assert isinstance(core.runner, ModelRunner)
    for folder, why in ((base, "differs from this model's weight"), (other, "")):
        (file,) = folder.glob("*.safetensors")
        head = load_file(file)["lm_head.weight"]
        own = tmp_path / f"of-{folder.name}"
        own.mkdir()
        sides = {"lora_A.weight": torch.ones(4, head.shape[1]), "lora_B.weight": torch.ones(len(head), 4)}
        tensors = {f"base_model.model.lm_head.{name}": each for name, each in sides.items()}
        save_file({**tensors, "base_model.model.lm_head.base_layer.weight": head}, own / "adapter_model.safetensors")
        (own / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
        with pytest.raises(ModelError, match=why) if why else contextlib.nullcontext():
            core.runner.held.load_adapter(LoraFolder.read(own, 16))


def test_sleep_brings_the_new_weights_back_and_adapters_stay(checkpoint: Checkpoints, tmp_path: Path) -> None:
    base = checkpoint("llama")
    other = make_version(base, tmp_path / "other", 1)
    adapter = make_adapter(tmp_path / "french", base, 1)
    settings = {"adapters": AdapterSettings(enable_lora=True, lora_modules=(LoraModule("french", str(adapter)),))}
    variant = LoraFolder.read(adapter, 16).digest
    core = make_core(base, num_blocks=64, **settings)
    change(core, version_of(base, other))
    expected = tokens_of(make_core(other, num_blocks=64, **settings), variant)
    assert tokens_of(core, variant) == expected != tokens_of(core)
    assert isinstance(core.runner, ModelRunner)
    core.scheduler.blocks.forget()
    core.runner.sleep(2)
    core.runner.sleep(0)
    assert tokens_of(core, variant) == expected


def test_a_folder_that_changed_after_its_check_is_not_loaded(checkpoint: Checkpoints, tmp_path: Path) -> None:
    base = checkpoint("llama")
    other = make_version(base, tmp_path / "other", 1)
    core = make_core(base, num_blocks=64)
    assert isinstance(core.runner, ModelRunner)
    source, version = weights_of(core, core.runner, core.runner), version_of(base, other)
    source.check(version)
    before = tokens_of(core)
    (file,) = other.glob("*.safetensors")
    os.utime(file, (1, 1))
    with pytest.raises(ModelError, match="changed since they were checked"):
        source.load(version)
    assert tokens_of(core) == before


def _lacks_tensor(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    save_file({name: each for name, each in load_file(file).items() if "layers.1.mlp.up" not in name}, file)


def _has_another_shape(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"][:7].contiguous()}, file)


def _has_another_dtype(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].half()}, file)


def _has_more(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "extra": tensors["model.norm.weight"].clone()}, file)


def _is_another_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_lacks_tensor, r"layers\.1\.mlp\.up_proj\.weight: missing; an update has all tensors"),
        (_has_another_shape, r"norm\.weight is F32 \[7\], but the served model has F32 \["),
        (_has_another_dtype, r"norm\.weight is F16"),
        (_has_more, "extra: not in the served model"),
        (_is_another_model, "rms_norm_eps is 0.5, but the served model has"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: missing; copy the model's own"),
        (lambda folder: shutil.rmtree(folder), "config.json: missing"),
    ],
)
def test_folders_that_do_not_fit(
    checkpoint: Checkpoints, tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    base = checkpoint("llama")
    other = make_version(base, tmp_path / "other", 1)
    spoil(other)
    with pytest.raises(ModelError, match=why):
        check_replacement(base, other)
