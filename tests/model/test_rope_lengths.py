"""Positions beyond a model's training length: rope depends on the length that each request may reach.

The reference is transformers' forward pass over a sequence of exactly that length.
"""

from __future__ import annotations

import json
import math
import random
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.errors import ModelError
from pd_cluster.extras.lmdeploy.generation_config import GenerationConfig
from pd_cluster.extras.lmdeploy.pipeline import pipeline
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, assert_same, generate, make_core, random_prompt, run

TRAINED = 48
MAX_LEN = 160
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}
LONG |= {"original_max_position_embeddings": TRAINED, "partial_rotary_factor": 1.0}
# (length of the prompt, tokens of the answer): short, at the edge, just beyond, far beyond, a long prompt
SHAPES = [(10, 12), (36, 12), (37, 12), (40, 80), (100, 20), (10, 100)]


@pytest.fixture(scope="module", params=["dynamic", "longrope", "plain modules"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model with dynamic NTK in fused layers or in transformers' modules, or with longrope (Phi-3)."""
    place = tmp_path_factory.mktemp("rope")
    if request.param == "dynamic":
        return make_checkpoint(place, "llama", rope_parameters=DYNAMIC, max_position_embeddings=TRAINED)
    if request.param == "plain modules":
        return make_checkpoint(place, "olmo2", rope_parameters=DYNAMIC, max_position_embeddings=TRAINED)
    return make_checkpoint(
        place,
        "phi3",
        rope_parameters=LONG,
        original_max_position_embeddings=TRAINED,
        max_position_embeddings=MAX_LEN,
    )


ONE_AT_A_TIME = threading.Lock()  # the reference model caches the angles of its longest pass


@cache
def reference_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def whole_pass(model: Any, token_ids: list[int], length: int) -> torch.Tensor:
    """Returns logits [num_tokens, vocab_size] of these tokens within a sequence of `length`."""
    with ONE_AT_A_TIME, torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long))  # a short pass resets dynamic NTK
        padded = token_ids + [0] * (length - len(token_ids))
        logits: torch.Tensor = model(input_ids=torch.tensor([padded]), use_cache=False).logits[0, : len(token_ids)]
    return logits


def assert_by_length(folder: Path, prompt: list[int], output: list[int], max_tokens: int) -> None:
    """Asserts the reference's greedy tokens, except where its two best logits are within 1e-4."""
    assert output
    logits = whole_pass(reference_model(folder), prompt + output, len(prompt) + max_tokens)[len(prompt) - 1 : -1]
    best = logits.topk(2).values
    for at, token_id in enumerate(output):
        if token_id != int(logits[at].argmax()):
            assert float(best[at, 0] - best[at, 1]) < 1e-4, (len(prompt), max_tokens, at)
            return


def requests_of(shapes: list[tuple[int, int]]) -> list[Request]:
    rng = random.Random(5)
    return [
        Request(f"r{at}", RequestSpec(random_prompt(rng, length), greedy(max_tokens)), arrival_s=float(at))
        for at, (length, max_tokens) in enumerate(shapes)
    ]


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("num_blocks", [256, 21], ids=["room for all", "constant preemption"])
def test_requests_of_all_lengths_together(folder: Path, num_blocks: int) -> None:
    core = make_core(folder, block_size=8, max_num_batched_tokens=48, num_blocks=num_blocks, max_model_len=MAX_LEN)
    requests = requests_of(SHAPES)
    run(core, requests)
    for request in requests:
        assert_by_length(folder, request.prompt_token_ids, request.output_token_ids, request.sampling.max_tokens)


def test_prefixes_are_shared_by_requests_of_one_length_alone(folder: Path) -> None:
    """Keys depend on rope's frequencies, of which longrope has two sets, and dynamic NTK one for each length."""
    core = make_core(folder, block_size=8, max_num_batched_tokens=256, num_blocks=256, max_model_len=MAX_LEN)
    prompt = random_prompt(random.Random(2), 40)
    cached = []
    for at, max_tokens in enumerate((8, 8, 40, 40, 100)):
        request = Request(f"r{at}", RequestSpec(prompt, greedy(max_tokens)))
        run(core, [request])
        cached.append(request.num_cached_tokens)
        assert_by_length(folder, prompt, request.output_token_ids, max_tokens)
    is_dynamic = core.runner.model.config.rope_parameters["rope_type"] == "dynamic"  # type: ignore[attr-defined]
    assert cached == [0, 32, 0, 32, 0 if is_dynamic else 32]


