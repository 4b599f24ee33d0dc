"""A real checkpoint whose answers a test scripts; the prompt's length selects the answer.

Layers add zero and token embeddings are zero, so the next token depends on the position only. The real engine thus
generates an answer with tool calls or reasoning, token by token, for any request. This module does not know the
answers' meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer

from tests.support.checkpoints import EOS_ID, make_tokenizer

MAX_POSITIONS = 4096
HIDDEN_SIZE = 128
PADDING = "."  # one byte, and so one token


def make_scripted(
    folder: Path,
    scripts: Mapping[int, str],
    *,
    chat_template: str,
    special_tokens: Sequence[str] = (),
    added_tokens: Sequence[str] = (),
) -> Path:
    """Makes a model that answers a prompt of exactly `start` tokens with `scripts[start]` and <eos>.

    Each of special_tokens is one token, omitted by decoders that skip special tokens; each of added_tokens is one token
    of ordinary text. Raises ValueError if a script overlaps the next one.
    """
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special_tokens])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added_tokens])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=chat_template
    ).save_pretrained(folder)
    _make_model(_next_tokens(tokenizer, scripts), tokenizer.get_vocab_size()).save_pretrained(folder)
    return folder


def pad_to(folder: Path, messages: Sequence[Mapping[str, Any]], num_tokens: int, **variables: Any) -> list[Any]:
    """Returns the messages with dots after the last text, so that the chat prompt has exactly num_tokens tokens.

    `variables`: the template's variables from the request, such as tools and enable_thinking. Raises ValueError if the
    prompt is already too long.
    """
    tokenizer = _chat_tokenizer(folder)
    found = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **variables)
    length = len(tokenizer.encode(found, add_special_tokens=False))
    if length > num_tokens:
        raise ValueError(f"the prompt has {length} tokens already, more than {num_tokens}")
    padded = [dict(message) for message in messages]
    padded[-1]["content"] += PADDING * (num_tokens - length)
    return padded


@cache
def _chat_tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def _next_tokens(tokenizer: Tokenizer, scripts: Mapping[int, str]) -> list[int]:
    """Maps each position to the token that follows it."""
    following = [EOS_ID] * MAX_POSITIONS
    ends = 0
    for start, text in sorted(scripts.items()):
        token_ids = [*tokenizer.encode(text, add_special_tokens=False).ids, EOS_ID]
        if start < 1 or start < ends or start + len(token_ids) > MAX_POSITIONS:
            raise ValueError(f"the script at {start} runs into another, or past {MAX_POSITIONS} positions")
        ends = start + len(token_ids)
        following[start - 1 : ends - 1] = token_ids
    return following


def _make_model(following: Sequence[int], vocab_size: int) -> Any:
    """Makes each position's embedding the output row of its next token; rows are of signs and nearly orthogonal."""
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=MAX_POSITIONS,
        n_embd=HIDDEN_SIZE,
        n_layer=1,
        n_head=4,
        n_inner=HIDDEN_SIZE,
        bos_token_id=257,
        eos_token_id=EOS_ID,
        pad_token_id=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    half = torch.randint(0, 2, (vocab_size, HIDDEN_SIZE // 2)) * 2.0 - 1.0
    rows = torch.cat([half, -half], dim=1)  # [vocab_size, hidden_size]; mean 0 and variance 1: a layer norm keeps them
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.copy_(rows[torch.tensor(following)])
        model.lm_head.weight.copy_(rows)
        for block, name in itertools.product(model.transformer.h, ("attn", "mlp")):
            for parameter in getattr(block, name).c_proj.parameters():
                parameter.zero_()
    model.generation_config = transformers.GenerationConfig(eos_token_id=EOS_ID, bos_token_id=257, pad_token_id=256)
    return model
