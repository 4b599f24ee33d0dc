"""Converts a Llama checkpoint in fp32 to a GGUF file, version 3, for llama.cpp.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file has no vocabulary: llama.cpp takes and
returns token ids. llama.cpp rotates neighbouring pairs of a head, transformers its two halves, so the rows of the q and
k projections are reordered. Needs numpy only; knows nothing of llama.cpp's API.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pd_cluster.errors import ModelError

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
UINT32, FLOAT32, STRING = 4, 6, 8  # types of metadata values
TENSOR_F32 = 0
HEADER_LENGTH = struct.Struct("<Q")

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Array = np.ndarray[Any, np.dtype[np.float32]]


def convert(folder: Path, file: Path) -> None:
    """Writes `file`. Raises ModelError unless the folder is a plain fp32 Llama with its weights in one file."""
    config = json.loads((folder / "config.json").read_text())
    _refuse_others(config, folder)
    tensors = dict(read_safetensors(folder / "model.safetensors"))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    renamed: dict[str, Array] = {}
    for name, tensor in tensors.items():
        num_heads = heads.get(name.split(".")[-2])
        renamed[gguf_name(name)] = permute(tensor, num_heads) if num_heads else tensor
    with file.open("wb") as out:
        write_gguf(out, metadata_of(config), renamed)


def gguf_name(name: str) -> str:
    """Maps `model.layers.3.self_attn.q_proj.weight` to `blk.3.attn_q.weight`. Raises ModelError for an unknown name."""
    if name in NAMES:
        return NAMES[name]
    prefix, _, rest = name.removeprefix("model.layers.").partition(".")
    own = LAYER_NAMES.get(rest.removesuffix(".weight"))
    if own is None or not prefix.isdigit() or not rest.endswith(".weight"):
        raise ModelError(f"{name}: not a tensor of a Llama without biases; it cannot be written as GGUF")
    return f"blk.{prefix}.{own}.weight"


def permute(weight: Array, num_heads: int) -> Array:
    """Reorders each head's rows from (first half, second half) to interleaved pairs; [num_heads * head_dim, hidden]."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def metadata_of(config: dict[str, Any]) -> dict[str, str | int | float]:
    """Returns llama.cpp's keys for a Llama's config.json."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "general.architecture": "llama",
        "general.file_type": 0,
        "general.alignment": ALIGNMENT,
        "llama.vocab_size": config["vocab_size"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.dimension_count": head_dim,
        "llama.rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "tokenizer.ggml.model": "none",
    }


def read_safetensors(file: Path) -> Iterator[tuple[str, Array]]:
    """Yields the name and the memory-mapped fp32 array of each tensor. Raises ModelError for another type."""
    with file.open("rb") as opened:
        (header_nbytes,) = HEADER_LENGTH.unpack(opened.read(HEADER_LENGTH.size))
        header = json.loads(opened.read(header_nbytes))
    first = HEADER_LENGTH.size + header_nbytes
    data = np.memmap(file, dtype=np.uint8, mode="r", offset=first)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise ModelError(f"{file}: {name} is {entry['dtype']}; only F32 is converted")
        start, stop = entry["data_offsets"]
        yield name, np.asarray(data[start:stop]).view(np.float32).reshape(entry["shape"])


def write_gguf(out: BinaryIO, metadata: dict[str, str | int | float], tensors: dict[str, Array]) -> None:
    """Writes header, metadata, tensor table, then each tensor's values at a multiple of the alignment."""
    out.write(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out.write(_string(key) + _value(value))
    offset = 0
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]  # ggml lists the fastest dimension first
        out.write(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        out.write(struct.pack("<IQ", TENSOR_F32, offset))
        offset += _padded(tensor.nbytes)
    out.write(bytes(_padded(out.tell()) - out.tell()))
    for tensor in tensors.values():
        out.write(np.ascontiguousarray(tensor, dtype="<f4").data)
        out.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    return struct.pack("<If", FLOAT32, value)


def _refuse_others(config: dict[str, Any], folder: Path) -> None:
    plain = {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "hidden_act": "silu"}
    for key, wanted in plain.items():
        if config.get(key, wanted) != wanted:
            raise ModelError(f"{folder / 'config.json'}: {key} is {config[key]!r}; only {wanted!r} is converted")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("model_type") != "llama" or rope.get("rope_type", "default") != "default":
        raise ModelError(f"{folder / 'config.json'}: not a plain Llama; it cannot be written as GGUF")
