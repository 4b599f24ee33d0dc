"""Tiny checkpoints of models that take pictures, except Qwen's, and transformers' answers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers

from tests.support.checkpoints import (
    COMMON,
    EOS_ID,
    MIXED_LAYERS,
    ROPE,
    until_end,
)
from tests.support.pictures import Shown, reference_of, write_model

PICTURE, VIDEO, FIRST, LAST, BEGIN, END = 300, 301, 302, 303, 304, 305
NAMES = {PICTURE: "<picture>", VIDEO: "<video>", FIRST: "<first>", LAST: "<last>", BEGIN: "<begin>", END: "<end>"}
Inputs = dict[str, Any]


class Kind(NamedTuple):
    """`shown` returns generate()'s inputs for pictures, and the tokens of each picture."""

    config_class: str
    text_type: str
    text: dict[str, Any]
    tower: dict[str, Any]
    whole: dict[str, Any]
    processor: Callable[[], Any]
    shown: Callable[[Any, list[Any]], tuple[Inputs, list[list[int]]]]
    files: Mapping[str, Any] = MappingProxyType({})  # contents of processor_config.json


def _processor(kind: str, name: str, **settings: Any) -> Callable[[], Any]:
    """Returns a function that imports and makes transformers' processor for a kind of model."""

    def make() -> Any:
        module = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
        return getattr(module, f"{name}ImageProcessorPil")(**settings)

    return make


