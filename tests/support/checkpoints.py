"""Tiny random checkpoints, one for each supported architecture, with a byte-level tokenizer and a chat template.

Weights are seeded and large, so that the best two tokens are far apart and floating point noise decides nothing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320
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
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 20.0,
            "tie_word_embeddings": True,
        },
    ),
}


def make_checkpoint(folder: Path, architecture: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Writes config, weights, tokenizer and chat template; returns the folder."""
    config_class, own = CONFIGS[architecture]
    settings = {**COMMON, **own, **changes}
    config = getattr(transformers, config_class)(**settings)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(eos_token_id=EOS_ID, bos_token_id=257, pad_token_id=256)
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    return folder


def make_tokenizer() -> Tokenizer:
    """Every byte is a token (0-255); 256 <pad>, 257 <bos>, 258 <eos>; the rest are words."""
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
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference_greedy(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' generate(), greedy: the tokens that everybody else must produce."""
    with torch.inference_mode():
        output = reference_model(folder).generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
    return [int(token) for token in output[0, len(prompt) :]]


def margin(folder: Path, prompt: list[int], output: list[int]) -> float:
    """The distance between the reference's two best logits after prompt + output."""
    with torch.inference_mode():
        best = reference_model(folder)(torch.tensor([prompt + output])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])
