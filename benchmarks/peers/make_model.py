"""Writes a model: a Llama with seeded random weights, which are made on a device, and a tokenizer.

The weights' scale keeps activations near one, because the inputs of matrices are normalised.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.model_shapes import EOS_ID, ModelShape

SEED = 0


def make_model(folder: Path, shape: ModelShape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.hidden_size**-0.5,
        bos_token_id=EOS_ID - 1,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID - 2,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    write(model, folder)


def write(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Writes the model, with a tokenizer for its vocabulary."""
    model.save_pretrained(folder, max_shard_size="1GB")
    made = make_tokenizer(model.config.vocab_size)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.save_pretrained(folder)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Makes a token for each byte (0-255), then <pad>, <bos> and <eos>; the others are words that no text contains."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<bos>", "<eos>"]
    names += [f"<w{i}>" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return tokenizer


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), ModelShape.parse(sys.argv[2]))
