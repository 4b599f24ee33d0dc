"""Log-probabilities of tokens under the model's own logits. Does not use sampling parameters.

Log-probabilities are computed either at once or in two steps: the logits' device computes the larger part, without
waiting, and the host computes the rest. Both ways give exactly the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pd_cluster.model.sampling.row_passes import (
    Floats,
    Ints,
    at_least,
    leading,
    log_totals,
    mended,
    num_better,
    weights_of,
)
from pd_cluster.types import Logprobs

NUM_COLUMNS = 3  # written by `logprob_values` for each row before the most likely tokens


def logprobs_of(
    logits: Tensor, best: Floats, token_ids: Ints, num_top: Sequence[int], named: Sequence[tuple[int, ...]] = ()
) -> list[Logprobs]:
    """Returns one entry per row of logits [num_rows, vocab_size]; all other arguments have one entry per row.

    `best`: the rows' largest logits. `rank` is 1 plus the number of tokens with a strictly larger logit. Among equal
    tokens the lowest ids come first. `named`: tokens whose logprobs follow those of the most likely tokens.
    """
    totals = log_totals(logits, best)  # [num_rows]
    values = logits[np.arange(len(logits)), token_ids].cpu().numpy()
    top = leading_logprobs(logits, totals, num_top)
    for row, ids in enumerate(named):
        if ids:
            top[row] += _named(mended(logits[row, list(ids)]).cpu().numpy(), ids, totals[row])
    return _entries(values, totals, num_better(logits, values), top)


def _named(values: Floats, token_ids: tuple[int, ...], log_total: float) -> list[tuple[int, float]]:
    return list(zip(token_ids, (values - log_total).tolist(), strict=True))


def _entries(
    values: Floats, totals: Floats, nums_better: list[int], top: list[list[tuple[int, float]]]
) -> list[Logprobs]:
    logprobs: list[float] = (values - totals).tolist()
    ranks = [1 + num for num in nums_better]
    return [Logprobs(*entry) for entry in zip(logprobs, ranks, top, strict=True)]


class PendingLogprobs(NamedTuple):
    """Logprobs whose values are still on the logits' device."""

    rows: list[int]  # the rows that these logprobs belong to
    nums: list[int]  # number of most likely tokens for each row
    vocab_size: int
    numbers: Tensor  # the result of `logprob_values`, one row for each of `rows`
    named: Sequence[tuple[int, ...]] = ()  # for each row, tokens whose logprobs follow those of the most likely ones


def counts_of(nums: Sequence[int], vocab_size: int) -> list[int]:
    """Returns `nums`, limited to the vocabulary's size."""
    return [min(max(num, 0), vocab_size) for num in nums]


def logprob_values(logits: Tensor, token_ids: Tensor, nums: Tensor, most: int, named: Tensor | None = None) -> Tensor:
    """Computes the input of `logprobs_from` on the logits' device, without waiting; [num_rows, num_values] int32.

    For each of the rows of logits [num_rows, vocab_size], `token_ids` has a token and `nums` the number of most likely
    tokens, both [num_rows] int64. `most`: the largest of `nums`. `named` [num_rows, num_named]: ids of more tokens. The
    columns are as follows; floats are stored as their bits:

        best │ the token's logit │ number of better ones │ most logits │ their ids │ most equals │ sums of blocks │
        logits of the named tokens

    topk may return any of several equal tokens. So "most equals" are the lowest ids of the tokens that tie with the
    last of the most likely ones, as distances from the vocabulary's end; 0 if none is left.
    """
    table = mended(logits)
    best = table.amax(1, keepdim=True)
    is_left = best > -math.inf
    best = torch.where(is_left, best, 0.0)
    table[:, :1] = torch.where(is_left, table[:, :1], 0.0)  # as in `peaks`, for a row without candidates
    values = table.gather(1, token_ids[:, None])
    better = (table > values).sum(1, keepdim=True)
    parts = [best.view(torch.int32), values.view(torch.int32), better.int()]
    if most:
        vocab_size = table.shape[1]
        top, ids = table.topk(most)
        edge = top.gather(1, (nums[:, None] - 1).clamp(min=0))
        from_end = torch.arange(vocab_size, 0, -1, dtype=torch.float32, device=table.device)  # exact up to 2 ** 24
        equals = torch.where(table == edge, from_end, 0.0).topk(most).values
        parts += [top.view(torch.int32), ids.int(), equals.int()]
    sums = weights_of(table, best, math.log2(math.e)).sum(-1)
    parts.append(sums.view(torch.int32))
    if named is not None:
        parts.append(table.gather(1, named).view(torch.int32))
    return torch.cat(parts, 1)


def logprobs_from(numbers: NDArray[np.int32], telling: PendingLogprobs) -> list[Logprobs]:
    """Returns the same as `logprobs_of` for the rows of `telling`, from values that were copied to the host."""
    nums, vocab_size = telling.nums, telling.vocab_size
    num_named = max(map(len, telling.named), default=0)
    numbers, asked = np.split(numbers, [numbers.shape[1] - num_named], axis=1)
    numbers = np.ascontiguousarray(numbers)
    floats, most = numbers.view(np.float32), max(nums)
    tops, ids, equals, sums = np.split(numbers, NUM_COLUMNS + most * np.arange(4), axis=1)[1:]
    totals = floats[:, 0] + np.log(sums.view(np.float32).astype(np.float64).sum(1))
    top: list[list[tuple[int, float]]] = [[] for _ in nums]
    for row in np.flatnonzero(nums).tolist():
        values = tops[row].view(np.float32)
        edge = _edge(values, nums[row])
        equal = vocab_size - equals[row][equals[row] > 0]
        is_above = values > edge
        candidates = np.concatenate([values[is_above], np.full(len(equal), edge)])
        top[row] = _best(candidates, np.concatenate([ids[row][is_above], equal]), nums[row], totals[row])
    for row, named in enumerate(telling.named):
        if named:
            logits = np.ascontiguousarray(asked[row, : len(named)]).view(np.float32)
            top[row] += _named(logits, named, totals[row])
    return _entries(floats[:, 1], totals, numbers[:, 2].tolist(), top)


def leading_logprobs(logits: Tensor, totals: Floats, nums: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Returns ids and log-probabilities of the `nums` best tokens of each row; `totals`: from `log_totals`."""
    counts = counts_of(nums, logits.shape[1])
    top: list[list[tuple[int, float]]] = [[] for _ in counts]
    if any(counts):
        candidates, ids = leading(logits, max(counts))
        for row in np.flatnonzero(counts).tolist():
            top[row] = _top(logits, row, candidates[row], ids[row], counts[row], totals[row])
    return top


def _top(logits: Tensor, row: int, values: Floats, ids: Ints, num: int, log_total: float) -> list[tuple[int, float]]:
    """Returns ids and log-probabilities of the `num` best tokens of a row, from at least that many candidates."""
    edge = _edge(values, num)
    # The candidates may lack other tokens with this logit.
    if edge == values.min() and len(values) < logits.shape[1]:
        values, ids = at_least(logits, row, edge)
    return _best(values, ids, num, log_total)


def _edge(values: Floats, num: int) -> float:
    """Returns the `num`th largest value."""
    return float(np.partition(values, len(values) - num)[-num])


def _best(values: Floats, ids: NDArray[Any], num: int, log_total: float) -> list[tuple[int, float]]:
    order = np.lexsort((ids, -values))[:num]
    return list(zip(ids[order].tolist(), (values[order] - log_total).tolist(), strict=True))
