"""Makes the vectors of pooling requests from final hidden states, chunk by chunk.

A vector's bits depend only on the prompt's hidden states: a mean is summed in float64, token by token, so the order of
additions depends neither on the prompt's chunks nor on other requests. Knows nothing of models.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.engine.step.step_outputs import PooledVector
from pd_cluster.types import Pooling, Request

Doubles = npt.NDArray[np.float64]

MIN_VECTOR_LENGTH = 1e-12  # vectors are divided by at least this length, as in torch's `normalize`
NO_NUMBERS = np.empty(0, dtype=np.float32)
NOT_KNOWN = "this model does not return its hidden states, so it cannot embed; use another model"


class Pooler:
    """Keeps the sum of each incomplete mean until its request ends or starts again."""

    def __init__(self) -> None:
        self.sums: WeakKeyDictionary[Request, Doubles] = WeakKeyDictionary()

    def pool(
        self, chunks: list[tuple[Request, int]], hidden_states: npt.NDArray[np.float32]
    ) -> dict[Request, PooledVector]:
        """Returns the vectors of the prompts that this step completes.

        Call it before the step is recorded. `hidden_states`: [num_hidden_rows, hidden_size], the last `num_hidden_rows`
        tokens of each chunk, chunk after chunk.
        """
        found: dict[Request, PooledVector] = {}
        at = 0
        for request, num_tokens in chunks:
            pooling = request.pooling
            if pooling is None or pooling.kind == "logits":
                continue
            num_rows = request.num_hidden_rows(num_tokens)
            rows = hidden_states[at : at + num_rows]
            at += num_rows
            is_complete = num_tokens == request.num_behind
            if not hidden_states.shape[1]:
                if is_complete:
                    found[request] = PooledVector(NO_NUMBERS, NOT_KNOWN)
            elif pooling.kind == "mean":
                pooled = self._add(request, rows)
                if is_complete:
                    found[request] = vector_of(pooled / len(request.prompt_token_ids), pooling)
                    del self.sums[request]
            elif is_complete:
                found[request] = vector_of(rows[-1].astype(np.float64), pooling)
        return found

    def _add(self, request: Request, rows: npt.NDArray[np.float32]) -> Doubles:
        """Adds the rows to a request's sum. The first chunk begins a new sum, also after a preemption without swap."""
        total = self.sums.get(request)
        if total is None or request.num_computed_tokens == 0:
            total = self.sums[request] = np.zeros(rows.shape[1])
        for row in rows:
            total += row
        return total


def logits_of(pooling: Pooling, row: torch.Tensor) -> PooledVector:
    """Returns the logits of the requested tokens, followed by the logsumexp of all tokens' logits if requested.

    `row`: [vocab_size], the logits after the prompt's last token.
    """
    logits = row[list(pooling.token_ids)].double()
    if pooling.tells_total:
        logits = torch.cat([logits, row.double().logsumexp(0, keepdim=True)])
    return PooledVector(logits.float().cpu().numpy())


def vector_of(pooled: Doubles, pooling: Pooling) -> PooledVector:
    """Returns the first `dimensions` elements of a vector, normalized if requested."""
    size = len(pooled)
    if (wanted := pooling.dimensions) is not None:
        if wanted > size:
            return PooledVector(NO_NUMBERS, f"dimensions {wanted}: this model's vectors have {size}; ask for fewer")
        pooled = pooled[:wanted]
    if pooling.normalizes:
        pooled = pooled / max(float(np.sqrt(np.square(pooled).sum())), MIN_VECTOR_LENGTH)
    return PooledVector(pooled.astype(np.float32))
