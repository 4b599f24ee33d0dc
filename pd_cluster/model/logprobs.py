"""Log-probabilities of tokens under the model's own logits. Knows nothing of sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pd_cluster.model.passes import Floats, Ints, at_least, leading, log_totals, num_better
from pd_cluster.types import Logprobs


def logprobs_of(logits: Tensor, best: Floats, token_ids: Ints, num_top: Sequence[int]) -> list[Logprobs]:
    """One entry a row of logits [num_rows, vocab_size], whose largest ones are `best`; all else has one entry a row.

    `rank` is 1 more than the number of tokens with a strictly larger logit. Of equal tokens the lowest ids are on top.
    """
    totals = log_totals(logits, best)  # [num_rows]
    values = logits[np.arange(len(logits)), token_ids].cpu().numpy()
    logprobs: list[float] = (values - totals).tolist()
    ranks = [1 + num for num in num_better(logits, values)]
    top = leading_logprobs(logits, totals, num_top)
    return [Logprobs(*entry) for entry in zip(logprobs, ranks, top, strict=True)]


def leading_logprobs(logits: Tensor, totals: Floats, nums: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Ids and log-probabilities of the best tokens of each row, as many as `nums` says; `totals` are log_totals."""
    counts = [min(max(num, 0), logits.shape[1]) for num in nums]
    top: list[list[tuple[int, float]]] = [[] for _ in counts]
    if any(counts):
        candidates, ids = leading(logits, max(counts))
        for row in np.flatnonzero(counts).tolist():
            top[row] = _top(logits, row, candidates[row], ids[row], counts[row], totals[row])
    return top


def _top(logits: Tensor, row: int, values: Floats, ids: Ints, num: int, log_total: float) -> list[tuple[int, float]]:
    """Ids and log-probabilities of the `num` best tokens of a row, given at least that many candidates."""
    edge = np.partition(values, len(values) - num)[-num]
    if edge == values.min() and len(values) < logits.shape[1]:  # others that equal it may not be among the candidates
        values, ids = at_least(logits, row, edge)
    order = np.lexsort((ids, -values))[:num]
    return list(zip(ids[order].tolist(), (values[order] - log_total).tolist(), strict=True))
