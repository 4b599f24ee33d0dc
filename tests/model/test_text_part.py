"""With --language-model-only, a multimodal folder's text model gives the whole model's tokens for texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pd_cluster import LLM, SamplingParams
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.errors import ConfigError, ModelError, RequestError
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Sampling
from tests.support.engines import generate, make_core, random_prompt
from tests.support.multimodal import NAMES, change_config, make_multimodal, reference_greedy, rewrite_weights
from tests.support.ranks import ranks

GREEDY = Sampling(max_tokens=20, temperature=0.0)
LENGTHS = (1, 16, 17, 41, 100)
TEXT_ONLY = {"language_model_only": True, "block_size": 16, "max_num_batched_tokens": 40, "num_blocks": 96}


def prompts() -> list[list[int]]:
    return [random_prompt(random.Random(1), length) for length in LENGTHS]


@pytest.mark.parametrize("name", NAMES)
def test_texts_as_the_whole_model_continues_them(tmp_path: Path, name: str) -> None:
    """Runs prompts in chunks, batched, then from the prefix cache."""
    folder = make_multimodal(tmp_path, name)
    expected = reference_greedy(folder, prompts(), 20)
    assert sum(len(set(output)) > 5 for output in expected) > 3, "the reference repeats itself"
    core = make_core(folder, **TEXT_ONLY)
    for _ in range(2):
        assert generate(core, prompts(), GREEDY) == expected


def test_what_is_not_of_the_text_model_is_never_read(tmp_path: Path) -> None:
    folder = make_multimodal(tmp_path, "gemma3")
    expected = reference_greedy(folder, prompts(), 20)
    file = folder / "model.safetensors"
    weights = load_file(file)
    text = {key: weight for key, weight in weights.items() if "language_model" in key}
    assert len(text) < len(weights)
    save_file(text, file, metadata={"format": "pt"})
    assert generate(make_core(folder, **TEXT_ONLY), prompts(), GREEDY) == expected
    with ranks(folder, 2, **TEXT_ONLY) as core:
        assert generate(core, prompts(), GREEDY) == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [("model.language_model.", "language_model.model."), ("model.language_model.", "language_model.")],
)
def test_other_names_of_the_same_weights(tmp_path: Path, old: str, new: str) -> None:
    """Covers transformers 4's names, and those of a model saved without its head."""
    folder = make_multimodal(tmp_path, "llava")
    expected = reference_greedy(folder, prompts(), 20)
    for written in ("model.language_model.", "language_model.model."):
        rewrite_weights(folder, written, "model.language_model.")
    rewrite_weights(folder, old, new)
    rewrite_weights(folder, "lm_head.", "language_model.lm_head.")
    assert generate(make_core(folder, **TEXT_ONLY), prompts(), GREEDY) == expected


def test_a_config_that_leaves_out_what_transformers_knows(tmp_path: Path) -> None:
    """google/gemma-3's text config lacks vocab_size, positions and heads, so defaults apply."""
    changes = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    folder = make_multimodal(tmp_path, "gemma3", hidden_size=64, num_hidden_layers=1, layer_types=None, **changes)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    for name in (*changes, "max_position_embeddings", "layer_types", "eos_token_id"):
        text.pop(name, None)
    change_config(folder, text_config=text)
    opened = Checkpoint.of(EngineConfig(model=str(folder), language_model_only=True))
    assert (opened.config["vocab_size"], opened.max_position_embeddings) == (262_208, 131_072)
    core = make_core(folder, **{**TEXT_ONLY, "max_model_len": 512})
    assert generate(core, prompts()[:1], GREEDY) == reference_greedy(folder, prompts()[:1], 20)


@pytest.mark.parametrize(
    ("name", "ties"), [("llava", (True, False)), ("gemma3", (False, True)), ("gemma3", (False, False))]
)
def test_tied_embeddings_wherever_they_are_told(tmp_path: Path, name: str, ties: tuple[bool, bool]) -> None:
    """`ties`: tie_word_embeddings in the whole config and in the text model's; each class of transformers reads one."""
    folder = make_multimodal(tmp_path, name, is_tied=ties[0], tie_word_embeddings=ties[1])
    assert generate(make_core(folder, **TEXT_ONLY), prompts(), GREEDY) == reference_greedy(folder, prompts(), 20)


def test_overrides_are_of_the_text_models_config(tmp_path: Path) -> None:
    folder = make_multimodal(tmp_path / "model", "llava")
    before = reference_greedy(folder, prompts(), 20)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    other = make_multimodal(tmp_path / "other", "llava")
    change_config(other, text_config={**text, "rope_parameters": {**text["rope_parameters"], "rope_theta": 77.0}})
    expected = reference_greedy(other, prompts(), 20)
    assert expected != before
    core = make_core(folder, **TEXT_ONLY, hf_overrides={"rope_theta": 77.0})
    assert generate(core, prompts(), GREEDY) == expected


def test_the_flag_is_named_and_another_identity(tmp_path: Path) -> None:
    folder = make_multimodal(tmp_path, "gemma3")
    change_config(folder, model_type="paligemma")  # its pictures are not supported
    with pytest.raises(ModelError, match=r"'paligemma' takes more than text.*; --language-model-only serves its"):
        make_core(folder)
    with pytest.raises(ModelError, match="; language_model_only serves its gemma3_text alone"):
        LLM(str(folder))
    change_config(folder, model_type="gemma3")
    part = Checkpoint.of(EngineConfig(model=str(folder), language_model_only=True))
    assert (part.model_type, part.part_of, part.is_unproven) == ("gemma3_text", "gemma3", False)
    change_config(folder, model_type="gemma3_text")  # the same files could be served as they are
    whole = Checkpoint.open(str(folder)).identity
    change_config(folder, model_type="gemma3")
    assert whole != Checkpoint.of(EngineConfig(model=str(folder), language_model_only=True)).identity


def test_offline_and_images(tmp_path: Path) -> None:
    folder = make_multimodal(tmp_path, "gemma3")
    with LLM(str(folder), language_model_only=True, num_blocks=96) as llm:
        params = SamplingParams(temperature=0, max_tokens=20)
        found = llm.generate(prompts(), params, use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in found] == reference_greedy(folder, prompts(), 20)
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(RequestError, match=r"content\[0\]: only parts of type 'text' are supported"):
            llm.chat([{"role": "user", "content": [image]}], params, use_tqdm=False)
    with pytest.raises(ConfigError, match="enable_mm: language_model_only serves no images; give only one of them"):
        LLM(str(folder), enable_mm=True, language_model_only=True)
    change_config(folder, model_type="mamba")
    with pytest.raises(ModelError, match=r"enable_mm: .*'mamba' takes no images here; those that do are qwen2_vl, "):
        LLM(str(folder), enable_mm=True)


def test_a_text_part_that_cannot_be_served(tmp_path: Path) -> None:
    folder = make_multimodal(tmp_path, "llava")
    change_config(folder, text_config={"model_type": "mamba", "state_size": 16})
    with pytest.raises(ModelError, match="text_config: model_type 'mamba' is not supported: it has layers of Mamba-1"):
        make_core(folder, **TEXT_ONLY)
