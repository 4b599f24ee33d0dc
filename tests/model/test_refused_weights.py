"""Weights that would be misread are refused with an error that names them, on one rank and on two; others load."""

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

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ModelError
from pd_cluster.model.loading.model_loader import load_model
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Sampling
from tests.support.checkpoints import make_checkpoint, reference_greedy
from tests.support.copies import copy_of
from tests.support.engines import generate, make_core
from tests.support.multimodal import change_config, make_multimodal
from tests.support.paddle_layout import as_paddle
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
    """Applies a change to a folder's tensors and writes them to the file `name`."""
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


# ---- files that quantizers write beside the weights


def test_a_folder_of_msmodelslim_without_its_description(folder: Path, load: Loading) -> None:
    rewrite(folder, to_msmodelslim, "quant_model_weights.safetensors")
    file = folder / "quant_model_weights.safetensors"
    assert fault(load, folder).startswith(f"{file}: model.layers.0.mlp.down_proj.weight_offset (F32): quantized")
    (folder / "quant_model_description.json").write_text(
        json.dumps({"model_quant_type": "W8A8_DYNAMIC"})
    )  # has no entry for a tensor
    assert "is quantized, but" in fault(load, folder)


@pytest.mark.parametrize(
    ("field", "method"), [("quantization_config", "bitsandbytes"), ("compression_config", "a-method-of-next-year")]
)
def test_a_field_of_config_json(folder: Path, field: str, method: str) -> None:
    change_config(folder, **{field: {"quant_method": method, "bits": 4}})
    place = f"{folder / 'config.json'}: {field}"
    assert fault(_one, folder) == f"{place}: quantized weights that are not supported ({method}); {WAY_OUT}"


def test_a_method_without_a_quantized_tensor(folder: Path, llama: Path, load: Loading) -> None:
    change_config(folder, quantization_config={"quant_method": "awq", "bits": 4})
    place = f"{folder / 'config.json'}: quantization_config"
    assert fault(load, folder) == f"{place}: awq, but no tensor is quantized; remove the setting"
    change_config(folder, quantization_config=None)
    assert_loads(load, folder, llama)


# ---- tensors that are not floats


@pytest.mark.parametrize(
    ("key", "dtype", "called"),
    [
        (f"{DOWN}.weight", torch.float8_e4m3fn, "F8_E4M3"),
        ("model.layers.2.self_attn.q_proj.bias", torch.int8, "I8"),
        ("model.norm.weight", torch.int32, "I32"),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.int64, "I64"),
        ("model.layers.0.mlp.up_proj._weight_qdata", torch.int8, "I8"),  # torchao's
    ],
)
def test_a_tensor_of_codes(folder: Path, key: str, dtype: torch.dtype, called: str) -> None:
    rewrite(folder, lambda weights: weights.update({key: weights.get(key, torch.ones(16)).to(dtype)}))
    said = f"{folder / FILE}: {key} ({called}): quantized weights that are not supported; {WAY_OUT}"
    assert fault(_one, folder) == said


def test_a_file_that_only_the_index_names(folder: Path, llama: Path, load: Loading) -> None:
    """Such a file may be in another folder; plain weights there are served."""
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


def test_a_tensor_that_would_be_left_out(folder: Path, load: Loading) -> None:
    """Uses the names of LMDeploy's smooth_quant scales. The error names the tensor's file."""
    key = f"{DOWN}.scale"
    rewrite(folder, lambda weights: weights.update({key: torch.ones(64, 1), f"{key}.z": torch.ones(1)}))
    said = (
        f"{key} and 1 more: llama has no such weight and would be computed without it; if a quantizer made this folder"
    )
    assert fault(load, folder) == f"{folder / FILE}: {said}, {WAY_OUT}; otherwise remove such tensors"
    weights = load_file(folder / FILE)
    (folder / FILE).unlink()
    place = {name: f"part-{at % 2}.safetensors" for at, name in enumerate(sorted(weights))}
    for part in set(place.values()):
        save_file({name: weights[name] for name in weights if place[name] == part}, folder / part, {"format": "pt"})
    (folder / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    assert fault(load, folder).startswith(f"{folder / place[key]}: {key} and 1 more: llama has no such weight")


@pytest.mark.parametrize("name", ["weight_scale", "k_scale", "g_idx", "SCB"])
def test_a_tensor_of_a_quantizer(folder: Path, name: str) -> None:
    rewrite(folder, lambda weights: weights.update({f"{DOWN}.{name}": torch.ones(1)}))
    said = f"{folder / FILE}: {DOWN}.{name} (F32): quantized weights that are not supported"
    assert fault(_one, folder).startswith(said)


def test_layers_behind_the_last_one(folder: Path, llama: Path, load: Loading) -> None:
    """Further layers are accepted if config.json declares them for speculation, or if the user omits layers."""

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


def test_what_modules_compute_today_and_other_forms_of_the_weights(folder: Path, llama: Path, load: Loading) -> None:
    """Rotary buffers that older transformers saved, and Mistral's consolidated.safetensors, are ignored."""
    rotary = "model.layers.{}.self_attn.rotary_emb.{}"
    names = ("inv_freq", "cos_cached", "sin_cached")
    old = {rotary.format(layer, name): torch.ones(8) for layer in range(3) for name in names}
    rewrite(folder, lambda weights: weights.update(old))
    save_file({"layers.0.attention.wq.weight": torch.ones(4, 4)}, folder / "consolidated.safetensors")
    assert_loads(load, folder, llama)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "gpt_bigcode"])
