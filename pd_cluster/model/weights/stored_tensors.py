"""Reads the tensors of a safetensors file under the model's names, whatever the file's layout, and only on request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pd_cluster.checkpoints.tensor_layouts import Layout, WeightFolder
from pd_cluster.checkpoints.tensor_place import TensorPlace

BF16 = "BF16"


class StoredTensor:
    """Behaves like a safetensors slice: indexing reads the part of a stored tensor that is a tensor of the model."""

    def __init__(self, stored: Any, place: TensorPlace, is_bf16: bool) -> None:
        """`is_bf16`: the stored 16-bit words are bfloat16, although the file names another dtype."""
        self._stored, self._place, self._is_bf16 = stored, place, is_bf16

    def get_shape(self) -> list[int]:
        shape = list(self._stored.get_shape())
        if self._place.pieces is not None:
            shape[self._place.dim] = sum(stop - start for start, stop in self._place.pieces)
        return shape[::-1] if self._place.is_turned else shape

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        given = index if isinstance(index, tuple) else (index,)
        shape = self.get_shape()
        if not shape:
            return self._read([], (0, 0))
        bounds = [each.indices(length)[:2] for each, length in zip(given, shape, strict=False)]
        bounds += [(0, length) for length in shape[len(bounds) :]]
        if self._place.is_turned:
            bounds.reverse()
        read = [self._read(bounds, piece) for piece in self._pieces_within(bounds)]
        found = read[0] if len(read) == 1 else torch.cat(read, dim=self._place.dim)
        return found.t() if self._place.is_turned else found

    def _pieces_within(self, bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Converts bounds in the model's tensor to ranges of stored elements, along the sliced dimension."""
        start, stop = bounds[self._place.dim]
        if self._place.pieces is None:
            return [(start, stop)]
        found, before = [], 0
        for first, end in self._place.pieces:
            left, right = max(start - before, 0), min(stop - before, end - first)
            if left < right:
                found.append((first + left, first + right))
            before += end - first
        return found or [(0, 0)]

    def _read(self, bounds: list[tuple[int, int]], piece: tuple[int, int]) -> torch.Tensor:
        places = [slice(*piece) if dim == self._place.dim else slice(*each) for dim, each in enumerate(bounds)]
        found: torch.Tensor = self._stored[tuple(places)]
        return found.view(torch.bfloat16) if self._is_bf16 else found


class StoredFile:
    """A file whose layout differs from transformers'; has the methods of a safetensors file."""

    def __init__(self, opened: Any, layout: Layout) -> None:
        self._tensors: dict[str, StoredTensor] = {}
        for key in opened.keys():  # noqa: SIM118  (not a dict)
            stored = opened.get_slice(key)
            dtype = str(stored.get_dtype())
            is_bf16 = layout.dtypes.get(dtype, dtype) == BF16 != dtype
            for place in layout.places(key, tuple(stored.get_shape())):
                self._tensors[place.name] = StoredTensor(stored, place, is_bf16)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name][:].contiguous()


@contextmanager
def opened(file: Path, folder: WeightFolder) -> Iterator[Any]:
    """Yields one of a folder's files: a safetensors file, or a StoredFile. Raises safetensors' own errors, and
    ModelError.
    """
    with safe_open(file, framework="pt") as found:
        yield found if folder.layout is None else StoredFile(found, folder.layout)
