"""Weights that would be read as other numbers than they are: refused by name, on one rank and on two; others load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.engine.step.core import EngineCore
from pd_cluster.errors import ModelError
from pd_cluster.types import Sampling
from tests.support.checkpoints import make_checkpoint, reference_greedy
from tests.support.engines import generate, make_core
from tests.support.multimodal import change_config, make_multimodal
from tests.support.ranks import ranks

GREEDY = Sampling(max_tokens=8, temperature=0.0)
PROMPT = [9, 30, 5]
FILE = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj"
WAY_OUT = "give the model in float32, float16 or bfloat16"
Tensors = dict[str, torch.Tensor]
Loading = Callable[..., AbstractContextManager[EngineCore]]


@contextmanager
def _one(folder: Path, **settings: Any) -> Iterator[EngineCore]:
    yield make_core(folder, num_blocks=32, **settings)


def _two(folder: Path, **settings: Any) -> AbstractContextManager[EngineCore]:
    return ranks(folder, 2, num_blocks=32, **settings)


@pytest.fixture(params=[_one, _two], ids=["one rank", "two ranks"])
def load(request: pytest.FixtureRequest) -> Loading:
    found: Loading = request.param
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[Tensors], None], name: str = FILE) -> None:
    """Applies a change to the tensors of a folder; they are then in the file `name`."""
    weights = load_file(folder / FILE)
    change(weights)
    (folder / FILE).unlink()
    save_file({key: tensor.contiguous() for key, tensor in weights.items()}, folder / name, {"format": "pt"})


def fault(load: Loading, folder: Path, **settings: Any) -> str:
    with pytest.raises(ModelError) as caught, load(folder, **settings):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_loads(load: Loading, folder: Path, original: Path, **settings: Any) -> None:
    with load(folder, **settings) as core:
        assert generate(core, [PROMPT], GREEDY) == [reference_greedy(original, PROMPT, 8)]


def codes_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int8 [N, K] and scales [N, 1]."""
    scale = weight.abs().amax(-1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def to_msmodelslim(weights: Tensors) -> None:
    for key in [key for key in weights if key.endswith("_proj.weight")]:
        weights[key], weights[f"{key}_scale"] = codes_of(weights[key])
        weights[f"{key}_offset"] = torch.zeros_like(weights[f"{key}_scale"])


# ---- what a quantizer writes beside the weights


@pytest.mark.parametrize("name", ["quant_model_description.json", "quant_model_description_w8a8_dynamic.json"])
def test_a_folder_of_msmodelslim_without_its_description(folder: Path, load: Loading, name: str) -> None:
    rewrite(folder, to_msmodelslim, "quant_model_weights.safetensors")
    file = folder / "quant_model_weights.safetensors"
    assert fault(load, folder).startswith(f"{file}: model.layers.0.mlp.down_proj.weight_offset (F32): quantized")
    (folder / name).write_text(json.dumps({"model_quant_type": "W8A8_DYNAMIC"}))  # which names no tensor
    assert "has codes, and" in fault(load, folder)


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "a-method-of-next-year"])
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_a_field_of_config_json(folder: Path, load: Loading, field: str, method: str) -> None:
    change_config(folder, **{field: {"quant_method": method, "bits": 4}})
    place = f"{folder / 'config.json'}: {field}"
    assert fault(load, folder) == f"{place}: quantized weights that are not supported ({method}); {WAY_OUT}"


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
def test_a_method_without_a_quantized_tensor(folder: Path, load: Loading, method: str) -> None:
    change_config(folder, quantization_config={"quant_method": method, "bits": 4})
    place = f"{folder / 'config.json'}: quantization_config"
    assert fault(load, folder) == f"{place}: {method}, but no tensor is quantized; remove that"


def test_a_field_without_a_value_is_none(folder: Path, llama: Path, load: Loading) -> None:
    change_config(folder, quantization_config=None)
    assert_loads(load, folder, llama)


# ---- tensors that are no floats


@pytest.mark.parametrize(
    ("key", "dtype", "called"),
    [
        (f"{DOWN}.weight", torch.float8_e4m3fn, "F8_E4M3"),
        (f"{DOWN}.weight", torch.uint8, "U8"),
        ("model.layers.2.self_attn.q_proj.bias", torch.int8, "I8"),
        ("model.layers.2.self_attn.q_proj.bias", torch.float8_e5m2, "F8_E5M2"),
        ("model.norm.weight", torch.int32, "I32"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.int64, "I64"),
        ("model.layers.0.mlp.words", torch.int32, "I32"),
        ("model.layers.0.mlp.up_proj._weight_qdata", torch.int8, "I8"),  # torchao's
    ],
)
def test_a_tensor_of_codes(tmp_path: Path, load: Loading, key: str, dtype: torch.dtype, called: str) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2")
    rewrite(folder, lambda weights: weights.update({key: weights.get(key, torch.ones(16)).to(dtype)}))
    assert (
        fault(load, folder) == f"{folder / FILE}: {key} ({called}): quantized weights that are not supported; {WAY_OUT}"
    )


def test_a_file_that_only_the_index_names(folder: Path, llama: Path, load: Loading) -> None:
    """It may lie in another folder, beside no other file of weights; plain ones are served from there."""
    place = "parts/one.safetensors"
    (folder / "parts").mkdir()
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / FILE), place)}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))
    (folder / FILE).rename(folder / place)
    assert_loads(load, folder, llama)
    weights = {**load_file(folder / place), f"{DOWN}.weight": torch.ones(64, 96, dtype=torch.int8)}
    (folder / place).unlink()  # it may be mapped
    save_file(weights, folder / place)
    assert fault(load, folder).startswith(
        f"{folder / place}: {DOWN}.weight (I8): quantized weights that are not supported"
    )
    (folder / place).unlink()
    assert fault(load, folder) == (
        f"{folder / place}: cannot be read: No such file or directory; copy or download it again"
    )


