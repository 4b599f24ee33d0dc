"""The position of a model's tensor in a stored tensor."""

from __future__ import annotations

from typing import NamedTuple


class TensorPlace(NamedTuple):
    """`name`: the tensor's name in the model. `pieces`: the ranges [start, stop) of the stored dimension `dim` that
    form it; None: the whole dimension.

    `is_turned`: the stored tensor is transposed.
    """

    name: str
    pieces: tuple[tuple[int, int], ...] | None = None
    dim: int = 0
    is_turned: bool = False
