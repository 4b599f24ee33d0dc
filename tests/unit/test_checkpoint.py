"""Reading a model folder; every error names the file and the remedy."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.checkpoints.checkpoint import SUPPORTED_MODEL_TYPES, Checkpoint
from pd_cluster.checkpoints.quantization_config import quantization_of
from pd_cluster.checkpoints.weight_files import SAMPLE_NBYTES
from pd_cluster.errors import ModelError
from pd_cluster.settings.engine_config import EngineConfig
from tests.support.checkpoints import make_tokenizer
from tests.support.sparse_files import MANY_NBYTES, num_bytes_read, padded

DATA_NBYTES = 4 * SAMPLE_NBYTES


def make_folder(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Writes a folder that looks like a llama's; the weights are zeros."""
    folder.mkdir(exist_ok=True)
    settings = {"model_type": "llama", "max_position_embeddings": 512, "eos_token_id": 2, **changes}
    (folder / "config.json").write_text(json.dumps(settings if config is None else config))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    header = json.dumps({"w": {"dtype": "U8", "shape": [DATA_NBYTES], "data_offsets": [0, DATA_NBYTES]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(DATA_NBYTES)
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model")


def fault(model: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(str(model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_folder_and_its_context(folder: Path) -> None:
    opened = Checkpoint.open(str(folder))
    assert opened.path == folder
    assert opened.max_position_embeddings == 512
    assert opened.eos_token_ids == {2}
    assert opened.generation_config == {}
    assert opened == Checkpoint.open(str(folder))
    opened = Checkpoint.open(str(folder))
    assert [opened.max_model_len(wanted) for wanted in (None, 1, 512)] == [512, 1, 512]
    for wanted in (513, 0, -1):
        with pytest.raises(ModelError, match=f"^--max-model-len {wanted}: "):
            opened.max_model_len(wanted)


@pytest.mark.parametrize("model", ["./nowhere", "~/nowhere-at-all", "nowhere", "a/b/c", "/nowhere"])
def test_what_is_no_folder_and_no_name(model: str) -> None:
    assert fault(model) == f"--model {model}: no such folder"


@pytest.mark.parametrize("model", ["nobody/nothing-of-this-name", "bad name/with spaces?"])
def test_a_name_that_is_not_in_the_cache(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no model of that name in the local Hugging Face cache" in fault(model)


@pytest.mark.parametrize(("model_type", "first"), [("falcon", ""), (["llama"], ""), ("qwen3_later", "qwen3")])
def test_another_architecture_is_named_with_the_nearest_supported(folder: Path, model_type: object, first: str) -> None:
    make_folder(folder, model_type=model_type)
    message = fault(folder)
    assert repr(model_type) in message
    pattern = r".*; the most similar supported types: (.*); docs/models\.md (.*)"
    near, page = re.fullmatch(pattern, message, re.DOTALL).groups()  # type: ignore[union-attr]
    assert near.startswith(first)
    assert set(near.split(", ")) < set(SUPPORTED_MODEL_TYPES)
    assert (near.count(", "), page) == (2, f"lists all {len(SUPPORTED_MODEL_TYPES)}")


def test_a_model_of_more_than_text_is_told_what_to_do(folder: Path) -> None:
    make_folder(folder, model_type="paligemma", text_config={"model_type": "gemma"})
    assert "--language-model-only serves its gemma alone" in fault(folder)
    for text in ({"model_type": "t5"}, {}, "gemma3_text"):
        make_folder(folder, model_type="other", text_config=text)
        assert "it is not known to the transformers that is" in fault(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert fault(folder).startswith(f"{folder / name}: missing; ")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert fault(folder).startswith(f"{folder / name}: ")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert fault(folder) == f"{folder}: no *.safetensors file; other weight formats are not loaded"


@pytest.mark.parametrize(
    "content",
    [b"", b"short", b"version https://git-lfs.github.com/spec/v1\n", struct.pack("<Q", 1000) + b"{}", bytes(64)]
    + [struct.pack("<Q", len(h)) + h for h in (b"{}x", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}')],
)
def test_weights_that_are_none(folder: Path, content: bytes) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(content)
    assert fault(folder).startswith(f"{file}: not a safetensors file")


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
LONG = {"max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2", "n_positions": 64}, 64),
        ({"model_type": "gpt2"}, 1024),
        ({"model_type": "opt"}, 2048),
        ({**LONG, "model_type": "phi3", "rope_scaling": None}, 64),
        ({**LONG, "rope_parameters": LONGROPE, "original_max_position_embeddings": 8}, 8),
        ({**LONG, "rope_scaling": {"type": "su", "original_max_position_embeddings": 8}}, 8),
        ({**LONG, "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 8}}, 64),
        ({**LONG, "rope_parameters": {"full_attention": {"rope_type": "linear"}}}, 64),
        ({**LONG, "rope_scaling": YARN}, 128),
        ({**LONG, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 256),
        ({**LONG, "rope_parameters": {"full_attention": YARN, "sliding_attention": {}}}, 128),
        ({**LONG, "rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({**LONG, "model_type": "gemma3_text", "rope_scaling": LINEAR}, 64),
        ({**LONG, "rope_scaling": {**YARN, "rope_type": "llama3"}}, 64),
        ({**LONG, "rope_scaling": {"type": "dynamic", "alpha": 1000.0}}, 64),
    ],
)
def test_how_long_a_sequence_can_be(folder: Path, config: dict[str, Any], expected: int) -> None:
    make_folder(folder, {"model_type": "llama", **config})
    opened = Checkpoint.open(str(folder))
    assert opened.max_position_embeddings == opened.max_model_len(None) == expected
    most = max(expected, opened.rope.most)
    assert opened.max_model_len(most) == most
    with pytest.raises(ModelError, match=f"{most}; use at most that"):
        opened.max_model_len(most + 1)


def test_a_stretch_that_is_asked_for_lengthens_the_context(folder: Path) -> None:
    """The error for a longer length suggests a rope scaling factor that is large enough."""
    with pytest.raises(ModelError) as refused:
        Checkpoint.open(str(folder)).max_model_len(1500)
    found = re.search(r"--rope-scaling (\{.*\})$", str(refused.value))
    assert found is not None
    scaling = json.loads(found[1])
    assert scaling == {"rope_type": "yarn", "factor": 3.0}
    asked = Checkpoint.of(EngineConfig(model=str(folder), hf_overrides={"rope_scaling": scaling}))
    assert asked.max_model_len(1500) == 1500
    assert asked.max_model_len(None) == 3 * 512
    for factor in ("4", 0.5, True):
        overrides = {"rope_scaling": {"rope_type": "yarn", "factor": factor}}
        with pytest.raises(ModelError, match="factor must be a number of at least 1"):
            Checkpoint.of(EngineConfig(model=str(folder), hf_overrides=overrides))


def test_what_ends_a_sequence(folder: Path) -> None:
    """`generation_config.json` takes precedence over `config.json`."""
    cases: list[tuple[dict[str, Any], dict[str, Any], set[int]]] = [
        ({}, {}, set()),
        ({"eos_token_id": [3, 4]}, {}, {3, 4}),
        ({"eos_token_id": 3}, {"eos_token_id": [5, 6]}, {5, 6}),
        ({"eos_token_id": 3}, {"temperature": 0.6}, {3}),
    ]
    for config, generation, expected in cases:
        make_folder(folder, {"model_type": "llama", **config})
        (folder / "generation_config.json").write_text(json.dumps(generation))
        assert Checkpoint.open(str(folder)).eos_token_ids == expected


# ---- identity


def test_a_pipe_in_the_weights_place_keeps_nobody_waiting(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert fault(folder) == f"{folder / 'model.safetensors'}: not a file"


def test_another_content_is_another_identity(folder: Path, tmp_path: Path) -> None:
    known = {Checkpoint.open(str(folder)).identity}
    assert Checkpoint.open(str(make_folder(tmp_path / "copy"))).identity in known

    def check() -> None:
        found = Checkpoint.open(str(folder)).identity
        assert found not in known
        known.add(found)

    weights = bytearray((folder / "model.safetensors").read_bytes())
    for at in (-1, -DATA_NBYTES, -DATA_NBYTES // 2):
        weights[at] ^= 1
        (folder / "model.safetensors").write_bytes(weights)
        check()
    for name in ("config.json", "tokenizer.json"):
        with (folder / name).open("ab") as file:
            file.write(b" ")
        check()
    (folder / "zz.safetensors").write_bytes(weights)
    check()
    for form in ("gptq", "gptq_v2"):  # checkpoint_format decides how zero points are read
        (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "checkpoint_format": form}))
        check()


# ---- quantized weights, cut files, adapters


def w4a8(weights: dict[str, Any], inputs: dict[str, Any], others: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns compressed-tensors' config for four-bit weights with int8 activations, beside other groups."""
    groups: dict[str, Any] = {
        "group_0": {
            "weights": {"num_bits": 4, "type": "int", **weights},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, **inputs},
        }
    }
    if others is not None:
        groups["group_1"] = {"weights": others}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}


def w8a8(*inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns compressed-tensors' config for int8 weights with these activations."""
    groups = {str(i): {"weights": {"num_bits": 8}, "input_activations": each} for i, each in enumerate(inputs)}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}


DYNAMIC, STATIC = {"dynamic": True, "strategy": "token"}, {"dynamic": False, "strategy": "tensor"}


def write_weights(folder: Path, tensors: dict[str, tuple[str, int]], missing_nbytes: int = 0) -> None:
    """`tensors`: name -> (dtype, number of bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    encoded = json.dumps(header).encode()
    data = struct.pack("<Q", len(encoded)) + encoded + bytes(at - missing_nbytes)
    (folder / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "W4A8_AWQ"}}, "quant_algo 'W4A8_AWQ' is not"),
        ("quant_model_description.json", {"a.weight": "W4A4"}, "a.weight 'W4A4' is not supported"),
        ("quantize_config.json", {"bits": 5}, "bits 5 is not supported; give a folder with 2, 3, 4, 8"),
        ("quantize_config.json", {"quant_method": "of\nlines"}, "quantized weights that are not supported ('of"),
        ("quant_config.json", {"w_bit": 3}, "bits 3 is not supported; give a folder with 4"),
        ("quant_config.json", "no JSON", "cannot be read as JSON"),
        ("quant_config.json", [], "expected a JSON object"),
    ],
)
def test_what_a_quantizer_left_is_refused_by_name(folder: Path, name: str, content: object, said: str) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert fault(folder).startswith(f"{folder / name}: {said}")


@pytest.mark.parametrize(
    ("field", "value", "method"),
    [
        ("quantization_config", {"quant_method": "torchao"}, "torchao"),
        ("compression_config", {"quant_method": ["awq"]}, "['awq']"),
        ("quantization", {"load_in_4bit": True}, "bitsandbytes"),
        ("quantization_config", {}, "without a quant_method"),
        ("quantization_config", "awq", "without a quant_method"),
    ],
)
def test_a_field_of_a_quantizer_is_refused_by_name(folder: Path, field: str, value: object, method: str) -> None:
    make_folder(folder, None, **{field: value})
    expected = f"{folder / 'config.json'}: {field}: quantized weights that are not supported ({method}); give the model"
    assert fault(folder).startswith(expected)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "awq", "version": "gemv_fast"}, "version 'gemv_fast' is not supported"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format True is not supported"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:awq_marlin"}, "packing_format 'awq_marlin' is"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size [0, 128] is not a size"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128 is not a size"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24' is not supported"),
        (w4a8({"symmetric": False}, {}), "weights.symmetric False is not supported"),
        (w4a8({}, {"strategy": "tensor"}), "input_activations.strategy 'tensor' is not"),
        (w4a8({}, {"dynamic": False}), "input_activations.dynamic False is not supported"),
        (w4a8({}, {"num_bits": 4}), "input_activations.num_bits 4 is not supported"),
        (w4a8({}, {}, {"num_bits": 8, "type": "int"}), "groups of int4 weights with int8 activations, and others"),
        (w4a8({}, {}, {"num_bits": 4, "type": "int"}), "groups of int4 weights with int8 activations, and others"),
        (w8a8({**DYNAMIC, "symmetric": False}), "input_activations.symmetric of dynamic activations False is not"),
        (w8a8({**DYNAMIC, "strategy": "tensor"}), "input_activations.strategy of dynamic activations 'tensor' is not"),
        (w8a8({**STATIC, "strategy": "channel"}), "input_activations.strategy of static activations 'channel' is not"),
        (w8a8({**DYNAMIC, "dynamic": "local"}), "input_activations.dynamic 'local' is not supported"),
        (w8a8({**DYNAMIC, "num_bits": 4}), "input_activations.num_bits 4 is not supported"),
        (w8a8(DYNAMIC, STATIC), "groups of int8 weights with different input_activations; give a folder with one kind"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "1 is not a scheme"),
        ({"quant_method": "compressed-tensors", "config_groups": 1}, "not the settings of compressed-tensors: "),
    ],
)
def test_settings_that_are_not_supported_are_named(folder: Path, settings: dict[str, Any], said: str) -> None:
    make_folder(folder, quantization_config=settings)
    found = fault(folder)
    assert found.startswith(f"{folder / 'config.json'}: quantization_config")
    assert f": {said}" in found


@pytest.mark.parametrize("group", [{"weights": None}, {"weights": None, "input_activations": {"num_bits": 8}}, {}])
def test_a_group_without_weights_quantizes_none(folder: Path, group: dict[str, Any]) -> None:
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], **group}}}
    found = quantization_of(folder, {"quantization_config": settings})
    assert found is not None
    assert (found.kinds, found.has_int8_activations, found.input_parts) == ((), False, ())
    one = {"group_1": {"weights": {"num_bits": 4, "type": "int"}}}
    both = {**settings, "config_groups": {**settings["config_groups"], **one}}  # type: ignore[dict-item]
    found = quantization_of(folder, {"quantization_config": both})
    assert found is not None
    assert found.kinds == ("int4",)


def test_the_first_name_of_compressed_tensors_field(folder: Path) -> None:
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
    make_folder(folder, compression_config={"format": "pack-quantized", "config_groups": groups})
    found = Checkpoint.open(str(folder)).quantization
    assert found is not None
    assert (found.method, found.kinds) == ("compressed-tensors", ("int4",))


@pytest.mark.parametrize(
    ("tensor", "dtype"),
    [
        ("model.layers.0.mlp.down_proj.weight", "F8_E4M3"),
        ("model.layers.0.mlp.down_proj.weight", "I8"),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", "F32"),
        ("model.layers.0.mlp.down_proj.input_scale", "F32"),
        ("model.layers.0.self_attn.k_proj.k_scale", "F32"),
        ("model.layers.0.self_attn.q_proj.qweight", "I32"),
        ("model.layers.0.self_attn.q_proj.quant_bias", "I32"),
    ],
)
def test_a_quantized_tensor_is_refused_by_name(folder: Path, tensor: str, dtype: str) -> None:
    """Without a quantization config, the tensors would be read as numbers without their scales."""
    write_weights(folder, {"model.norm.weight": ("BF16", 8), tensor: (dtype, 8)})
    assert fault(folder).startswith(f"{folder / 'model.safetensors'}: {tensor} ({dtype}): quantized weights")


def test_buffers_of_integers_are_none(folder: Path) -> None:
    """Old GPT-2 files contain integer masks, which are not weights and are ignored."""
    tensors = {"transformer.h.0.attn.bias": ("U8", 16), "transformer.h.0.attn.c_attn.weight": ("F32", 16)}
    write_weights(folder, {**tensors, "logit_scale": ("F32", 4), "position_ids": ("I64", 8)})
    assert Checkpoint.open(str(folder))


def test_files_of_another_size_are_refused_before_they_are_read(folder: Path) -> None:
    write_weights(folder, {"model.norm.weight": ("F32", 4096)}, missing_nbytes=1)
    where = folder / "model.safetensors"
    assert fault(folder).startswith(f"{where}: cut short: its header describes 4096 bytes of weights, but it has 4095")
    make_folder(folder)
    padded(where, 2 << 30)
    before = num_bytes_read()
    assert fault(folder) == f"{where}: 2147483648 bytes follow its last tensor; copy or download it again"
    assert num_bytes_read() - before < MANY_NBYTES


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors.index.json", "generation_config.json"]
)
def test_files_that_are_too_large_or_no_files(folder: Path, name: str) -> None:
    where = folder / name
    if name.endswith("index.json"):
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    where.touch()
    padded(where, 2 << 30)
    before = num_bytes_read()
    assert fault(folder).startswith(f"{where}: 2147")
    assert num_bytes_read() - before < MANY_NBYTES
    where.unlink()
    os.mkfifo(where)
    assert fault(folder) == f"{where}: not a file"


def test_adapters_beside_the_model_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    Checkpoint.open(str(folder)).warn_of_ignored_files()
    assert not caplog.records
    (folder / "adapter_config.json").write_text("{}")
    Checkpoint.open(str(folder)).warn_of_ignored_files()
    assert caplog.messages == [f"{folder}: adapter_config.json: the model is served without them; see --lora-modules"]


# ---- --generation-config


def opened_with(folder: Path, generation_config: str) -> Checkpoint:
    return Checkpoint.of(EngineConfig(model=str(folder), generation_config=generation_config))


def test_another_folders_generation_config(tmp_path: Path) -> None:
    folder, other = make_folder(tmp_path / "model"), tmp_path / "other"
    other.mkdir()
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [2, 7]}')
    (other / "generation_config.json").write_text('{"top_k": 3}')
    for source in ("auto", "vllm"):
        opened = opened_with(folder, source)
        assert (opened.eos_token_ids, opened.generation_file) == ({2, 7}, folder / "generation_config.json")
    opened = opened_with(folder, str(other))
    assert opened.generation_config == {"top_k": 3, "eos_token_id": [2, 7]}
    assert (opened.eos_token_ids, opened.generation_file) == ({2, 7}, other / "generation_config.json")
    (other / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert opened_with(folder, str(other)).eos_token_ids == {9}


@pytest.mark.parametrize("given", ["vlm", "", "/nowhere"])
def test_a_generation_config_that_is_not_there(folder: Path, given: str) -> None:
    with pytest.raises(ModelError, match=f"^--generation-config {given!r}: no folder with a generation_config"):
        opened_with(folder, given)
