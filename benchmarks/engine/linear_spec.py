"""Messages between `benchmarks linear` and its child."""

from __future__ import annotations

import msgspec

from benchmarks.tiny_model import ModelShape


class LinearSpec(msgspec.Struct, kw_only=True):
    shape: ModelShape
    rows: list[int]
    rounds: int
    num_threads: int


class LinearTimes(msgspec.Struct, kw_only=True):
    """`products_s`: form of the weights -> number of rows -> seconds of one layer's products."""

    products_s: dict[str, dict[int, float]]
    nbytes: dict[str, int]  # of one layer's weights
    read_bytes_per_s: float
    bf16_way: str
