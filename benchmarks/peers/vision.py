"""Makes a Qwen2-VL of random weights: `python -m benchmarks.peers.vision FOLDER LIKE [quick]`.

It gets the tokenizer and the chat template of the folder LIKE.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.pictures import SIDE
from pd_cluster.checkpoints.json_files import read_json

TEXT = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
    "initializer_range": 0.05,
}
TOWER = {"depth": 8, "embed_dim": 384, "num_heads": 6, "mlp_ratio": 4, "hidden_size": 256, "patch_size": 14}
IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def make(folder: Path, like: Path, is_tiny: bool) -> None:
    own = read_json(like / "config.json")
    text = {**TEXT, "vocab_size": own["text_config"]["vocab_size"], "eos_token_id": None, "pad_token_id": 0}
    tower = {**TOWER, "depth": 1} if is_tiny else TOWER
    ids = {name: own[name] for name in IDS}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    transformers.Qwen2VLForConditionalGeneration(config).float().save_pretrained(folder)
    area = (SIDE // 28 * 28) ** 2
    Qwen2VLImageProcessorPil(size={"shortest_edge": area // 4, "longest_edge": area}).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(like / name, folder / name)


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]), "quick" in sys.argv[3:])
