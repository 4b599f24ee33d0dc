"""Tiny random checkpoints, one for each supported architecture, with a byte-level tokenizer and a chat template.

Weights are seeded and large, so that the two best logits are far apart and rounding does not change the choice.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.model.layers.states.torch_functions import use_torch_functions

VOCAB_SIZE = 320
MOST_NBYTES_KEPT = 1 << 23
PAD_ID = 256
EOS_ID = 258
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 257,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "tie_word_embeddings": False,
}
NO_GROUPS: dict[str, Any] = {"num_key_value_heads": None}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
MIXED_LAYERS: dict[str, Any] = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CONFIGS: dict[str, dict[str, Any]] = {  # model_type -> differences from COMMON
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma2": {
        "initializer_range": 0.4,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 20.0,
        "tie_word_embeddings": True,
    },
    "gemma": {"tie_word_embeddings": True},
    "gemma3_text": {
        **MIXED_LAYERS,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        },
    },
    "qwen2_moe": {
        **MIXED_LAYERS,
        "use_sliding_window": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "use_sliding_window": True,
        "sliding_window": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "phi3": {"sliding_window": 24, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "glm4": {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    "gpt_neox": {**NO_GROUPS, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
    "gpt2": {**NO_GROUPS, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": True},
    "opt": {**NO_GROUPS, "init_std": 0.25, "word_embed_proj_dim": 32, "tie_word_embeddings": True},
    "starcoder2": {"sliding_window": 24},
    "stablelm": {
        "initializer_range": 0.7,
        "use_qkv_bias": True,
        "qk_layernorm": True,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
    },
    "cohere2": {**MIXED_LAYERS, "logit_scale": 0.5, "tie_word_embeddings": True},
    "smollm3": {**MIXED_LAYERS, "use_sliding_window": True, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    "ernie4_5": {"use_bias": True, "tie_word_embeddings": True},
    "exaone4": {**MIXED_LAYERS},
    "gpt_oss": {
        **MIXED_LAYERS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
}
# These run as transformers' own modules.
NOT_FUSED = ("gpt_neox", "gpt2", "opt", "starcoder2", "stablelm", "cohere2")
FUSED_OF_MORE = (  # of tests/support/more_checkpoints.py
    *("glm", "olmo3", "ministral", "cwm"),
    *("dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "granitemoe", "granitemoeshared", "hy_v3"),
    "minimax_m2",
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"),
    *("deepseek_v32", "glm_moe_dsa"),
)
FUSED = (*(name for name in CONFIGS if name not in NOT_FUSED), *FUSED_OF_MORE)


_folders = tempfile.TemporaryDirectory(prefix="pd-cluster-checkpoints-")


def make_checkpoint(folder: Path, architecture: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Writes config, weights, tokenizer and chat template; returns the folder. Small ones are cached in the process."""
    from tests.support.hybrids import HYBRIDS
    from tests.support.more_checkpoints import MORE

    own = {**MORE, **HYBRIDS, **CONFIGS}[architecture]
    settings = {**COMMON, **own, **changes}
    name = hashlib.sha256(repr((architecture, seed, sorted(settings.items()))).encode()).hexdigest()[:24]
    kept = Path(_folders.name) / name
    if not kept.exists():
        _write(kept, CONFIG_MAPPING[architecture](**settings), architecture, seed)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    if (kept / "model.safetensors").stat().st_size > MOST_NBYTES_KEPT:
        shutil.rmtree(kept)
    torch.manual_seed(seed)
    return folder


def _write(folder: Path, config: Any, architecture: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if architecture != "llama":
        shake(model)
    model.generation_config = transformers.GenerationConfig(eos_token_id=EOS_ID, bos_token_id=257, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    marks = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **marks)
    fast.save_pretrained(folder)


def shake(model: Any) -> None:
    """Replaces the initial zeros and ones of biases, norms and sinks, so that a test notices when one is not applied.

    With tied embeddings, enlarges what Gemma's layers add; otherwise every token would be followed by itself.
    """
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * (2.0 if name.endswith("sinks") else 0.2))
            if tied and "post_feedforward_layernorm" in name:
                parameter.add_(15.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # below 0, so that a masked 0 would win
                buffer.add_(torch.randn_like(buffer) * 0.2 - 1.5)


def text_checkpoint(folder: Path, tokenizer: Tokenizer, template: str = TEMPLATE, **config: Any) -> Checkpoint:
    """Writes a tokenizer and, unless it is empty, a chat template; returns a checkpoint without weights."""
    tokenizer.save(str(folder / "tokenizer.json"))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    known = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_ID}
    return Checkpoint(folder, {**known, **config}, {}, "", folder)


