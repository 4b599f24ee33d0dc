"""The tokens of a step that belong to pictures. Does not know how features are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pd_cluster.types import Image, Request, RequestSpec, Span

Ints = npt.NDArray[np.int64]


class ImagePart(NamedTuple):
    """Tokens [start, start + num_tokens) of a picture, in rows [row, row + num_tokens) of a step.

    Requests with different salts have different keys, so that the response time does not reveal which pictures another
    tenant has sent.
    """

    row: int
    start: int
    num_tokens: int
    key: bytes  # the cache key of the picture's features
    image: Image
    is_landed: bool = False  # whether rank 0 has received the features from an encoder


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The features of a step's picture rows, which replace their embeddings.

    `features`, [1 + num_deep, num_rows, hidden_size]: the first plane replaces the rows' embeddings; the others are
    added to the residual stream, one after each of the first layers (DeepStack).
    """

    rows: torch.Tensor  # [num_rows] int64
    features: torch.Tensor
    experts: tuple[torch.Tensor, torch.Tensor] | None = None  # rows of pictures and the marks around them; other rows

    def embed(self, x: torch.Tensor) -> None:
        """Replaces embeddings x, [num_tokens, hidden_size], in place."""
        x[self.rows] = self.features[0].to(x.dtype)

    @property
    def num_deep(self) -> int:
        return len(self.features) - 1

    def deepen(self, x: torch.Tensor, layer_idx: int) -> None:
        """Adds this layer's features to the residual stream, in place; call it after the layer."""
        if layer_idx < self.num_deep:
            x[self.rows] += self.features[1 + layer_idx].to(x.dtype)


def key_limits(parts: Sequence[ImagePart], positions: Ints) -> Ints:
    """Returns the end of the keys visible to each row, [num_tokens], when a picture's tokens attend to the whole
    picture.

    `positions`: the rows' positions in their sequences. If the step computes tokens of a picture, it computes all that
    remain.
    """
    limits = positions + 1
    for part in parts:
        rows = slice(part.row, part.row + part.num_tokens)
        limits[rows] = limits[rows.stop - 1]
    return limits


def image_parts(chunks: Sequence[tuple[Request, int]]) -> tuple[ImagePart, ...]:
    """Returns the parts of pictures that a step computes, in row order."""
    found: list[ImagePart] = []
    row = 0
    for request, num_tokens in chunks:
        if request.order.images:
            found += _parts_of(request, num_tokens, row)
        row += num_tokens
    return tuple(found)


def _parts_of(request: Request, num_tokens: int, row: int) -> list[ImagePart]:
    first = request.num_computed_tokens
    order, last = request.order, first + num_tokens
    if order.spans[-1].stop <= first:
        return []
    parts = []
    for span, image in zip(order.spans, order.images, strict=True):
        start, stop = max(span.start, first), min(span.stop, last)
        if start < stop:
            key = feature_key(span, order)
            parts.append(ImagePart(row + start - first, start - span.start, stop - start, key, image))
    return parts


def feature_key(span: Span, order: RequestSpec) -> bytes:
    """Returns ImagePart.key for the picture in this span of a request."""
    return span.digest + order.cache_salt.encode()
