"""A slow reference for the sampler: one row and one operation at a time. Shares only the random numbers with it."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

import numpy as np

from pd_cluster.model.sampling.sampler import SamplingRow, uniform

Line = np.ndarray[Any, Any]  # [vocab_size], one row


def adjusted(logits: Line, row: SamplingRow, eos: Set[int]) -> Line:
    """Applies masks, biases and penalties, in single precision."""
    p = row.request.sampling
    output = row.request.output_token_ids
    tokens = row.request.prompt_token_ids + output
    x = logits.astype(np.float32).copy()
    for token in range(len(x) if p.allowed_token_ids else 0):
        if token not in p.allowed_token_ids:
            x[token] = -math.inf
    for words in p.bad_words:
        if len(words) == 1 or tokens[-(len(words) - 1) :] == list(words[:-1]):
            x[words[-1]] = -math.inf
    if row.position < p.min_tokens:
        for token in eos | {*p.stop_token_ids}:
            x[token] = -math.inf
    for token, bias in p.logit_bias:
        x[token] += np.float32(bias)
    repetition = np.float32(p.repetition_penalty)
    for token in set(tokens) if repetition != 1 else ():
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output) if p.frequency_penalty or p.presence_penalty else ():
        x[token] -= np.float32(p.frequency_penalty) * np.float32(output.count(token))
        x[token] -= np.float32(p.presence_penalty)
    return x


def reference(logits: Line, row: SamplingRow, eos: Set[int]) -> int:
    """Returns one row's token, by plain loops, a full stable sort, and double precision after the penalties."""
    p = row.request.sampling
    x: list[float] = adjusted(logits, row, eos).tolist()
    best = max(x)
    if best == -math.inf:
        return max(p.allowed_token_ids or range(len(x)), key=lambda token: (logits[token], -token))
    if p.temperature == 0:
        return x.index(best)
    order = sorted(range(len(x)), key=lambda token: -x[token])  # stable: equal logits in order of ids
    weights = [math.exp((value - best) / p.temperature) for value in x]
    kept = [token for token in order if weights[token] >= p.min_p]
    if p.top_k > 0:
        kept = kept[: p.top_k]
    total = math.fsum(weights[token] for token in kept)
    nucleus: list[int] = []
    for token in kept:
        if p.top_p < 1 and nucleus and math.fsum(weights[t] for t in nucleus) >= p.top_p * total:
            break
        nucleus.append(token)
    target = uniform(p.seed, row.index, row.position) * math.fsum(weights[token] for token in nucleus)
    cumulative = 0.0
    for token in sorted(nucleus):
        cumulative += weights[token]
        if cumulative > target:
            return token
    return max(nucleus)
