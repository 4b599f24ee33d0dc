"""The reasons for refusing an unlisted model type, from config.json only, with and without --try-unlisted."""

from __future__ import annotations

import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.checkpoints import architectures
from pd_cluster.checkpoints.architectures import defaults_of, text_part, thresholds
from pd_cluster.checkpoints.checkpoint import SUPPORTED_MODEL_TYPES, Checkpoint
from pd_cluster.errors import ModelError
from pd_cluster.settings.engine_config import EngineConfig
from tests.unit.test_checkpoint import make_folder

# As on the Hub, without irrelevant fields.
STATE = "keeps a state besides keys and values"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lfm3", "conv_L_cache": 3}, f"{STATE} (conv_L_cache)"),
    ({"model_type": "rwkv"}, f"{STATE} (its class is stateful)"),
    ({"model_type": "lfm3", "layer_types": ["linear_attention"]}, f"{STATE} (layer_types has linear_attention)"),
    *(({"model_type": name}, "has layers of Mamba-1, whose") for name in ("mamba", "falcon_mamba", "jamba", "zamba")),
    ({"model_type": "mamba2"}, "keeps states and no keys and values; take a hybrid of it"),
    ({"model_type": "zamba2"}, "shares one attention between layers, in a cache of its own; take"),
    ({"model_type": "deepseek_v4"}, "keeps windows of compressed tokens, in caches of its own; take deepseek_v32"),
    ({"model_type": "glm5_next", "vision_config": {"x": 1}}, "has states, and chooses keys by pooled keys"),
    (
        {"model_type": "minimax_m3_vl", "vision_config": {"x": 1}},
        "chooses blocks of keys for each group of heads; take",
    ),
    (
        {"model_type": "mistral4", "kv_lora_rank": 256},
        "scales the queries of latent attention by their positions; take",
    ),
    ({"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder model (is_encoder_decoder)"),
    ({"model_type": "bart"}, "is an encoder-decoder model"),
    ({"model_type": "bert", "position_embedding_type": "absolute"}, "is an encoder: its tokens see later ones"),
    ({"model_type": "vit"}, "is not a language model: transformers has no causal model of this type"),
    ({"model_type": "llama4", "vision_config": {"x": 1}}, "takes more than text (vision_config)"),
    ({"model_type": "blip-2"}, "takes more than text (images)"),
    ({"model_type": "llama4_text", "layer_types": ["chunked_attention"]}, "attends within chunks (layer_types has "),
    ({"model_type": "llama4_text", "attention_chunk_size": 8192}, "attends within chunks (attention_chunk_size)"),
    ({"model_type": "axk2", "kv_lora_rank": 512}, "has latent attention (kv_lora_rank)"),
    ({"model_type": "hy_v4", "index_topk": 2048}, "attends to tokens that it chooses (index_topk)"),
    (
        {"model_type": "mpt", "attn_config": {"alibi": True}},
        "adds a bias by distance to its scores (attn_config.",
    ),
    (
        {"model_type": "helium", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        "has positions of several dimensions (rope_scaling.mrope_section, mrope)",
    ),
    ({"model_type": "helium", "add_cross_attention": True}, "has cross attention (add_cross_attention)"),
    ({"model_type": "helium", "attention_sort": "by_age"}, "has attention_sort 'by_age', which is not known to leave"),
    ({"model_type": "kimi_own", "auto_map": {"AutoConfig": "a.Own"}}, "is computed by code in its folder (auto_map)"),
    ({"model_type": None}, "is not known to the transformers that is installed"),
]


def opened(folder: Path, **choice: Any) -> Checkpoint:
    return Checkpoint.of(EngineConfig(model=str(folder), **choice))


def fault(folder: Path, config: dict[str, Any], **choice: Any) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        opened(folder, **choice)
    return str(caught.value)


@pytest.mark.parametrize(("config", "reason"), REFUSED)
def test_the_true_reason(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    place = f"{tmp_path / 'config.json'}: model_type {config['model_type']!r} is not supported: it {reason}"
    assert fault(tmp_path, config).startswith(place)
    tried = fault(tmp_path, config, try_unlisted=(config["model_type"],))
    assert tried.startswith(f"--try-unlisted {config['model_type']}: {place}")


def test_one_that_may_be_tried_and_its_defaults(tmp_path: Path) -> None:
    """`auto_map` is ignored if transformers itself has the type."""
    folder = make_folder(tmp_path / "model", model_type="helium", auto_map={"AutoConfig": "own.Config"})
    config = json.loads((folder / "config.json").read_text())
    for choice in ({}, {"try_unlisted": ("nemotron",)}):
        message = fault(folder, config, **choice)
        assert "it is not listed, and no test compares it with transformers; --try-unlisted helium serves it" in message
        assert message.endswith(f"; docs/models.md lists all {len(SUPPORTED_MODEL_TYPES)}")
    assert opened(folder, try_unlisted=("nemotron", "helium")).is_unproven
    assert not opened(make_folder(folder), try_unlisted=("llama",)).is_unproven
    # uses transformers' defaults; a type without a default length needs one in config.json
    folder = make_folder(tmp_path / "model", {"model_type": "helium", "vocab_size": 7})
    found = opened(folder, try_unlisted=("helium",))
    assert (found.max_position_embeddings, found.config["vocab_size"]) == (4096, 7)
    assert "has no max_position_embeddings or n_positions" in fault(
        folder, {"model_type": "bloom"}, try_unlisted=("bloom",)
    )


def test_without_transformers_the_worker_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget() -> None:
        for cached in (architectures.table_of, architectures.statements_of):
            cached.cache_clear()

    monkeypatch.setattr(architectures, "_folder", lambda: None)
    forget()
    try:
        folder = make_folder(tmp_path / "model", model_type="nobody_knows")
        assert opened(folder, try_unlisted=("nobody_knows",)).is_unproven
        assert "keeps a state" in fault(folder, {"model_type": "lfm9", "state_size": 4}, try_unlisted=("lfm9",))
    finally:
        forget()


def test_lengths_of_a_config() -> None:
    config = {"sliding_window": 512, "max_window_layers": 28, "sliding_window_pattern": 6, "use_sliding_window": True}
    config |= {"chunk_size_feed_forward": 0, "local_attention": 512, "max_position_embeddings": 4096}
    config |= {"rope_parameters": {"sliding_attention": {"original_max_position_embeddings": 64}}}  # type: ignore[dict-item]
    found = {64: "rope_parameters.sliding_attention.original_max_position_embeddings", 512: "sliding_window"}
    assert thresholds(config) == found
    assert list(thresholds(config)) == [64, 512]


def test_the_text_part() -> None:
    whole = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": {"model_type": "gemma3_text"}}
    text = text_part(whole)
    assert text is not None
    assert (text["model_type"], text["eos_token_id"]) == ("gemma3_text", [1, 106])
    assert text["max_position_embeddings"] == 131072
    flat = text_part({"model_type": "qwen2_5_vl", "vocab_size": 9, "vision_config": {"depth": 1}})
    assert flat is not None
    assert (flat["model_type"], flat["vocab_size"], flat["vision_config"]) == ("qwen2", 9, None)
    for other in ({"model_type": "llama"}, {"text_config": {}}, {"text_config": "gemma3_text"}):
        assert text_part(other) is None
    assert defaults_of("nobody_knows") == {}


def test_a_multimodal_model_without_a_listed_text_part(tmp_path: Path) -> None:
    whole = {"model_type": "mllama", "vision_config": {"x": 1}, "text_config": {"model_type": "mllama_text_model"}}
    assert "'mllama' is not supported: it takes more than text (vision_config)" in fault(tmp_path, whole)
    assert "text_config: model_type 'mllama_text_model' is not supported: it" in fault(
        tmp_path, whole, language_model_only=True
    )


def test_threads_may_read_architectures_together() -> None:
    """CPython 3.11's ast counts recursion depth over all threads together, and fails when threads alternate."""
    depths = (0, 7, 14, 21)
    gate = threading.Barrier(len(depths))

    def read(depth: int) -> dict[str, Any]:
        if depth:
            return read(depth - 1)
        gate.wait(10)
        return defaults_of("gemma3_text")

    def let_others_run(*_: object) -> None:
        time.sleep(1e-5)

    expected, threshold = defaults_of("gemma3_text"), gc.get_threshold()
    assert expected
    gc.callbacks.append(let_others_run)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(len(depths)) as threads:
            assert list(threads.map(read, depths)) == [expected] * len(depths)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(let_others_run)