# ---- tensors that no module takes


@pytest.mark.parametrize("name", ["scale", "weight.step", "lora_A.weight", "smooth"])
def test_a_tensor_that_would_be_left_out(folder: Path, load: Loading, name: str) -> None:
    """LMDeploy's smooth_quant calls its scales so; the other names are no quantizer's that is known here."""
    key = f"{DOWN}.{name}"
    rewrite(folder, lambda weights: weights.update({key: torch.ones(64, 1), f"{key}.z": torch.ones(1)}))
    assert fault(load, folder) == (
        f"{folder / FILE}: {key} and 1 more: llama has no such weight and would be computed without it; if a quantizer "
        f"made this folder, {WAY_OUT}; otherwise remove such tensors"
    )


@pytest.mark.parametrize("name", ["weight_scale", "input_scale", "k_scale", "g_idx", "qweight", "SCB"])
def test_a_tensor_of_a_quantizer(folder: Path, load: Loading, name: str) -> None:
    rewrite(folder, lambda weights: weights.update({f"{DOWN}.{name}": torch.ones(1)}))
    assert fault(load, folder).startswith(
        f"{folder / FILE}: {DOWN}.{name} (F32): quantized weights that are not supported"
    )


def test_the_file_of_a_tensor_is_named(folder: Path, load: Loading) -> None:
    weights = {**load_file(folder / FILE), "model.layers.0.more": torch.ones(1)}
    (folder / FILE).unlink()
    place = {key: f"part-{at % 2}.safetensors" for at, key in enumerate(sorted(weights))}
    for name in set(place.values()):
        save_file({key: weights[key] for key in weights if place[key] == name}, folder / name, {"format": "pt"})
    (folder / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    file = folder / place["model.layers.0.more"]
    assert fault(load, folder).startswith(f"{file}: model.layers.0.more: llama has no such weight")


def test_layers_behind_the_last_one(folder: Path, llama: Path, load: Loading) -> None:
    """They are for speculative decoding if config.json says so, or not wanted if the user says so."""

    def add(weights: Tensors) -> None:
        layer = "model.layers.2."
        more = {
            key.replace(layer, "model.layers.3."): tensor.clone() for key, tensor in weights.items() if layer in key
        }
        weights.update(more)

    rewrite(folder, add)
    assert "model.layers.3.input_layernorm.weight and 8 more: llama has no such weight" in fault(load, folder)
    change_config(folder, num_nextn_predict_layers=1)
    assert_loads(load, folder, llama)
    change_config(folder, num_nextn_predict_layers=0)
    assert_loads(load, folder, llama, hf_overrides={"num_hidden_layers": 3})


def test_what_modules_compute_today(folder: Path, llama: Path, load: Loading) -> None:
    """Older versions of transformers saved these."""
    rotary = "model.layers.{}.self_attn.rotary_emb.{}"
    names = ("inv_freq", "cos_cached", "sin_cached")
    old = {rotary.format(layer, name): torch.ones(8) for layer in range(3) for name in names}
    rewrite(folder, lambda weights: weights.update(old))
    assert_loads(load, folder, llama)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("gpt2", ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")),
        ("gpt_neox", ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.masked_bias")),
        ("gpt_bigcode", ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
def test_masks_of_old_files(tmp_path: Path, architecture: str, names: tuple[str, ...], dtype: torch.dtype) -> None:
    original = make_checkpoint(tmp_path / "original", architecture)
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    rewrite(folder, lambda weights: weights.update({name: torch.ones(1, 1, 8, 8).to(dtype) for name in names}))
    assert_loads(_one, folder, original)


def test_a_tied_output_layer_that_is_stored_too(tmp_path: Path, load: Loading) -> None:
    original = make_checkpoint(tmp_path / "original", "gemma2")
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    head = {"lm_head.weight": load_file(folder / FILE)["model.embed_tokens.weight"].clone()}
    rewrite(folder, lambda weights: weights.update(head))
    assert_loads(load, folder, original)


def test_another_form_of_the_same_weights_beside_them(folder: Path, llama: Path, load: Loading) -> None:
    """Mistral's folders have such a file; ranks read the one that transformers reads."""
    save_file({"layers.0.attention.wq.weight": torch.ones(4, 4)}, folder / "consolidated.safetensors")
    assert_loads(load, folder, llama)


def test_parts_that_are_not_served_may_have_any_numbers(tmp_path: Path, load: Loading) -> None:
    folder = make_multimodal(tmp_path / "model", "gemma3")
    before = load_file(folder / FILE)
    vision = {"model.vision_tower.blocks.0.index": torch.ones(4, dtype=torch.int64)}
    vision["model.vision_tower.blocks.0.weight"] = torch.ones(4, 4, dtype=torch.int8)
    rewrite(folder, lambda weights: weights.update(vision))
    settings: dict[str, Any] = {"language_model_only": True}
    with load(folder, **settings) as core:
        outputs = generate(core, [PROMPT], GREEDY)
    (folder / FILE).unlink()  # it may be mapped
    save_file(before, folder / FILE, {"format": "pt"})
    with _one(folder, **settings) as core:
        assert generate(core, [PROMPT], GREEDY) == outputs
    key = "model.language_model.layers.0.mlp.down_proj.scale"
    rewrite(folder, lambda weights: weights.update({key: torch.ones(64, 1)}))
    # The file is named although the tensor has another name in the text model alone.
    assert fault(load, folder, **settings).startswith(
        f"{folder / FILE}: model.layers.0.mlp.down_proj.scale: gemma3_text"
    )
