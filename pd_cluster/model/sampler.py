"""The next token of each row of logits.

Randomness is a counter-based hash of (seed, sequence index, position), computed on the host: the same request draws
the same numbers alone, in a batch, after a retry and on every device. Knows nothing of requests' lives.
"""

from __future__ import annotations

import numpy as np
import torch

from pd_cluster.types import SamplingParams

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """One output of SplitMix64 (Steele, Lea, Flood 2014) for this state."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a function of its arguments only. Vectors in tests/unit."""
    mixed = splitmix64(splitmix64(splitmix64(seed & MASK) ^ index) ^ position)
    return (mixed >> 11) * 2.0**-53


def sample(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    """Token ids for logits [num_rows, vocab_size] float32; row i is output token `positions[i]` of its sequence."""
    tokens = logits.argmax(-1)  # [num_rows]
    rows = [i for i, p in enumerate(params) if not p.greedy]
    if rows:
        drawn = _draw(logits[rows], [params[i] for i in rows], [positions[i] for i in rows])
        tokens[torch.tensor(rows)] = drawn
    result: list[int] = tokens.tolist()
    return result


def _draw(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> torch.Tensor:
    """Inverse transform sampling over the tokens that top_k and top_p leave.

    The sum runs in the vocabulary's order, not by probability: then two tokens that are almost equally likely may
    change places in the ranking, as rounding has it, without changing what is drawn.
    """
    vocab_size = logits.shape[-1]
    temperature = torch.tensor([p.temperature for p in params])[:, None]
    scaled = (logits.double() / temperature).float()
    ks = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    # Stable and of full width for every row: which of several equal tokens is the k-th must not depend on the batch.
    values, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    width = max(ks)
    values, token_ids = values[:, :width], token_ids[:, :width]
    beyond_k = torch.arange(width)[None] >= torch.tensor(ks)[:, None]
    probs = values.masked_fill(beyond_k, float("-inf")).double().softmax(-1)  # [num_rows, width], most likely first
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)[:, None]
    kept = probs.masked_fill(probs.cumsum(-1) - probs >= top_p, 0.0)  # the first token is always kept
    weights = torch.zeros(len(params), vocab_size, dtype=torch.float64).scatter_(-1, token_ids, kept)
    cumulative = weights.cumsum(-1)  # [num_rows, vocab_size]
    draws = np.array([uniform(p.seed, 0, position) for p, position in zip(params, positions, strict=True)])
    targets = torch.from_numpy(draws)[:, None] * cumulative[:, -1:]
    last = vocab_size - 1 - (weights.flip(-1) > 0).int().argmax(-1, keepdim=True)  # should rounding overshoot
    return torch.searchsorted(cumulative, targets, right=True).minimum(last)[:, 0]
