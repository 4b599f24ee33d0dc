"""InternLM and InternLM2, which transformers has only as remote code: a Llama's answers from their files' layout."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.offline.lmdeploy.messages import GenerationConfig
from pd_cluster.offline.lmdeploy.pipeline import pipeline
from tests.model.test_rope_lengths import assert_by_length, greedy, requests_of
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, assert_same, generate, make_core, random_prompt, run

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 8
SIZES: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
TRAINED = 48


def packed(weights: dict[str, torch.Tensor], prefix: str, kind: str) -> torch.Tensor:
    """InternLM2's `wqkv`: KV head after KV head, its queries before its key and its value."""
    query, key, value = (weights[f"{prefix}.self_attn.{each}_proj.{kind}"] for each in "qkv")
    share = HEADS // KV_HEADS * HEAD_DIM
    rows = []
    for at in range(KV_HEADS):
        own = slice(at * HEAD_DIM, (at + 1) * HEAD_DIM)
        rows += [query[at * share : (at + 1) * share], key[own], value[own]]
    return torch.cat(rows)


def as_internlm2(llama: Path, to: Path, **config: Any) -> Path:
    """The same model in the files of an InternLM2."""
    weights, found = load_file(llama / "model.safetensors"), {}
    names = {"o_proj": "attention.wo", "gate_proj": "feed_forward.w1", "up_proj": "feed_forward.w3"}
    names |= {"down_proj": "feed_forward.w2", "input_layernorm": "attention_norm"}
    names |= {"post_attention_layernorm": "ffn_norm"}
    outer = {"model.embed_tokens.weight": "model.tok_embeddings.weight", "lm_head.weight": "output.weight"}
    for name, weight in weights.items():
        parts = name.split(".")
        if name in outer or "layers" not in parts:
            found[outer.get(name, name)] = weight
        elif parts[-2] in names:
            found[".".join([*parts[:3], names[parts[-2]], parts[-1]])] = weight
        elif parts[-2] == "q_proj":
            found[".".join([*parts[:3], "attention.wqkv", parts[-1]])] = packed(weights, ".".join(parts[:3]), parts[-1])
    return written(llama, to, found, model_type="internlm2", bias=False, **config)


def as_internlm(llama: Path, to: Path, **config: Any) -> Path:
    """Writes InternLM's files, which have Llama's names, and unused tables of frequencies."""
    weights = load_file(llama / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(HEAD_DIM // 2)
    return written(llama, to, weights, model_type="internlm", bias=True, num_key_value_heads=None, **config)


def written(llama: Path, to: Path, weights: dict[str, torch.Tensor], **config: Any) -> Path:
    to.mkdir()
    for file in llama.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    save_file({name: weight.contiguous() for name, weight in weights.items()}, to / "model.safetensors")
    own = json.loads((llama / "config.json").read_bytes())
    dropped = ("attention_bias", "mlp_bias", "rope_parameters", "rope_theta", "head_dim")
    kept = {name: value for name, value in own.items() if name not in dropped}
    kept["auto_map"] = {"AutoModelForCausalLM": f"modeling_{config['model_type']}.InternLMForCausalLM"}
    kept["architectures"] = ["InternLMForCausalLM"]
    kept |= config
    (to / "config.json").write_text(json.dumps({name: value for name, value in kept.items() if value is not None}))
    return to


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama2"), "llama", **SIZES)


@pytest.fixture(scope="module")
def internlm2(llama2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_internlm2(llama2, tmp_path_factory.mktemp("internlm2") / "model", rope_theta=10000.0)


def test_internlm2_answers_as_its_llama(llama2: Path, internlm2: Path) -> None:
    rng = random.Random(1)
    prompts = [random_prompt(rng, length) for length in (1, 17, 40)]
    outputs = generate(make_core(internlm2, num_blocks=64), prompts, greedy(12))
    assert_all_same(llama2, prompts, outputs, 12)


def test_internlm_answers_as_its_llama(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_key_value_heads": HEADS}
    llama = make_checkpoint(tmp_path / "llama", "llama", attention_bias=True, **sizes)
    internlm = as_internlm(llama, tmp_path / "internlm", rotary={"base": 10000, "type": "origin"})
    prompts = [random_prompt(random.Random(2), length) for length in (1, 17, 40)]
    assert_all_same(llama, prompts, generate(make_core(internlm, num_blocks=64), prompts, greedy(12)), 12)


def test_dynamic_positions_of_both(tmp_path: Path) -> None:
    """InternLM says so in `rotary`, InternLM2 in `rope_scaling`; both follow the length of a request."""
    for kind, factor in (("internlm", 1.0), ("internlm2", 2.0)):
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": factor}
        sizes = {**SIZES, "num_key_value_heads": HEADS if kind == "internlm" else KV_HEADS}
        llama = make_checkpoint(
            tmp_path / f"{kind} llama",
            "llama",
            rope_parameters=rope,
            attention_bias=kind == "internlm",
            max_position_embeddings=TRAINED,
            **sizes,
        )
        if kind == "internlm":
            folder = as_internlm(llama, tmp_path / kind, rotary={"base": 10000, "type": "dynamic"})
        else:
            scaling = {"type": "dynamic", "factor": factor}
            folder = as_internlm2(llama, tmp_path / kind, rope_theta=10000.0, rope_scaling=scaling)
        core = make_core(folder, num_blocks=256, max_model_len=160)
        requests = requests_of([(10, 12), (40, 80), (100, 20)])
        run(core, requests)
        for request in requests:
            assert_by_length(llama, request.prompt_token_ids, request.output_token_ids, request.sampling.max_tokens)


@pytest.mark.slow
def test_an_internlm2_in_a_pipeline_of_two_ranks_each(llama2: Path, internlm2: Path) -> None:
    """It runs as in the documents' examples, across the split."""
    from pd_cluster import TurbomindEngineConfig

    with pipeline(str(internlm2), backend_config=TurbomindEngineConfig(tp=2, cache_block_seq_len=16)) as pipe:
        (response,) = pipe(["Hi, pls intro yourself"], GenerationConfig(max_new_tokens=10, ignore_eos=True))
        prompt = pipe.tokenizer.encode("<|user|>Hi, pls intro yourself<|assistant|>")
    assert_same(llama2, prompt, response.token_ids, 10)


def test_another_s_identity(llama2: Path, internlm2: Path) -> None:
    """Their files differ, so their caches are not exchanged, although both describe a Llama."""
    one, other = Checkpoint.open(str(llama2)), Checkpoint.open(str(internlm2))
    assert one.identity != other.identity
    assert other.model_type == "llama"
