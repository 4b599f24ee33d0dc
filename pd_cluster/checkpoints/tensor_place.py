"""Where a tensor of a model is in a stored one."""

from __future__ import annotations

from typing import NamedTuple


class TensorPlace(NamedTuple):
    """`name`: in the model. `pieces`: [start, stop) along the stored dimension `dim`, joined; None: all of it.

    `is_turned`: the two dimensions are stored the other way round.
    """

    name: str
    pieces: tuple[tuple[int, int], ...] | None = None
    dim: int = 0
    is_turned: bool = False
