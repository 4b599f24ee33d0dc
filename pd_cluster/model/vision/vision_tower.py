"""A checkpoint's vision tower. It computes pictures one by one, so that features depend only on the pixels.

One of the ranks that share a model computes a picture, and all of them cache its features. Does not deal with requests,
nor with how a tower is built.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs

from pd_cluster.checkpoints.vision_config import VisionPart
from pd_cluster.devices.device import Device
from pd_cluster.errors import InstanceLost
from pd_cluster.media.image_rules import ImageRules
from pd_cluster.model.inputs.forward_batch import EncoderTotals, on_device
from pd_cluster.model.inputs.image_rows import ImagePart, ImageRows
from pd_cluster.model.parallel.rank_group import Group
from pd_cluster.model.vision.pixel_values import Pixels
from pd_cluster.model.vision.vision_classes import CLASSES
from pd_cluster.types import Image


class FeatureForm(NamedTuple):
    """The form of a picture's features."""

    dtype: torch.dtype  # also of the activations
    num_layers: int  # 1 + num_deep
    hidden_size: int


class Tower:
    """Computes pictures, and caches the features of up to `num_kept_tokens` tokens. Drops the least recently used
    first.

    Ranks that share a model compute the same steps, so they cache the same features: see docs/protocol/handover.md,
    "Images".
    """

    def __init__(
        self,
        module: Any,
        part: VisionPart,
        device: Device,
        features: FeatureForm,
        num_kept_tokens: int,
        group: Group,
    ) -> None:
        self.rules: ImageRules = part.rules
        self.encoded = EncoderTotals()
        self.num_encoded = 0  # images that this rank has computed
        self._module, self._part, self._device, self._dtype = module, part, device, features.dtype
        self._pixels = Pixels(part)
        self.kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # by ImagePart.key, see `encode`
        self.num_kept_tokens = num_kept_tokens
        # On rank 0's host: features from an encoder that no step has used yet, see extras/encoders.
        self.landed: dict[bytes, torch.Tensor] = {}
        self._widths, self.group = (features.num_layers, features.hidden_size), group

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def shape_of(self, image: Image) -> tuple[int, int, int]:
        """Returns the shape of a picture's features, [1 + num_deep, num_features, hidden_size]."""
        num_layers, hidden_size = self._widths
        return num_layers, len(self.rules.places(image)), hidden_size

    def marked(self, parts: Sequence[ImagePart]) -> tuple[ImagePart, ...]:
        """Returns a step's parts for all ranks, marked if their features have arrived on this rank."""
        if not self.landed:
            return tuple(parts)
        return tuple(part._replace(is_landed=part.key in self.landed) for part in parts)

    def without_foreign_pixels(self, parts: Sequence[ImagePart], rank: int) -> list[ImagePart]:
        """Returns a step's parts for another rank, with pixels only for the pictures that the other rank computes."""
        own = {key for key, owner in self._owners(parts).items() if owner == rank}
        return [
            part if part.key in own else part._replace(image=structs.replace(part.image, pixels=b"")) for part in parts
        ]

    def _owners(self, parts: Sequence[ImagePart]) -> dict[bytes, int]:
        """Returns, for each picture that is not cached, the rank that computes it, by key."""
        missing = {part.key: part.image for part in parts if part.key not in self.kept and not part.is_landed}
        nums_pixels = [math.prod(self.rules.shape(image)) for image in missing.values()]
        landed = {part.key: 0 for part in parts if part.key not in self.kept and part.is_landed}
        return landed | dict(zip(missing, shared(nums_pixels, self.group.size), strict=True))

    def rows(self, parts: Sequence[ImagePart], num_tokens: int) -> ImageRows:
        """Returns the features of a step's rows. Pictures that are not cached are computed from their pixels.

        Features that were cached before the step stay available during the step. Raises InstanceLost if another rank
        could not compute its pictures.
        """
        found = {part.key: self.kept[part.key] for part in parts if part.key in self.kept}
        if owners := self._owners(parts):
            found |= self._compute({part.key: part.image for part in parts if part.key in owners}, owners)
        taken, rows = [], []
        for part in parts:
            places = np.array(self.rules.places(part.image), dtype=np.int64)
            first, last = np.searchsorted(places, (part.start, part.start + part.num_tokens))
            features = found[part.key]
            assert features.shape[1] == len(places), "a tower's features do not match the count of its rules"
            taken.append(features[:, first:last])
            rows.append(places[first:last] + (part.row - part.start))
        self._keep({part.key: found[part.key] for part in parts})
        arrays = {"rows": np.concatenate(rows)}
        if self.rules.marks:
            arrays["seen"] = np.concatenate([np.arange(part.row, part.row + part.num_tokens) for part in parts])
            arrays["read"] = np.setdiff1d(np.arange(num_tokens), arrays["seen"])
        there = on_device(arrays, self._device)
        features = taken[0] if len(taken) == 1 else torch.cat(taken, dim=1)
        return ImageRows(there["rows"], features, (there["seen"], there["read"]) if self.rules.marks else None)

    def _keep(self, features: Mapping[bytes, torch.Tensor]) -> None:
        """Caches a step's features as the most recently used, as far as they fit.

        The last picture is cached whatever its size, because more chunks of its prompt may follow.
        """
        for key, each in features.items():
            self.kept[key] = each
            self.kept.move_to_end(key)
        num_tokens = sum(each.shape[1] for each in self.kept.values())
        least = 1 if self.num_kept_tokens else 0
        while num_tokens > self.num_kept_tokens and len(self.kept) > least:
            _, dropped = self.kept.popitem(last=False)
            num_tokens -= dropped.shape[1]

    def _compute(self, images: Mapping[bytes, Image], owners: Mapping[bytes, int]) -> dict[bytes, torch.Tensor]:
        """Computes this rank's share of the pictures, and exchanges features with other ranks in the pictures' order.

        Ranks exchange features only after each has computed its share. So a rank that fails to compute a picture does
        not block the others: it raises its own error, and the errors of the others name its rank.
        """
        begun_s = time.monotonic()
        rank, size = self.group.rank, self.group.size
        found: dict[bytes, torch.Tensor] = {}
        num_landed = 0
        try:
            for key, image in images.items():
                if key in self.landed:
                    found[key] = self.landed.pop(key).to(self._device.torch_name)
                    num_landed += 1
                elif owners[key] == rank:
                    found[key] = self.encode(image)
                    self.num_encoded += 1
                else:
                    found[key] = self._empty(image)
        except Exception:
            with contextlib.suppress(InstanceLost):  # this rank's own error is more specific
                self.group.least(rank)
            raise
        if (failed := self.group.least(size)) < size:
            raise InstanceLost(f"rank {failed} of {size} could not compute a picture")
        if size > 1:
            for key in images:
                found[key] = self.group.spread(found[key], owners[key])
        took_s = time.monotonic() - begun_s
        self.encoded = EncoderTotals(self.encoded.num_images + len(images) - num_landed, self.encoded.seconds + took_s)
        return found

    def _empty(self, image: Image) -> torch.Tensor:
        return torch.empty(self.shape_of(image), dtype=self._dtype, device=self._device.torch_name)

    @torch.inference_mode()
    def encode(self, image: Image) -> torch.Tensor:
        """Computes a picture's features, [1 + num_deep, num_features, hidden_size]."""
        assert image.pixels, "the pixels of a picture to compute are missing"
        layers = CLASSES[self._part.model_type].encode(self._module, self._pixels, image, self._device)
        return torch.stack(layers).to(self._dtype)


def shared(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Returns the rank of each item. Each goes to the rank with the least so far, the largest items first."""
    loads, found = [0] * num_ranks, [0] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        found[at] = loads.index(min(loads))
        loads[found[at]] += sizes[at]
    return found
