"""Describes where the states of a step's sequences are kept in recurrent layers, and which rows advance each state.

A state is a block of one token: planes of a layer's recurrence and of its convolution, all float32. A segment is a run
of rows of one sequence. Its rows are computed in order, starting from the state in `block`, and the resulting state is
written back there. If `keep` names a block, that block receives a copy of the resulting state (a checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pd_cluster.kv.kv_pool import KVPool

NO_BLOCK = -1


class Segment(NamedTuple):
    """Rows [first, stop) of the step. Segments of one sequence are consecutive and share `block`."""

    first: int
    stop: int
    block: int
    keep: int = NO_BLOCK


@dataclass(slots=True)
class StateRows:
    """All segments of a step, in row order; `table` holds them as [num_segments, 4] int32.

    A sequence starts with a state of zeros.
    """

    pool: KVPool
    segments: tuple[Segment, ...]
    table: npt.NDArray[np.int32]
    kernel_state: object = None  # kept by the kernels between layers

    @classmethod
    def of(cls, pool: KVPool, segments: Iterable[Segment]) -> StateRows:
        rows = tuple(segments)
        return cls(pool, rows, np.array(rows, dtype=np.int32).reshape(-1, 4))


def segments_of(
    nums_tokens: Sequence[int], blocks: Sequence[int], keeps: Sequence[tuple[int, int, int]] = ()
) -> Iterator[Segment]:
    """Yields the segments of a step: each sequence's rows, cut after each row whose state is copied.

    `blocks`: the blocks of the sequences' states. `keeps`, sorted: the index of a sequence, its number of tokens in
    this step before the copy, and the block that receives the copy.
    """
    first, rest = 0, list(reversed(keeps))
    for seq, (num_tokens, block) in enumerate(zip(nums_tokens, blocks, strict=True)):
        start, stop = first, first + num_tokens
        while rest and rest[-1][0] == seq:
            _, after, keep = rest.pop()
            assert first < start + after <= stop
            yield Segment(first, start + after, block, keep)
            first = start + after
        if first < stop:
            yield Segment(first, stop, block)
        first = stop
    assert not rest
