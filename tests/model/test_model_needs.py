"""A model's needs, computed from config.json, equal figures by hand and those of the loaded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MixtralConfig, Qwen3NextConfig

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.errors import ModelError
from pd_cluster.model.language_model.cache_declaration import least_layouts
from pd_cluster.model.loading.model_loader import load_model
from pd_cluster.model.planning.model_needs import model_needs
from pd_cluster.settings.engine_config import SHIPPED_MODEL

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "max_position_embeddings": 131_072,
}
EXPERT = 3 * 4096 * 14_336  # weights of one expert of Mixtral


def folder_of(config: Any, folder: Path, **more: Any) -> str:
    """Writes config.json alone."""
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **more}))
    return str(folder)


def test_llama_70b_by_hand(tmp_path: Path) -> None:
    needs = model_needs(folder_of(LlamaConfig(**LLAMA_70B), tmp_path))
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192
    weights = 80 * layer + 2 * 128_256 * 8192 + 8192
    assert weights == 70_553_706_496
    assert needs.weights_nbytes == 2 * weights
    assert needs.read_nbytes == 2 * (weights - 128_256 * 8192)  # embeddings are looked up
    assert needs.token_flops == 2 * (weights - 128_256 * 8192)
    assert [each.token_nbytes for each in needs.layouts] == [80 * 2 * 8 * 128 * 2]
    assert needs.pair_flops == 80 * 64 * 2 * 2 * 128
    assert (needs.max_model_len, needs.widest, needs.dtype) == (131_072, 28_672, "bfloat16")
    assert needs.why_not_split(8) == ""
    assert needs.why_not_split(3) == "64 attention heads cannot be divided among 3 ranks"


def test_experts_are_read_by_a_step_and_skipped_by_a_token(tmp_path: Path) -> None:
    needs = model_needs(folder_of(MixtralConfig(dtype="bfloat16"), tmp_path))
    assert needs.read_nbytes // 2 - needs.num_active_weights == 32 * 6 * EXPERT  # a token uses two of eight experts


def test_states_are_counted_apart(tmp_path: Path) -> None:
    needs = model_needs(folder_of(Qwen3NextConfig(dtype="bfloat16", num_hidden_layers=8), tmp_path))
    keys, states = needs.layouts
    assert keys.token_nbytes == 2 * 2 * 2 * 256 * 2  # a quarter of 8 layers, 2 heads of 256
    assert states.holds.is_state
    assert states.block_nbytes > 2**20


def test_the_same_as_of_the_loaded_model() -> None:
    needs = model_needs(str(SHIPPED_MODEL))
    loaded = load_model(Checkpoint.open(str(SHIPPED_MODEL)), "bfloat16", CPU)
    assert needs.layouts == least_layouts(loaded.caches, 1, "bfloat16")


def test_a_folder_that_tells_no_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="only the files show the size of quantized weights"):
        model_needs(folder_of(LlamaConfig(**LLAMA_70B), tmp_path, quantization_config={"quant_method": "fp8"}))
    with pytest.raises(ModelError, match=r"config.json: model_type 'xyz': without weights, only the types in"):
        model_needs(folder_of(LlamaConfig(**LLAMA_70B), tmp_path, model_type="xyz"))
