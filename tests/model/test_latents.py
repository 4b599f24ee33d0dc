"""Latent attention (MLA): transformers' modules over pools of latents give generate()'s tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.errors import ConfigError, LinkError, ModelError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values, latents
from pd_cluster.kv.pool_compatibility import check_pair
from pd_cluster.model.kernels.attention_backend import choose_attention
from pd_cluster.model.language_model.cache_declaration import LayerCache, caches_of, layout_of
from pd_cluster.types import Guide, Request, RequestSpec, Sampling
from tests.model.test_lora import check
from tests.model.test_prompt_adapters import taking
from tests.support.adapters import digest_of, loaded, make_adapter, merged
from tests.support.checkpoints import reference_greedy
from tests.support.engines import assert_all_same, generate, make_core, random_prompt, run
from tests.support.more_checkpoints import LATENTS
from tests.support.prompt_adapters import make_prompt_adapter

Checkpoints = Callable[..., Path]
GREEDY = Sampling(max_tokens=16, temperature=0.0)
LENGTHS = (1, 7, 33, 60)
# DeepSeek-V3's widths, with few of its 61 equal layers; its experts keep no cache.
V3: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 8,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "vocab_size": 16,
}


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, length) for length in LENGTHS]


@pytest.mark.parametrize("num_tokens", [1, 5, 17])
def test_prompts_in_chunks(checkpoint: Checkpoints, num_tokens: int) -> None:
    """Covers chunks that begin anywhere in a block, beside other sequences."""
    folder, prompts = checkpoint("deepseek_v3"), prompts_of(1)
    core = make_core(folder, block_size=4, max_num_batched_tokens=num_tokens, num_blocks=96)
    assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sequences_that_are_preempted(checkpoint: Checkpoints, mode: str) -> None:
    """Runs four sequences that grow to 13 blocks each, in a pool of 30."""
    folder, rng = checkpoint("deepseek_v3"), random.Random(2)
    prompts, sampling = [random_prompt(rng, 10) for _ in range(4)], Sampling(max_tokens=40, temperature=0.0)
    core = make_core(folder, block_size=4, num_blocks=30, preemption_mode=mode, swap_space_gib=0.01, max_model_len=64)
    outputs = generate(core, prompts, sampling)
    assert core.scheduler.num_preemptions
    assert_all_same(folder, prompts, outputs, sampling.max_tokens)


def test_a_pool_holds_latents_and_nothing_else(checkpoint: Checkpoints) -> None:
    layout = make_core(checkpoint("deepseek_v3"), num_blocks=32).runner.pool.layout  # type: ignore[attr-defined]
    planes = latents(LATENTS["kv_lora_rank"], LATENTS["qk_rope_head_dim"])
    assert (layout.num_kv_heads, layout.planes) == (1, planes)
    assert layout.token_nbytes == 3 * (48 + 16) * 4


def test_a_token_of_deepseek_v3() -> None:
    """A token takes 61 layers of 512 + 64 two-byte numbers; key and value heads would take 71 times as much."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **V3))
    caches = caches_of(model)
    assert layout_of(caches[:1] * 61, 64, "bfloat16").token_nbytes == 70_272


def test_what_does_not_fit_is_refused(checkpoint: Checkpoints) -> None:
    cache = LayerCache(1, latents(40, 8))
    with pytest.raises(ConfigError, match="--kv-cache-dtype int4: latents need at least 8 bits; use int8 or fp8"):
        layout_of((cache,), 16, "int4")
    layout = layout_of((cache,), 16, "bfloat16")
    with pytest.raises(ConfigError, match=r"--attention-backend flashinfer: latent attention .* use auto"):
        choose_attention("flashinfer", None, layout, Device("cuda", 0))
    with pytest.raises(ConfigError, match=r"--attention-backend triton: latent attention .* use auto, or sdpa"):
        choose_attention("triton", None, layout, Device("npu", 0))
    heads = KVLayout(1, 1, keys_and_values(40), 16, "bfloat16")
    with pytest.raises(LinkError, match="planes is k, v on the prefill instance and latent, rope on the decode"):
        check_pair(heads, layout)


