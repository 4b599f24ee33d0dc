"""A Qwen2-VL of random weights in a folder, and transformers' generate() with pictures: the time of its first token.

`spec.gguf` is the folder whose tokenizer and chat template the model gets; `spec.quick` makes it tiny.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.pictures import SIDE, pixels_of
from benchmarks.spec import PeerResult, Spec, child_main
from pd_cluster.checkpoints.json_files import read_json

ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]}
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_parameters": ROPE,
    "initializer_range": 0.05,
}
TOWER = {"depth": 8, "embed_dim": 384, "num_heads": 6, "mlp_ratio": 4, "hidden_size": 256, "patch_size": 14}
IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def measure(spec: Spec) -> PeerResult:
    torch.set_num_threads(spec.num_threads)
    make(Path(spec.model), Path(spec.gguf), spec.quick)
    model = transformers.AutoModelForImageTextToText.from_pretrained(spec.model, dtype=torch.float32).eval()
    counts, figures = (1, 2) if spec.quick else (1, 8), {}
    for count in counts:
        first_token_s(model, spec.model, count, 0)
        taken = [first_token_s(model, spec.model, count, seed) for seed in range(1, 3 if spec.quick else 6)]
        figures[f"first_token_{count}_ms"] = 1e3 * min(taken)
    return PeerResult(version=f"transformers {transformers.__version__}, torch {torch.__version__}", figures=figures)


def make(folder: Path, like: Path, is_tiny: bool) -> None:
    """Writes a model's folder, with the tokenizer of another."""
    own = read_json(like / "config.json")
    text = {**TEXT, "vocab_size": own["text_config"]["vocab_size"], "eos_token_id": None, "pad_token_id": 0}
    tower = {**TOWER, "depth": 1} if is_tiny else TOWER
    ids = {name: own[name] for name in IDS}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    transformers.Qwen2VLForConditionalGeneration(config).float().save_pretrained(folder)
    processor().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(like / name, folder / name)


def processor() -> Any:
    area = (SIDE // 28 * 28) ** 2
    return Qwen2VLImageProcessorPil(size={"shortest_edge": area // 4, "longest_edge": area})


def first_token_s(model: Any, folder: str, count: int, seed: int) -> float:
    """Measures from decoded pictures to the first token."""
    pictures = [np.frombuffer(pixels_of(seed * 100 + at), np.uint8).reshape(SIDE, SIDE, 3) for at in range(count)]
    started_s = time.perf_counter()
    found = processor()(images=pictures, return_tensors="pt")
    grids, pad = found["image_grid_thw"], model.config.image_token_id
    ids = [5]
    for grid in grids.tolist():
        ids += [pad] * (grid[1] * grid[2] // 4) + [7, 8, 9]
    input_ids = torch.tensor([ids])
    with torch.inference_mode():
        model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            mm_token_type_ids=(input_ids == pad).int(),
            pixel_values=found["pixel_values"],
            image_grid_thw=grids,
            max_new_tokens=1,
            do_sample=False,
        )
    return time.perf_counter() - started_s


if __name__ == "__main__":
    child_main(measure)