def make_tokenizer() -> Tokenizer:
    """Returns a tokenizer: ids 0-255 are bytes, 256 <pad>, 257 <bos>, 258 <eos>, the rest words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.add_tokens([f"<word{i}>" for i in range(VOCAB_SIZE - 259)])
    return tokenizer


@cache
def reference_model(folder: Path) -> Any:
    """Returns transformers' model, shared by all tests of a process: copy it before you change or move it.

    If attention logits are capped, it uses eager attention, because SDPA ignores the cap.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    eager = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager).eval()
    use_torch_functions(model)
    return model


def reference_greedy(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """Returns the greedy tokens of transformers' generate(), the reference for all engines."""
    return list(_greedy(reference_model(folder), tuple(prompt), max_tokens))


@cache
def _greedy(model: Any, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    return tuple(_generate(model, [prompt], max_tokens)[0])


def reference_greedy_together(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Like `reference_greedy`, for all prompts in one generate() with left padding: ten times as fast.

    Padding may change the last bits, so where an engine's token differs from these, compare it with `reference_greedy`.
    test_the_reference_says_something compares the two for every architecture.
    """
    return _generate(reference_model(folder), prompts, max_tokens)


def prefers(folder: Path, prompts: list[list[int]], outputs: list[list[int]], limits: list[int]) -> bool:
    """Whether greedy decoding gives these outputs, checked by one forward pass over each prompt with its output.

    False does not prove a fault: another order of summation may choose another token, and where rotary frequencies
    depend on the length, those of generate() differ from those of one pass over the whole text.
    """
    model = reference_model(folder)
    if not all(outputs) or has_frequencies_by_length(model.config):
        return False
    rows = [prompt + output[:-1] for prompt, output in zip(prompts, outputs, strict=True)]
    input_ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)  # causal: no token sees the padding
    for at, row in enumerate(rows):
        input_ids[at, : len(row)] = torch.tensor(row)
    with torch.inference_mode():
        best = model(input_ids, use_cache=False).logits.argmax(-1)  # [num_prompts, longest]
    ends = ends_of(model)
    for choice, prompt, output, limit in zip(best.tolist(), prompts, outputs, limits, strict=True):
        is_over = len(output) == limit or (len(output) < limit and output[-1] in ends)
        if not is_over or until_end(output, ends) != output or choice[len(prompt) - 1 :][: len(output)] != output:
            return False
    return True


def assert_greedy(folder: Path, prompt: list[int], output: list[int]) -> None:
    """Asserts that each token has the best logit, except for 1 + 0.1 % of them, whose logit is within 1e-4 of the best.

    Each token is checked after the output's own earlier tokens, because all tokens after a numerical tie may differ.
    """
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    logits = logits[len(prompt) - 1 :]  # [num_tokens, vocab_size]
    behind = logits.max(-1).values - logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    assert behind.max() < 1e-4, f"token {behind.argmax()} of {len(output)} is {behind.max():.2e} behind the best"
    assert int((behind > 0).sum()) <= 1 + len(output) // 1000


def ends_of(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def has_frequencies_by_length(config: Any) -> bool:
    ropes = [getattr(config, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    parts = [each for rope in ropes for each in (rope, *rope.values()) if isinstance(each, dict)]
    return any(each.get("rope_type", each.get("type")) in ("dynamic", "longrope") for each in parts)


def _generate(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    padded = padded_left(prompts)
    with torch.inference_mode():
        output = model.generate(**padded, max_new_tokens=max_tokens, do_sample=False)
    rows = output[:, padded["input_ids"].shape[1] :].tolist()
    return [until_end(row, ends_of(model)) for row in rows]


def padded_left(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Returns generate() arguments for several prompts: input_ids and attention_mask, each [num_prompts, longest]."""
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), PAD_ID)
    attention_mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, longest - len(prompt) :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def until_end(tokens: Sequence[int], ends: set[int]) -> list[int]:
    """Returns the tokens up to and including the first end token."""
    at = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: at + 1])


def margin(folder: Path, prompt: list[int], output: list[int]) -> float:
    """Returns the difference between the reference's two best logits after prompt + output."""
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([prompt + output])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return float(first - second)
