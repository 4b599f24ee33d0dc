"""Tiny checkpoints of models that take pictures, pictures for them, and transformers' answers."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image as Pictures
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.media.image_files import fitted
from pd_cluster.media.image_rules import PromptWithImages, place
from pd_cluster.types import RequestSpec, Sampling
from tests.support.checkpoints import COMMON, EOS_ID, ROPE, make_checkpoint, make_tokenizer, shake, until_end

PATCH = 4
PAD = "<|image_pad|>"
PLACEHOLDER = f"<|vision_start|>{PAD}<|vision_end|>"
SPECIALS = {300: PAD, 301: "<|video_pad|>", 302: "<|vision_start|>", 303: "<|vision_end|>"}
IDS = {"image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}PLACEHOLDER{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SECTIONS = {**ROPE, "mrope_section": [2, 3, 3]}
INTERLEAVED = {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
TOWER = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "temporal_patch_size": 2, "spatial_merge_size": 2}
WINDOWED = {**TOWER, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 16}
DEEP = {**TOWER, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# model_type -> config class, the text config's differences from COMMON, and the vision tower's config
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VLConfig",
        {"rope_parameters": SECTIONS},
        {**TOWER, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64},
    ),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", {"rope_parameters": SECTIONS}, {**WINDOWED, "fullatt_block_indexes": [1]}),
    "qwen3_vl": ("Qwen3VLConfig", {"rope_parameters": INTERLEAVED}, {**DEEP, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {"rope_parameters": INTERLEAVED, **EXPERTS},
        {**DEEP, "deepstack_visual_indexes": [0, 1]},
    ),
}
SIZES = {"shortest_edge": 4 * (2 * PATCH) ** 2, "longest_edge": 16 * (2 * PATCH) ** 2}  # 4 to 16 tokens


def make_vision(folder: Path, name: str, tower: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Writes all files of a model. `changes` apply to the text config, `tower` to the vision tower's."""
    config_class, own, vision = MODELS[name]
    text = {**COMMON, **own, **changes}
    kind = getattr(transformers, config_class)
    config = kind(text_config=text, vision_config={**vision, **(tower or {})}, tie_word_embeddings=False, **IDS)
    write_model(folder, config, SPECIALS, PLACEHOLDER)
    processor().save_pretrained(folder)
    return folder


def write_model(folder: Path, config: Any, specials: Mapping[int, str], placeholder: str) -> None:
    """Writes random weights, a tokenizer with these control tokens, and a chat template."""
    make_checkpoint(folder)  # for its generation_config.json
    (folder / "model.safetensors").unlink()
    torch.manual_seed(1)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    shake(model)
    with torch.no_grad():  # scaled so that a picture influences tokens as much as words do
        for path, weight in model.model.named_parameters():
            if "language_model" not in path and weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) / weight[0].numel() ** 0.5)
    model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    state = json.loads(file.read_text())
    for token in state["added_tokens"]:
        if token["id"] in specials:
            token.update(content=specials[token["id"]], special=True)
    file.write_text(json.dumps(state))
    marks = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    template = TEMPLATE.replace("PLACEHOLDER", placeholder)
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=template, **marks).save_pretrained(
        folder
    )


@cache
def shared_folder(make: Callable[..., Path], name: str) -> Path:
    """Returns a model's folder, made once for all tests of this process, which must not change it."""
    return make(Path(_folders.name) / f"{make.__name__}-{name}", name)


_folders = tempfile.TemporaryDirectory(prefix="pd-cluster-models-")


def order_of(placed: PromptWithImages, sampling: Sampling) -> RequestSpec:
    more: dict[str, Any] = {"spans": placed.spans, "images": placed.images, "rope_positions": placed.rope_positions}
    return RequestSpec(placed.token_ids, sampling, **more)


def processor() -> Any:
    return Qwen2VLImageProcessorPil(patch_size=PATCH, size=SIZES)


def picture(seed: int, width: int = 24, height: int = 16) -> Pictures.Image:
    """Returns a picture of noise in a color that depends on the seed."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (height, width, 3)) // 2 + rng.integers(0, 128, 3)
    return Pictures.fromarray(noise.astype(np.uint8))


def file_of(image: Pictures.Image, kind: str = "PNG", **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """Returns a PNG whose header announces this size, without the pixel data."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def data_url(image: Pictures.Image | bytes) -> str:
    data = image if isinstance(image, bytes) else file_of(image)
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def ids_of(*texts: str) -> list[int]:
    """Returns the tokens of texts joined by placeholders."""
    encode = make_tokenizer().encode
    found = list(encode(texts[0]).ids)
    for text in texts[1:]:
        found += [302, 300, 303, *encode(text).ids]
    return found


class Shown(NamedTuple):
    """A prompt with one placeholder for each of its pictures."""

    token_ids: list[int]
    pictures: list[Pictures.Image]

    def placed(self, folder: Path) -> PromptWithImages:
        vision = Checkpoint.open(str(folder)).vision
        assert vision is not None
        images = [fitted(each, vision.rules) for each in self.pictures]
        return place(self.token_ids, images, vision.rules, "prompt")

    def order(self, folder: Path, sampling: Sampling) -> RequestSpec:
        return order_of(self.placed(folder), sampling)


def shown(seed: int, num_texts: list[int], pictures: list[Pictures.Image]) -> Shown:
    """Makes a prompt of random texts of these lengths with the pictures between them."""
    rng = random.Random(seed)
    texts = [[rng.randrange(256) for _ in range(length)] for length in num_texts]
    token_ids = list(texts[0])
    for text in texts[1:]:
        token_ids += [302, 300, 303, *text]
    return Shown(token_ids, pictures)


@cache
def reference_of(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def reference_answer(folder: Path, prompt: Shown, max_tokens: int, **settings: Any) -> list[int]:
    """Returns generate()'s tokens; transformers' own processor prepares the pictures."""
    inputs = _inputs(prompt)
    num_prompt = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        output = reference_of(folder).generate(**inputs, max_new_tokens=max_tokens, do_sample=False, **settings)
    return until_end(output[0, num_prompt:].tolist(), {EOS_ID})


def prompt_logits(folder: Path, prompt: Shown) -> torch.Tensor:
    """Returns transformers' logits for a whole prompt, [num_tokens, vocab_size]."""
    with torch.inference_mode():
        found: torch.Tensor = reference_of(folder)(**_inputs(prompt)).logits[0]
    return found


def _inputs(prompt: Shown) -> dict[str, Any]:
    inputs: dict[str, Any] = {}
    token_ids = prompt.token_ids
    if prompt.pictures:
        found = processor()(images=prompt.pictures, return_tensors="pt")
        grids = found["image_grid_thw"]
        counts = iter((grids.prod(-1) // 4).tolist())
        token_ids = [each for token in token_ids for each in ([token] * next(counts) if token == 300 else [token])]
        inputs = {"pixel_values": found["pixel_values"], "image_grid_thw": grids}
        inputs["mm_token_type_ids"] = torch.tensor([[int(each == 300) for each in token_ids]])
    ids = torch.tensor([token_ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}
