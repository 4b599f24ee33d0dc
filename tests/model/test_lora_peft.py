"""Adapters that PEFT itself writes say what PEFT's merged model says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pd_cluster.errors import ModelError
from pd_cluster.types import Order, Request, Sampling
from tests.support.adapters import digest_of, linear_modules, loaded
from tests.support.engines import make_core, random_prompt, run

peft: Any = pytest.importorskip("peft", reason="the test extra has it")
Checkpoints = Callable[..., Path]
GREEDY = Sampling(max_tokens=12, temperature=0.0)


def written(folder: Path, base: Path, **config: Any) -> Any:
    """Writes an adapter with random A and B; returns PEFT's model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config.setdefault("target_modules", sorted({name.rpartition(".")[2] for name in linear_modules(model)}))
    model = peft.get_peft_model(
        model, peft.LoraConfig(**{"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM", **config})
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.15)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {r"layers.\d+.mlp.up_proj": 2}}),
        ("llama", {"layers_to_transform": [1], "bias": "none"}),
        ("gpt2", {"fan_in_fan_out": True, "rank_pattern": {"h.0.attn.c_attn": 3}}),
        ("phi3", {"init_lora_weights": "gaussian"}),
        ("ernie4_5", {"target_modules": "all-linear"}),
        ("gpt_oss", {}),
    ],
)
def test_tokens_are_those_of_its_merged_model(
    checkpoint: Checkpoints, architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = checkpoint(architecture)
    model = written(tmp_path / "a", folder, **config)
    core = make_core(folder, adapters=loaded(tmp_path / "a"), max_num_batched_tokens=40, num_blocks=64)
    variant = digest_of(tmp_path / "a")
    prompts = [random_prompt(random.Random(1), n) for n in (1, 17, 41)]
    requests = [Request(f"r{i}", Order(prompt, GREEDY, variant=variant)) for i, prompt in enumerate(prompts)]
    run(core, requests)
    whole = model.merge_and_unload().eval()
    for request in requests:
        ids = torch.tensor([request.prompt_token_ids])
        expected = whole.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert request.output_token_ids == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias"),
    ],
)
def test_what_else_it_writes_is_refused(
    checkpoint: Checkpoints, config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    written(tmp_path / "a", folder, **config)
    with pytest.raises(ModelError, match=why):
        make_core(folder, adapters=loaded(tmp_path / "a"), num_blocks=32)
