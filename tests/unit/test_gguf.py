"""The GGUF file is read back by a small reader of the published format, and rotation commutes with the permutation."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engine.gguf import ALIGNMENT, convert, gguf_name, permute, write_gguf
from pd_cluster.errors import ModelError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
SHAPES = {
    "input_layernorm": (8,),
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "post_attention_layernorm": (8,),
    "mlp.gate_proj": (12, 8),
    "mlp.up_proj": (12, 8),
    "mlp.down_proj": (8, 12),
}


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in SHAPES.items()}
    shapes |= {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_checkpoint(folder: Path, tensors: dict[str, np.ndarray], dtype: str = "F32", **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    header, offset = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
    return folder


def read_gguf(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors, as gguf.md says."""
    file = io.BytesIO(data)

    def number(form: str) -> Any:
        return struct.unpack("<" + form, file.read(struct.calcsize(form)))[0]

    def string() -> str:
        return file.read(number("Q")).decode()

    assert (file.read(4), number("I")) == (b"GGUF", 3)
    num_tensors, num_keys = number("Q"), number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key, kind = string(), number("I")
        metadata[key] = {4: lambda: number("I"), 6: lambda: number("f"), 8: string}[kind]()
    infos = []
    for _ in range(num_tensors):
        name, num_dims = string(), number("I")
        shape = [number("Q") for _ in range(num_dims)][::-1]
        assert number("I") == 0  # F32
        infos.append((name, shape, number("Q")))
    first = -(-file.tell() // ALIGNMENT) * ALIGNMENT
    tensors = {}
    for name, shape, offset in infos:
        assert offset % ALIGNMENT == 0
        start = first + offset
        tensors[name] = np.frombuffer(data[start : start + 4 * int(np.prod(shape))], "<f4").reshape(shape)
    return metadata, tensors


def test_every_tensor_and_key_of_a_llama_comes_back(tmp_path: Path) -> None:
    original = weights()
    convert(write_checkpoint(tmp_path / "model", original), tmp_path / "model.gguf")
    metadata, tensors = read_gguf((tmp_path / "model.gguf").read_bytes())
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert (metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]) == (2, 1)
    assert metadata["llama.rope.freq_base"] == 5000.0
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == np.float32(1e-6)
    assert (metadata["llama.vocab_size"], metadata["tokenizer.ggml.model"]) == (10, "none")
    assert len(tensors) == len(original)
    for name, tensor in original.items():
        num_heads = {"q_proj": 2, "k_proj": 1}.get(name.split(".")[-2])
        expected = permute(tensor, num_heads) if num_heads else tensor
        np.testing.assert_array_equal(tensors[gguf_name(name)], expected, err_msg=name)


def test_rows_of_a_head_become_neighbouring_pairs() -> None:
    rows = np.arange(12, dtype=np.float32)[:, None]  # two heads of six
    assert permute(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_rotating_pairs_of_permuted_rows_is_rotating_halves() -> None:
    """llama.cpp's rotary embedding on permuted weights gives transformers' scores of queries and keys."""
    rng = np.random.default_rng(1)
    head_dim, hidden = 8, 5
    query, key = (rng.standard_normal((head_dim, hidden)).astype(np.float32) for _ in range(2))
    x, y = rng.standard_normal(hidden), rng.standard_normal(hidden)
    frequencies = 100.0 ** -(np.arange(head_dim // 2) / (head_dim // 2))

    def halves(vector: np.ndarray, position: int) -> np.ndarray:
        a, b = np.split(vector, 2)
        cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    def pairs(vector: np.ndarray, position: int) -> np.ndarray:
        a, b = vector[0::2], vector[1::2]
        cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
        return np.stack([a * cos - b * sin, b * cos + a * sin], axis=1).reshape(-1)

    expected = halves(query @ x, 7) @ halves(key @ y, 3)
    assert pairs(permute(query, 1) @ x, 7) @ pairs(permute(key, 1) @ y, 3) == pytest.approx(expected, rel=1e-5)


def test_odd_sizes_are_padded_to_the_alignment() -> None:
    out = io.BytesIO()
    tensors = {"a": np.ones(3, np.float32), "b": np.full((2, 5), 2, np.float32)}
    write_gguf(out, {"general.architecture": "llama"}, tensors)
    assert len(out.getvalue()) % ALIGNMENT == 0
    _, found = read_gguf(out.getvalue())
    np.testing.assert_array_equal(found["b"], tensors["b"])


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.x.mlp.up_proj.weight", "model.rotary.weight"]
)
def test_unknown_tensors_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="not a tensor of a Llama"):
        gguf_name(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen2"}, "not a plain Llama"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "not a plain Llama"),
        ({"dtype": "BF16"}, "only F32"),
    ],
)
def test_other_checkpoints_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        convert(write_checkpoint(tmp_path / "model", weights(), **changes), tmp_path / "model.gguf")