def test_masks_of_old_files(tmp_path: Path, architecture: str) -> None:
    prefix = "gpt_neox.layers.{}.attention.{}" if architecture == "gpt_neox" else "transformer.h.{}.attn.{}"
    original = make_checkpoint(tmp_path / "original", architecture)
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    masks = {prefix.format(at, name): torch.ones(1, 1, 8, 8) for at, name in ((0, "bias"), (1, "masked_bias"))}
    for dtype in (torch.uint8, torch.bool, torch.float32):
        rewrite(folder, lambda weights, dtype=dtype: weights.update({n: m.to(dtype) for n, m in masks.items()}))  # type: ignore[misc]
        assert_loads(_one, folder, original)


def test_a_tied_output_layer_that_is_stored_too(tmp_path: Path) -> None:
    original = make_checkpoint(tmp_path / "original", "gemma2")
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    head = {"lm_head.weight": load_file(folder / FILE)["model.embed_tokens.weight"].clone()}
    rewrite(folder, lambda weights: weights.update(head))
    assert_loads(_two, folder, original)


def test_parts_that_are_not_served_may_have_any_numbers(tmp_path: Path) -> None:
    folder = make_multimodal(tmp_path / "model", "gemma3")
    before = load_file(folder / FILE)
    vision = {"model.vision_tower.blocks.0.index": torch.ones(4, dtype=torch.int64)}
    vision["model.vision_tower.blocks.0.weight"] = torch.ones(4, 4, dtype=torch.int8)
    rewrite(folder, lambda weights: weights.update(vision))
    settings: dict[str, Any] = {"language_model_only": True}
    with _two(folder, **settings) as core:
        outputs = generate(core, [PROMPT], GREEDY)
    (folder / FILE).unlink()  # it may be mapped
    save_file(before, folder / FILE, {"format": "pt"})
    with _one(folder, **settings) as core:
        assert generate(core, [PROMPT], GREEDY) == outputs
    key = "model.language_model.layers.0.mlp.down_proj.scale"
    rewrite(folder, lambda weights: weights.update({key: torch.ones(64, 1)}))
    # The error names the file, although the text model by itself has another name for the tensor.
    assert fault(_two, folder, **settings).startswith(
        f"{folder / FILE}: model.layers.0.mlp.down_proj.scale: gemma3_text"
    )


# ---- nulls in a folder's files


OTHERS = ("qwen2", "gemma2", "gpt_oss", "gpt2", "glm4", "ernie4_5_moe")
ARCHITECTURES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in (*OTHERS, "paddle"))]
BY_SHAPE = ("num_key_value_heads", "moe_intermediate_size", "moe_num_experts", "n_inner")  # refused by weights' shapes


def fields_of(config: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in config.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *rest) for rest in fields_of(value))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_field(checkpoint: Callable[..., Path], tmp_path: Path, architecture: str) -> None:
    if architecture == "paddle":
        folder = as_paddle(checkpoint("ernie4_5_moe"), tmp_path / "model")
    else:
        folder = copy_of(checkpoint(architecture), tmp_path, {})
    refused: list[tuple[str, str]] = []
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        file = folder / name
        whole = file.read_text("utf-8")
        for path in fields_of(json.loads(whole)):
            changed = place = json.loads(whole)
            for each in path[:-1]:
                place = place[each]
            place[path[-1]] = None
            file.write_text(json.dumps(changed), "utf-8")
            try:
                opened = Checkpoint.open(str(folder))
                if name == "config.json":
                    load_model(opened, "float32", CPU)
                Tokenizer(folder)
            except ModelError as error:
                refused.append((path[-1], str(error)))
        file.write_text(whole, "utf-8")
    assert len(refused) > 5
    for field, text in refused:
        assert "\n" not in text
        assert field in text or field in BY_SHAPE or architecture == "paddle", (field, text)


def test_tied_embeddings_that_are_null(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy_of(checkpoint("llama"), tmp_path, {})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "tie_word_embeddings": None}))
    with pytest.raises(
        ModelError, match=r"config\.json: .*null for tie_word_embeddings: leave them out, or give values$"
    ):
        load_model(Checkpoint.open(str(folder)), "float32", CPU)
