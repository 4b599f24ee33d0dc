"""The models that take pictures, by the model_type of the whole model. Each has one entry and one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from pd_cluster.media.folder_fields import FolderFields
from pd_cluster.media.image_rules import BICUBIC, BILINEAR, ImageRules
from pd_cluster.media.kinds import ernie, glm, internvl, llava, pixtral, qwen

Three = tuple[float, float, float]

CLIP_MEAN: Three = (0.48145466, 0.4578275, 0.40821073)  # the values of OpenAI's CLIP
CLIP_STD: Three = (0.26862954, 0.26130258, 0.27577711)
HALF: Three = (0.5, 0.5, 0.5)


class PictureKind(NamedTuple):
    """`rules_of`: reads a folder's rules. The other fields are the preprocessor's defaults in transformers."""

    rules_of: Callable[[FolderFields], ImageRules]
    mean: Three = CLIP_MEAN
    std: Three = CLIP_STD
    resample: int = BICUBIC


KINDS: Mapping[str, PictureKind] = {
    "qwen2_vl": PictureKind(qwen.qwen2),
    "qwen2_5_vl": PictureKind(qwen.qwen2_5),
    "qwen3_vl": PictureKind(qwen.qwen3),
    "qwen3_vl_moe": PictureKind(qwen.qwen3),
    "llava": PictureKind(llava.llava),
    "internvl": PictureKind(internvl.internvl),
    "mistral3": PictureKind(pixtral.mistral3),
    "gemma3": PictureKind(llava.gemma3, HALF, HALF, BILINEAR),
    "glm4v": PictureKind(glm.glm4v),
    "ernie4_5_vl_moe": PictureKind(ernie.ernie),
}


class WrittenRules(msgspec.Struct, frozen=True):
    """Rules in a form for messages to other processes."""

    name: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, rules: ImageRules) -> WrittenRules:
        return cls(type(rules).__name__, msgspec.to_builtins(rules))

    def read(self) -> ImageRules:
        (kind,) = (each for each in _kinds_of(ImageRules) if each.__name__ == self.name)
        return msgspec.convert(self.fields, kind)


def _kinds_of(rules: type[ImageRules]) -> set[type[ImageRules]]:
    return {rules}.union(*map(_kinds_of, rules.__subclasses__()))
