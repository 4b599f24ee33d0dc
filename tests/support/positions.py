"""Rotary positions of prompts, and transformers' greedy tokens with the same `position_ids`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from pd_cluster.types import RopePositions


def shifted(rng: random.Random, length: int) -> RopePositions:
    """Returns positions as after virtual tokens: all shifted by the same number."""
    by = rng.randrange(1, 60)
    return RopePositions((tuple(range(by, by + length)),), by)


def gapped(rng: random.Random, length: int) -> RopePositions:
    """Returns positions with gaps, one of them before the answer."""
    row = sorted(rng.sample(range(3 * length), length))
    return RopePositions((tuple(row),), row[-1] + rng.randrange(1, 9) - length)


def repeated(rng: random.Random, length: int) -> RopePositions:
    """Returns positions as around pictures: some tokens share a position, so there are fewer positions than tokens."""
    row, at = [], 0
    for _ in range(length):
        row.append(at)
        at += rng.random() < 0.6
    return RopePositions((tuple(row),), at + 1 - length)


def spread(rng: random.Random, length: int) -> RopePositions:
    """Returns M-RoPE's positions: text, a picture of 3 x 4 tokens, text; short prompts are text only."""
    if length < 14:
        return RopePositions((tuple(range(length)),) * 3)
    first = rng.randrange(1, length - 12)
    text, after = list(range(first)), list(range(first + 4, first + 4 + length - first - 12))
    picture = ([first] * 12, [first + i // 4 for i in range(12)], [first + i % 4 for i in range(12)])
    return RopePositions(tuple((*text, *each, *after) for each in picture), -8)


KINDS: dict[str, Callable[[random.Random, int], RopePositions]] = {
    "shifted": shifted,
    "gapped": gapped,
    "repeated": repeated,
}


def assert_same(model: Any, prompt: list[int], own: RopePositions | None, output: list[int]) -> None:
    """Asserts the reference's tokens, except where its two best logits differ by less than 1e-4 (invariant 1)."""
    indices = RopePositions((tuple(range(len(prompt))),))
    expected, margins = reference(model, prompt, own or indices, len(output))
    at = next((i for i, (a, b) in enumerate(zip(output, expected, strict=True)) if a != b), None)
    assert at is None or margins[at] < 1e-4, f"output {at} is {output[at]} instead of {expected[at]}"


def reference(model: Any, prompt: list[int], own: RopePositions, num_tokens: int) -> tuple[list[int], list[float]]:
    """Generates greedily by transformers' forward pass with a KV cache.

    Returns the tokens, and each token's margin over the second best logit.
    """
    cache, input_ids = DynamicCache(config=model.config), torch.tensor([prompt])
    position_ids = torch.tensor(own.rows)[:, None]  # [num_rows, 1, num_tokens]
    output: list[int] = []
    margins: list[float] = []
    while len(output) < num_tokens:
        with torch.inference_mode():
            logits = model(
                input_ids=input_ids,
                position_ids=position_ids if len(own.rows) > 1 else position_ids[0],
                past_key_values=cache,
                attention_mask=torch.ones(1, len(prompt) + len(output), dtype=torch.long),
            ).logits[0, -1]
        best = logits.topk(2).values
        margins.append(float(best[0] - best[1]))
        input_ids = logits.argmax()[None, None]
        position_ids = torch.full((len(own.rows), 1, 1), len(prompt) + len(output) + own.delta)
        output.append(int(input_ids))
    return output, margins