def test_without_being_asked_the_context_is_what_the_model_was_trained_with(folder: Path) -> None:
    core = make_core(folder, block_size=8, num_blocks=64)
    assert core.runner.max_model_len == TRAINED  # type: ignore[attr-defined]


# ---- LMDeploy's fields


@pytest.mark.parametrize(("factor", "given"), [(3.0, {"factor": 3.0}), (1.0, {})])
def test_a_factor_that_config_json_does_not_have(tmp_path: Path, factor: float, given: dict[str, float]) -> None:
    """`rope_scaling_factor` means dynamic NTK with that factor, and `use_dynamic_ntk` alone means factor 1. Up to the
    trained length nothing changes.
    """
    folder = make_checkpoint(tmp_path / "own", "llama", max_position_embeddings=TRAINED)
    as_written = make_checkpoint(
        tmp_path / "written", "llama", rope_parameters={**DYNAMIC, "factor": factor}, max_position_embeddings=TRAINED
    )
    core = make_core(
        folder,
        max_model_len=MAX_LEN,
        num_blocks=256,
        hf_overrides={"rope_scaling": {"rope_type": "dynamic", **given}},
    )
    requests = requests_of(SHAPES)
    run(core, requests)
    for request in requests:
        assert_by_length(as_written, request.prompt_token_ids, request.output_token_ids, request.sampling.max_tokens)


def test_log_n_attention(tmp_path: Path) -> None:
    """Queries beyond the trained length grow by log(position + 1) / log(trained), as in patched transformers."""
    rope = {"rope_parameters": DYNAMIC, "max_position_embeddings": TRAINED}
    folder = make_checkpoint(tmp_path, "qwen3", **rope)
    prompt = random_prompt(random.Random(3), 90)
    plain = make_core(folder, max_model_len=MAX_LEN, num_blocks=64)
    core = make_core(folder, max_model_len=MAX_LEN, num_blocks=64, hf_overrides={"use_logn_attn": True})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    length = len(prompt) + 20
    factors = torch.tensor([max(1.0, math.log(p + 1) / math.log(TRAINED)) for p in range(length)])
    module = __import__(type(model).__module__, fromlist=["eager_attention_forward"])
    own = module.eager_attention_forward

    def grown(layer: Any, query: torch.Tensor, *others: Any, **named: Any) -> Any:
        return own(layer, query * factors[: query.shape[2], None], *others, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", grown)
        (output,) = generate(core, [prompt], greedy(20))
        logits = whole_pass(model.eval(), prompt + output, length)[len(prompt) - 1 : -1]
    assert output == logits.argmax(-1).tolist()
    assert output != generate(plain, [prompt], greedy(20))[0]


# ---- positions scaled equally for all requests


STRETCHED = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "linear": {"rope_type": "linear", "factor": 4.0},
}


@pytest.mark.parametrize("kind", STRETCHED)
def test_a_stretch_lengthens_the_context(tmp_path: Path, kind: str) -> None:
    """A rope scaling in config.json or given as an override allows more positions than the trained ones."""
    rope = {"rope_theta": 10000.0, **STRETCHED[kind]}
    sizes: dict[str, Any] = {"max_position_embeddings": TRAINED, "hidden_size": 256, "head_dim": 128}
    written = make_checkpoint(tmp_path / "written", "llama", rope_parameters=rope, **sizes)
    plain = make_checkpoint(tmp_path / "plain", "llama", **sizes)
    prompts = [random_prompt(random.Random(4), length) for length in (10, 100)]
    for folder, overrides in ((written, {}), (plain, {"rope_scaling": STRETCHED[kind]})):
        core = make_core(folder, num_blocks=64, hf_overrides=overrides)
        assert core.runner.max_model_len == 4 * TRAINED  # type: ignore[attr-defined]
        assert_all_same(written, prompts, generate(core, prompts, greedy(40)), 40)
    with pytest.raises(ModelError, match=f"rope_type {kind}: model_type opt has no rotary embedding of that kind"):
        make_core(make_checkpoint(tmp_path / "opt", "opt"), hf_overrides={"rope_scaling": STRETCHED[kind]})


