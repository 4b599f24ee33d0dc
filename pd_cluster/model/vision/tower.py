"""A checkpoint's vision tower: one picture a call, so that its features depend on nothing but its pixels.

The most recently used are kept. Knows nothing of requests, nor of how a tower is built.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from msgspec import structs

from pd_cluster.checkpoints.vision import VisionPart
from pd_cluster.devices.device import Device
from pd_cluster.media.rules import ImageRules
from pd_cluster.model.batch import Encoded, on_device
from pd_cluster.model.image_rows import ImagePart, ImageRows
from pd_cluster.model.vision.classes import CLASSES
from pd_cluster.model.vision.pixels import Pixels
from pd_cluster.types import Image


class Tower:
    """Computes pictures, and keeps the features of up to `num_kept_tokens` tokens, least recently used out first."""

    def __init__(self, module: Any, part: VisionPart, device: Device, dtype: torch.dtype, num_kept_tokens: int) -> None:
        """`dtype`: that in which features are kept, the activations' own."""
        self.rules: ImageRules = part.rules
        self.encoded = Encoded()
        self._module, self._part, self._device, self._dtype = module, part, device, dtype
        self._pixels = Pixels(part)
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # by ImagePart.key, see `encode`
        self.num_kept_tokens = num_kept_tokens

    def sparing_pixels(self, parts: Sequence[ImagePart]) -> list[ImagePart]:
        """Returns the parts, without pixels where all ranks keep the features: they compute the same steps."""
        return [
            part._replace(image=structs.replace(part.image, pixels=b"")) if part.key in self._kept else part
            for part in parts
        ]

    def rows(self, parts: Sequence[ImagePart], num_tokens: int) -> ImageRows:
        """Returns the features of a step's rows; pictures that are not kept are computed, from their pixels.

        Features that are kept before the step serve all of it, whatever gives way in it.
        """
        found = {part.key: self._kept.get(part.key) for part in parts}
        taken, rows = [], []
        for part in parts:
            places = np.array(self.rules.places(part.image), dtype=np.int64)
            first, last = np.searchsorted(places, (part.start, part.start + part.num_tokens))
            features = found[part.key]
            if features is None:
                features = found[part.key] = self.encode(part.image)
            assert features.shape[1] == len(places), "a tower's features are not those that its rules count"
            taken.append(features[:, first:last])
            rows.append(places[first:last] + (part.row - part.start))
        self._keep(found)
        arrays = {"rows": np.concatenate(rows)}
        if self.rules.marks:
            arrays["seen"] = np.concatenate([np.arange(part.row, part.row + part.num_tokens) for part in parts])
            arrays["read"] = np.setdiff1d(np.arange(num_tokens), arrays["seen"])
        there = on_device(arrays, self._device)
        features = taken[0] if len(taken) == 1 else torch.cat(taken, dim=1)
        return ImageRows(there["rows"], features, (there["seen"], there["read"]) if self.rules.marks else None)

    def _keep(self, features: Mapping[bytes, torch.Tensor | None]) -> None:
        """Keeps a step's features as the most recently used, as many as there is room for.

        The last picture is kept however large it is: chunks of its prompt follow.
        """
        for key, each in features.items():
            if each is not None:
                self._kept[key] = each
                self._kept.move_to_end(key)
        num_tokens = sum(each.shape[1] for each in self._kept.values())
        least = 1 if self.num_kept_tokens else 0
        while num_tokens > self.num_kept_tokens and len(self._kept) > least:
            _, dropped = self._kept.popitem(last=False)
            num_tokens -= dropped.shape[1]

    @torch.inference_mode()
    def encode(self, image: Image) -> torch.Tensor:
        """Computes a picture's features, [1 + num_deep, num_features, hidden_size]."""
        assert image.pixels, "a picture that is to be computed came without pixels"
        begun_s = time.monotonic()
        layers = CLASSES[self._part.model_type].encode(self._module, self._pixels, image, self._device)
        features = torch.stack(layers).to(self._dtype)
        took_s = time.monotonic() - begun_s
        self.encoded = Encoded(self.encoded.num_images + 1, self.encoded.seconds + took_s)
        return features

    @property
    def num_encoded(self) -> int:
        return self.encoded.num_images
