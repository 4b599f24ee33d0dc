"""The output of a step for one of its rows: a token, or a prompt's vector. Knows nothing of models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pd_cluster.model.sampling.sampler import NO_TOKEN, Sampled, SamplingRow


class NextToken(NamedTuple):
    """The next token of a sequence, at the row's position."""

    row: SamplingRow
    sampled: Sampled

    @property
    def is_stuck(self) -> bool:
        """Whether the sequence's masks leave no token to choose."""
        return self.sampled.token_id == NO_TOKEN


class PooledVector(NamedTuple):
    """The vector of a prompt. If there is a `problem`, the request cannot be served and the vector is empty."""

    values: npt.NDArray[np.float32]  # [dimensions]
    problem: str = ""


RowOutput = NextToken | PooledVector