def test_hunyuan_s_alpha_fixes_the_base(tmp_path: Path) -> None:
    """Hunyuan's rope_type is dynamic, but its rope is the same at every length."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
    folder = make_checkpoint(tmp_path, "hunyuan_v1_dense", rope_parameters=rope, max_position_embeddings=MAX_LEN)
    prompts = [random_prompt(random.Random(4), length) for length in (10, 100)]
    assert_all_same(folder, prompts, generate(make_core(folder, num_blocks=64), prompts, greedy(20)), 20)


# ---- InternLM and InternLM2, whose files have their own layout


HEADS, KV_HEADS, HEAD_DIM = 8, 2, 8
SIZES: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}


def packed(weights: dict[str, torch.Tensor], prefix: str, kind: str) -> torch.Tensor:
    """Returns InternLM2's `wqkv`: for each KV head its queries, then its key and its value."""
    query, key, value = (weights[f"{prefix}.self_attn.{each}_proj.{kind}"] for each in "qkv")
    share = HEADS // KV_HEADS * HEAD_DIM
    rows = []
    for at in range(KV_HEADS):
        own = slice(at * HEAD_DIM, (at + 1) * HEAD_DIM)
        rows += [query[at * share : (at + 1) * share], key[own], value[own]]
    return torch.cat(rows)


def as_internlm2(llama: Path, to: Path, **config: Any) -> Path:
    """Writes the same model as InternLM2's files."""
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
    """The models' files differ, so they do not share a cache, although both are Llamas."""
    prompts = [random_prompt(random.Random(1), length) for length in (1, 17, 40)]
    assert_all_same(llama2, prompts, generate(make_core(internlm2, num_blocks=64), prompts, greedy(12)), 12)
    one, other = Checkpoint.open(str(llama2)), Checkpoint.open(str(internlm2))
    assert one.identity != other.identity
    assert other.model_type == "llama"


def test_internlm_answers_as_its_llama(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_key_value_heads": HEADS}
    llama = make_checkpoint(tmp_path / "llama", "llama", attention_bias=True, **sizes)
    internlm = as_internlm(llama, tmp_path / "internlm", rotary={"base": 10000, "type": "origin"})
    prompts = [random_prompt(random.Random(2), length) for length in (1, 17, 40)]
    assert_all_same(llama, prompts, generate(make_core(internlm, num_blocks=64), prompts, greedy(12)), 12)


@pytest.mark.parametrize("kind", ["internlm", "internlm2"])
def test_dynamic_positions_of_both(tmp_path: Path, kind: str) -> None:
    """InternLM declares them in `rotary`, InternLM2 in `rope_scaling`; both depend on a request's length."""
    is_first, place = kind == "internlm", tmp_path / "model"
    rope = {**DYNAMIC, "factor": 1.0 if is_first else 2.0}
    sizes = {**SIZES, "num_key_value_heads": HEADS if is_first else KV_HEADS, "max_position_embeddings": TRAINED}
    llama = make_checkpoint(tmp_path / "llama", "llama", rope_parameters=rope, attention_bias=is_first, **sizes)
    if is_first:
        folder = as_internlm(llama, place, rotary={"base": 10000, "type": "dynamic"})
    else:
        folder = as_internlm2(llama, place, rope_theta=10000.0, rope_scaling={"type": "dynamic", "factor": 2.0})
    core = make_core(folder, num_blocks=256, max_model_len=MAX_LEN)
    requests = requests_of([(10, 12), (40, 80), (100, 20)])
    run(core, requests)
    for request in requests:
        assert_by_length(llama, request.prompt_token_ids, request.output_token_ids, request.sampling.max_tokens)


@pytest.mark.slow
def test_an_internlm2_in_a_pipeline_of_two_ranks_each(llama2: Path, internlm2: Path) -> None:
    """The document's example runs with two prefill and two decode ranks."""
    from pd_cluster import TurbomindEngineConfig

    with pipeline(str(internlm2), backend_config=TurbomindEngineConfig(tp=2, cache_block_seq_len=16)) as pipe:
        (response,) = pipe(["Hi, pls intro yourself"], GenerationConfig(max_new_tokens=10, ignore_eos=True))
        prompt = pipe.tokenizer.encode("<|user|>Hi, pls intro yourself<|assistant|>")
    assert_same(llama2, prompt, response.token_ids, 10)
