"""The output of a step for one of its rows: tokens, or the vector of a prompt. Knows nothing of models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pd_cluster.model.sampling.sampler import NO_TOKEN, Sampled, SamplingRow


class NextTokens(NamedTuple):
    """The next tokens of a sequence, 1 or more, in order; the row's position is that of the first.

    All but the last are computed with the sequence's next step, as tokens that a prompt has. Tokens behind one that
    ends the sequence are dropped.
    """

    row: SamplingRow
    tokens: tuple[Sampled, ...]

    @property
    def is_stuck(self) -> bool:
        """Whether its masks leave no token to choose."""
        return self.tokens[0].token_id == NO_TOKEN


class PooledVector(NamedTuple):
    """The vector of a prompt. If there is a `problem`, the request cannot be served, and the vector is empty."""

    values: npt.NDArray[np.float32]  # [dimensions]
    problem: str = ""


RowOutput = NextTokens | PooledVector