def test_an_adapter_beside_latents(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint("deepseek_v3")
    adapter = make_adapter(tmp_path / "a", folder, 1, only=r"q_b_proj|kv_a_proj|o_proj")
    core = make_core(folder, adapters=loaded(adapter), max_num_batched_tokens=24, num_blocks=64)
    check(core, {"": folder, digest_of(adapter): merged(folder, adapter, tmp_path / "m")}, prompts_of(3), GREEDY)
    made_anew = make_adapter(tmp_path / "b", folder, 1, only="kv_b_proj")
    with pytest.raises(ModelError, match=r"kv_b_proj.*: this model has no linear layer of this name"):
        make_core(folder, adapters=loaded(made_anew), num_blocks=64)


def test_prefix_tuning_needs_keys_and_values(checkpoint: Checkpoints, tmp_path: Path) -> None:
    adapter = make_prompt_adapter(tmp_path / "a", checkpoint("llama"), "prefix")
    with pytest.raises(ModelError, match="this model's cache has no plain keys and values, which prefix tuning needs"):
        make_core(checkpoint("deepseek_v3"), adapters=taking(adapter), num_blocks=64)


def rewritten(folder: Path, to: Path, config: dict[str, Any], weights: dict[str, torch.Tensor] | None = None) -> Path:
    """Copies a folder with another config and, if given, other weights."""
    for file in folder.iterdir():
        if file.name != "config.json" and (weights is None or file.name != "model.safetensors"):
            (to / file.name).symlink_to(file)
    (to / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("is_part", [False, True], ids=["K2", "the text model of K2.5"])
def test_kimi_k2_is_a_deepseek_v3(checkpoint: Checkpoints, tmp_path: Path, is_part: bool) -> None:
    """Kimi K2's folders name a type that transformers lacks, and code, which is not run."""
    folder = checkpoint("deepseek_v3")
    own = {
        **json.loads((folder / "config.json").read_text()),
        "model_type": "kimi_k2",
        "auto_map": {"AutoModel": "a.b"},
    }
    if is_part:
        weights = load_file(folder / "model.safetensors")
        whole = {"model_type": "kimi_k25", "text_config": own, "vision_config": {"model_type": "kimi_k25_vision"}}
        rewritten(folder, tmp_path, whole, {f"language_model.{key}": value for key, value in weights.items()})
    else:
        rewritten(folder, tmp_path, own)
    prompt = random_prompt(random.Random(4), 40)
    core = make_core(tmp_path, num_blocks=32, language_model_only=is_part)
    (output,) = generate(core, [prompt], GREEDY)
    assert output == reference_greedy(folder, prompt, GREEDY.max_tokens)


def test_several_sequences_and_guides_beside_others(checkpoint: Checkpoints) -> None:
    """Three sampled sequences of one prompt, and a guided answer, equal their results alone."""
    folder, prompts = checkpoint("deepseek_v3"), prompts_of(6)
    drawn = Sampling(n=3, max_tokens=16, temperature=1.0, seed=5, ignore_eos=True)
    schema = '{"type": "object", "properties": {"a": {"enum": ["forced"]}}, "required": ["a"]}'
    guided = Sampling(max_tokens=40, temperature=0.0, guide=Guide("json", schema))
    orders = [RequestSpec(prompts[2], drawn), RequestSpec(prompts[1], guided), RequestSpec(prompts[3], GREEDY)]

    def answered(*chosen: RequestSpec) -> list[dict[int, list[int]]]:
        core = make_core(folder, num_blocks=64, max_num_batched_tokens=32)
        found = run(core, [Request(f"{at}", order, arrival_s=float(at)) for at, order in enumerate(chosen)])
        return [
            {at: [token.token_id for token in each] for at, each in by_index.items()} for by_index in found.values()
        ]

    among = answered(*orders)
    assert among == [answered(order)[0] for order in orders]
    assert len({tuple(each) for each in among[0].values()}) == 3
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).decode(among[1][0]).startswith("{")
    assert_all_same(folder, [prompts[3]], [among[2][0]], GREEDY.max_tokens)


def test_a_folder_with_a_tokenizer_of_another_form(checkpoint: Checkpoints, tmp_path: Path) -> None:
    for file in checkpoint("deepseek_v3").iterdir():
        name = "tiktoken.model" if file.name == "tokenizer.json" else file.name
        (tmp_path / name).symlink_to(file)
    with pytest.raises(ModelError, match=r"tiktoken\.model: .* there is no tokenizer\.json .*, or give --tokenizer"):
        Checkpoint.open(str(tmp_path))


def test_layers_that_predict_further_tokens_are_left_out(
    checkpoint: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MTP layers, stored after the last layer under layers' names, are ignored; using one would change tokens."""
    folder = checkpoint("deepseek_v3")
    config = {**json.loads((folder / "config.json").read_text()), "num_nextn_predict_layers": 1}
    weights = load_file(folder / "model.safetensors")
    further = {key.replace("layers.2.", "layers.3."): value.clone() for key, value in weights.items() if "rs.2." in key}
    further["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
    rewritten(folder, tmp_path, config, {**weights, **further})
    prompt = random_prompt(random.Random(5), 40)
    with caplog.at_level("INFO"):
        (output,) = generate(make_core(tmp_path, num_blocks=32), [prompt], GREEDY)
    assert output == reference_greedy(folder, prompt, GREEDY.max_tokens)
    assert f"{len(further)} tensors of layers after the last one are ignored" in caplog.text