_clip = _processor("clip", "CLIP", size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
_tiles = _processor("got_ocr2", "GotOcr2", size={"height": 16, "width": 16}, max_patches=4)
_rows = _processor("pixtral", "Pixtral", size={"longest_edge": 32}, patch_size={"height": 4, "width": 4})
_gemma = _processor("gemma3", "Gemma3", size={"height": 16, "width": 16}, do_pan_and_scan=False)
_glm = _processor("glm4v", "Glm4v", patch_size=4, size={"shortest_edge": 512, "longest_edge": 2048})
_ernie = _processor(
    "ernie4_5_vl_moe", "Ernie4_5_VLMoe", patch_size=4, size={"shortest_edge": 256, "longest_edge": 1024}
)


def _fixed(num_tokens: int) -> Callable[[Any, list[Any]], tuple[Inputs, list[list[int]]]]:
    def shown(processor: Any, pictures: list[Any]) -> tuple[Inputs, list[list[int]]]:
        found = processor(images=pictures, return_tensors="pt")
        return {"pixel_values": found["pixel_values"]}, [[PICTURE] * num_tokens] * len(pictures)

    return shown


def _tiled(processor: Any, pictures: list[Any]) -> tuple[Inputs, list[list[int]]]:
    found = processor(images=pictures, crop_to_patches=True, return_tensors="pt")
    counts = found["num_patches"].tolist()
    return {"pixel_values": found["pixel_values"]}, [[FIRST, *[PICTURE] * (4 * count), LAST] for count in counts]


def _in_rows(merge: int) -> Callable[[Any, list[Any]], tuple[Inputs, list[list[int]]]]:
    def shown(processor: Any, pictures: list[Any]) -> tuple[Inputs, list[list[int]]]:
        side = 4 * merge
        found = processor(images=pictures, patch_size={"height": side, "width": side}, return_tensors="pt")
        tokens = []
        for height, width in found["image_sizes"].tolist():
            row = [PICTURE] * (width // side) + [FIRST]
            tokens.append([*(row * (height // side))[:-1], LAST])
        return {"pixel_values": found["pixel_values"], "image_sizes": found["image_sizes"]}, tokens

    return shown


def _in_grids(processor: Any, pictures: list[Any]) -> tuple[Inputs, list[list[int]]]:
    found = processor(images=pictures, return_tensors="pt")
    grids = found["image_grid_thw"]
    inputs = {"pixel_values": found["pixel_values"], "image_grid_thw": grids}
    return inputs, [[PICTURE] * (count // 4) for count in grids.prod(-1).tolist()]


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
CLIP = {**SMALL, "model_type": "clip_vision_model", "num_hidden_layers": 3}
SIGLIP = {**SMALL, "num_hidden_layers": 2}
PIXTRAL = {**SMALL, "model_type": "pixtral", "num_hidden_layers": 2, "head_dim": 16, "image_size": 32}
INTERN = {**SMALL, "num_hidden_layers": 2, "image_size": [16, 16], "patch_size": [4, 4]}
GLM = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "image_size": 16, "intermediate_size": 48}
AT = {"image_token_index": PICTURE}
ENDS = {"image_break_token": NAMES[FIRST], "image_end_token": NAMES[LAST]}
GEMMA = {"boi_token": NAMES[FIRST], "eoi_token": NAMES[LAST], "image_token": NAMES[PICTURE]}
IDS = {"image_token_id": PICTURE, "video_token_id": VIDEO, "image_start_token_id": FIRST, "image_end_token_id": LAST}
IDS |= {"video_start_token_id": BEGIN, "video_end_token_id": END}
KINDS: dict[str, Kind] = {
    "llava": Kind("LlavaConfig", "llama", {}, CLIP, AT, _clip, _fixed(16)),
    "internvl": Kind(
        "InternVLConfig",
        "qwen2",
        {},
        INTERN,
        {"image_token_id": PICTURE, "image_seq_length": 4},
        _tiles,
        _tiled,
        {"start_image_token": NAMES[FIRST], "end_image_token": NAMES[LAST]},
    ),
    "mistral3": Kind(
        "Mistral3Config",
        "mistral",
        {"sliding_window": None},
        PIXTRAL,
        {**AT, "spatial_merge_size": 2},
        _rows,
        _in_rows(2),
        ENDS,
    ),
    "pixtral": Kind(
        "LlavaConfig",
        "mistral",
        {"sliding_window": None},
        PIXTRAL,
        {**AT, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        _rows,
        _in_rows(1),
        ENDS,
    ),
    "gemma3": Kind(
        "Gemma3Config",
        "gemma3_text",
        {**MIXED_LAYERS, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
        SIGLIP,
        {**AT, "mm_tokens_per_image": 4, "boi_token_index": FIRST, "eoi_token_index": LAST},
        _gemma,
        _fixed(4),
        GEMMA,
    ),
    "ernie4_5_vl_moe": Kind(
        "Ernie4_5_VLMoeConfig",
        "ernie4_5_vl_moe_text",
        {
            "rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
            "moe_intermediate_size": [48, 32],
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
        },
        {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 48},
        IDS,
        _ernie,
        _in_grids,
    ),
    "glm4v": Kind(
        "Glm4vConfig",
        "glm4v_text",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
        {**GLM, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 64},
        IDS,
        _glm,
        _in_grids,
    ),
}

BETWEEN = ("glm4v", "ernie4_5_vl_moe")  # their prompts have a token before and after each picture


def make_kind(folder: Path, name: str, is_tied: bool | None = None, **changes: Any) -> Path:
    """Writes all files of a model. `changes` apply to the text config, `is_tied` to the outer one."""
    kind = KINDS[name]
    text = {**COMMON, **kind.text, **changes, "model_type": kind.text_type}
    tied = {"tie_word_embeddings": text["tie_word_embeddings"] if is_tied is None else is_tied}
    config = getattr(transformers, kind.config_class)(text_config=text, vision_config=kind.tower, **kind.whole, **tied)
    placeholder = NAMES[FIRST] if name == "gemma3" else NAMES[PICTURE]
    if name in BETWEEN:
        placeholder = f"{NAMES[FIRST]}{placeholder}{NAMES[LAST]}"
    write_model(folder, config, NAMES, placeholder)
    kind.processor().save_pretrained(folder)
    if kind.files:
        (folder / "processor_config.json").write_text(json.dumps(dict(kind.files)))
    return folder


def asked(name: str, token_ids: list[list[int]], pictures: list[Any]) -> Shown:
    """Makes a prompt of tokenized texts with the pictures between them."""
    placeholder = [FIRST, PICTURE, LAST] if name in BETWEEN else [PICTURE]
    found = list(token_ids[0])
    for text in token_ids[1:]:
        found += [*placeholder, *text]
    return Shown(found, pictures)


def reference_inputs(name: str, prompt: Shown) -> Inputs:
    kind = KINDS[name]
    inputs: Inputs = {}
    token_ids = prompt.token_ids
    if prompt.pictures:
        inputs, tokens = kind.shown(kind.processor(), prompt.pictures)
        each = iter(tokens)
        token_ids = [id_ for token in token_ids for id_ in (next(each) if token == PICTURE else [token])]
    marks = torch.tensor([[int(token == PICTURE) for token in token_ids]])
    if name == "gemma3":
        inputs["token_type_ids"] = marks
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = marks
    if name == "ernie4_5_vl_moe":
        kinds = (PICTURE, FIRST, LAST)
        inputs["moe_mm_token_type_ids"] = torch.tensor([[int(token in kinds) for token in token_ids]])
    ids = torch.tensor([token_ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}


def reference_answer(folder: Path, name: str, prompt: Shown, max_tokens: int) -> list[int]:
    """Returns generate()'s tokens; transformers' own processor prepares the pictures."""
    inputs = reference_inputs(name, prompt)
    with torch.inference_mode():
        output = reference_of(folder).generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return until_end(output[0, inputs["input_ids"].shape[1] :].tolist(), {EOS_ID})
