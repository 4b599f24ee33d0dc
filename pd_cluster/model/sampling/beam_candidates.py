"""Continuations of beams: the most likely tokens of each row of logits. Does not search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pd_cluster.model.sampling.row_logprobs import leading_logprobs, logprobs_of
from pd_cluster.model.sampling.row_passes import Floats, Ints, log_totals, num_better
from pd_cluster.types import Candidate, Logprobs, Sampling


def ends_of(params: Sampling, eos_token_ids: frozenset[int], vocab_size: int) -> Ints:
    """Returns the ids of the tokens that end a hypothesis, [num_ends]."""
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    return np.array(sorted(token_id for token_id in ends if 0 <= token_id < vocab_size), dtype=np.int64)


def candidates_of(logits: Tensor, best: Floats, ends: Sequence[Ints], widths: Sequence[int]) -> list[list[Candidate]]:
    """Returns the candidates that a search of each width may need, for each row of logits [num_rows, vocab_size] with
    maxima `best`.

    These are the `width` likeliest tokens, and the `width` likeliest that do not end a hypothesis. The likeliest come
    first, and of equal ones the lowest id. If masks leave fewer tokens, fewer are returned. Overwrites the logits.
    """
    totals = log_totals(logits, best)  # [num_rows]
    ending = [logits[row, ids].cpu().numpy() for row, ids in enumerate(ends)]
    for row, ids in enumerate(ends):
        logits[row, ids] = -np.inf
    others = leading_logprobs(logits, totals, widths)
    rows = []
    for row, width in enumerate(widths):
        found = [(token_id, logprob, False) for token_id, logprob in others[row]]
        chosen = np.lexsort((ends[row], -ending[row]))[:width]
        found += [(int(ends[row][i]), float(ending[row][i] - totals[row]), True) for i in chosen.tolist()]
        found.sort(key=lambda each: (-each[1], each[0]))
        rows.append([Candidate(*each) for each in found if each[1] > -np.inf])
    return rows


def with_client_logprobs(
    logits: Tensor, best: Floats, found: Sequence[list[Candidate]], num_top: Sequence[int]
) -> list[list[Candidate]]:
    """Returns the same candidates with the logprobs that clients see, computed from the model's own logits."""
    token_ids = np.array([row[0].token_id for row in found], dtype=np.int64)
    totals, told = log_totals(logits, best), logprobs_of(logits, best, token_ids, num_top)
    rows = []
    for i, row in enumerate(found):
        values = logits[i, [candidate.token_id for candidate in row]].cpu().numpy()
        ranks = num_better(logits[i].expand(len(row), -1), values)
        logprobs: list[float] = (values - totals[i]).tolist()
        rows.append(
            [
                candidate._replace(told=Logprobs(logprob, 1 + rank, told[i].top))
                for candidate, logprob, rank in zip(row, logprobs, ranks, strict=True)
            ]
        )
    return rows
