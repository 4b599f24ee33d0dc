"""The position of a model's tensor in a stored tensor."""

from __future__ import annotations

from typing import NamedTuple


class TensorPlace(NamedTuple):
    """`name`: the model's name. `pieces`: [start, stop) along the stored dimension `dim`, joined; None: all of it.

    `is_turned`: the stored tensor is transposed.
    """

    name: str
    pieces: tuple[tuple[int, int], ...] | None = None
    dim: int = 0
    is_turned: bool = False
