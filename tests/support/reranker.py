"""A tiny checkpoint with the tokens of Qwen3-Reranker's prompt, and transformers' scores for it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.checkpoints import make_checkpoint, reference_model

TOKENS = ("yes", "no", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# As in the model card: the text around a pair, which is tokenized separately.
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def make_reranker(folder: Path) -> Path:
    """Makes a checkpoint, with some words of its vocabulary renamed."""
    make_checkpoint(folder, "llama", max_position_embeddings=2048)
    for file in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        text = file.read_text()
        for at, token in enumerate(TOKENS):
            text = text.replace(json.dumps(f"<word{at}>"), json.dumps(token))
        file.write_text(text)
    return folder


@cache
def _tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def pair_ids(folder: Path, query: str, document: str, task: str = TASK) -> list[int]:
    """Returns the tokens of the prompt for a pair."""
    tokenizer = _tokenizer(folder)
    texts = (PREFIX, f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}", SUFFIX)
    return [token_id for text in texts for token_id in tokenizer.encode(text, add_special_tokens=False)]


def reference_logits(folder: Path, token_ids: list[int]) -> tuple[float, float]:
    """Returns the logits of "no" and "yes" after the prompt."""
    with torch.inference_mode():
        logits = reference_model(folder)(torch.tensor([token_ids])).logits[0, -1]
    no, yes = (_tokenizer(folder).convert_tokens_to_ids(word) for word in ("no", "yes"))
    return float(logits[no]), float(logits[yes])


def reference_score(folder: Path, token_ids: list[int]) -> float:
    pair = torch.tensor(reference_logits(folder, token_ids))
    return float(torch.nn.functional.log_softmax(pair, dim=0)[1].exp())
