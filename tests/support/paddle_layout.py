"""Converts transformers' folder of an ERNIE 4.5 model to Paddle's layout."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
FLOATS = ("mlp.gate.weight", "moe_statics")  # kept in float32
TRAINING = {"fuse_rope": True, "use_rmsnorm": True, "moe_aux_loss_lambda": 0.1, "paddlenlp_version": "3.0"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
Tensors = dict[str, torch.Tensor]


def in_bfloat16(folder: Path) -> Path:
    """Converts the weights of transformers' folder to bfloat16, as in published models."""
    weights = load_file(folder / WEIGHTS)
    found = {key: each if any(name in key for name in FLOATS) else each.bfloat16() for key, each in weights.items()}
    save_file(found, folder / WEIGHTS, {"format": "pt"})
    return folder


def as_paddle(folder: Path, to: Path, num_files: int = 1, has_words: bool = True) -> Path:
    """Writes the same model in Paddle's layout. `has_words`: headers call bfloat16 U16."""
    config = json.loads((folder / "config.json").read_bytes())
    is_picture_model = "text_config" in config
    weights = load_file(folder / WEIGHTS)
    found = _stored(weights, is_picture_model, is_turned_head=not config["tie_word_embeddings"])
    if not is_picture_model:
        found["ernie.mtp_linear_proj.0.weight"] = torch.ones(8, 4)
        found["ernie.resampler_model.mlp.weight"] = torch.ones(2, 2)
    if has_words:
        found = {key: each.view(torch.uint16) if each.dtype == torch.bfloat16 else each for key, each in found.items()}
    to.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    _save(found, to, num_files)
    own = _flat(config) if is_picture_model else {name: each for name, each in config.items() if name != "model_type"}
    (to / "config.json").write_text(json.dumps({**own, **TRAINING}))
    return to


def _stored(weights: Tensors, is_picture_model: bool, is_turned_head: bool) -> Tensors:
    found: Tensors = {}
    for key, each in weights.items():
        name = key.replace("model.", "ernie.", 1) if key.startswith("model.") else key
        if name.startswith("ernie.vision_model."):
            name = name.removeprefix("ernie.")
        is_router, is_head = ".mlp.gate." in name, name == "lm_head.weight"
        stays = "embed_tokens" in name or (is_picture_model and (is_router or is_head))
        if each.dim() == 2 and name.endswith(".weight") and not stays and (is_turned_head or not is_head):
            each = each.t()
        found[name] = each
    for name in list(found):
        if ".q_proj." in name:
            parts = [found.pop(name.replace(".q_proj.", f".{kind}_proj.")) for kind in "qkv"]
            found[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts, dim=-1)
        elif ".gate_proj." in name:
            parts = [found.pop(name.replace(".gate_proj.", f".{kind}_proj.")) for kind in ("gate", "up")]
            found[name.replace(".gate_proj.", ".up_gate_proj.")] = torch.cat(parts, dim=-1)
    return {name: each.contiguous() for name, each in found.items()}


def _save(tensors: Tensors, to: Path, num_files: int) -> None:
    if num_files == 1:
        save_file(tensors, to / WEIGHTS)
        return
    places: dict[str, str] = {}
    for number in range(num_files):
        name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        own = {key: tensors[key] for key in sorted(tensors)[number::num_files]}
        save_file(own, to / name)
        places |= dict.fromkeys(own, name)
    (to / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the flat config that Paddle's folders have for a model that takes pictures."""
    text, tower = config["text_config"], config["vision_config"]
    left_out = ("moe_num_experts", "mlp_layer_types", "rope_parameters", "model_type", "head_dim")
    own = {name: each for name, each in text.items() if name not in left_out}
    sparse = [index for index, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse"]
    ids = {name: each for name, each in config.items() if name.endswith("_token_id") and name != "image_token_id"}
    return {
        **own,
        **ids,
        "architectures": config["architectures"],
        "model_type": "ernie4_5_moe_vl",
        "im_patch_id": config["image_token_id"],
        "moe_num_experts": [text["moe_num_experts"]] * 2,
        "moe_layer_start_index": [sparse[0]] * 2,
        "moe_layer_end_index": [sparse[-1], sparse[-1]],
        "moe_layer_interval": 1,
        "rope_theta": text["rope_parameters"]["rope_theta"],
        "freq_allocation": text["rope_parameters"]["mrope_section"][2],
        "spatial_conv_size": tower["spatial_merge_size"],
        "temporal_conv_size": tower["temporal_merge_size"],
        "tie_word_embeddings": config["tie_word_embeddings"],
        "vision_config": {
            **{name: tower[name] for name in ("depth", "hidden_size", "hidden_act", "in_channels", "patch_size")},
            **{name: tower[name] for name in ("num_heads", "spatial_merge_size")},
            "mlp_ratio": tower["intermediate_size"] / tower["hidden_size"],
        },
    }


def sentence_pieces(pieces: list[tuple[str, float, int]], adds_prefix: bool = False) -> bytes:
    """Returns a SentencePiece BPE model with these pieces: (text, score, kind)."""
    data = b"".join(
        _bytes(1, _bytes(1, text.encode()) + _float(2, score) + _int(3, kind)) for text, score, kind in pieces
    )
    return data + _bytes(2, _int(3, 2)) + _bytes(3, _int(3, int(adds_prefix)) + _int(4, 0))


def with_sentence_pieces(folder: Path, **config: Any) -> Path:
    """Replaces a folder's tokenizer by a SentencePiece file with the same ids of bytes and control tokens."""
    state = json.loads((folder / "tokenizer.json").read_bytes())
    added = {token["id"]: token for token in state["added_tokens"]}
    characters = {**{byte: chr(byte) for byte in range(0x21, 0x7F)}, 0x20: "\u2581"}
    pieces = []
    for token_id in range(256 + len(added)):
        if token_id in added:
            kind = CONTROL if added[token_id]["special"] else USER_DEFINED
            pieces.append((str(added[token_id]["content"]), 0.0, kind))
        else:
            byte = token_id
            is_text = byte in characters
            pieces.append(
                (characters[byte] if is_text else f"<0x{byte:02X}>", -float(byte), NORMAL if is_text else BYTE)
            )
    pieces[0] = ("<unk>", 0.0, UNKNOWN)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentence_pieces(pieces))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_bytes()) | {"tokenizer_class": "Ernie4_5_Tokenizer"} | config
    settings.pop("added_tokens_decoder", None)
    file.write_text(json.dumps(settings))
    return folder


def _varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def _int(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value
