"""Reads without torch which models take pictures, and how.

Knows nothing of weights or of pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.errors import ModelError
from pd_cluster.media.rules import ImageRules

# model_type of the whole model -> the defaults of its vision config and of its preprocessor
QWEN2 = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "image_token_id": 151655}
QWEN3 = {**QWEN2, "patch_size": 16}
IMAGE_TYPES: Mapping[str, Mapping[str, int]] = {
    "qwen2_vl": QWEN2,
    "qwen2_5_vl": QWEN2,
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
}
FILES = ("preprocessor_config.json", "processor_config.json")
SIZES = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
OLD_SIZES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
MEAN = (0.48145466, 0.4578275, 0.40821073)  # of transformers' image processor of Qwen2-VL: OpenAI's CLIP
STD = (0.26862954, 0.26130258, 0.27577711)
SWITCHES = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
BICUBIC = 3
RESCALE = 1 / 255


@dataclass(frozen=True, slots=True)
class VisionPart:
    """How a model reads pictures. Its pixels, times `rescale`, less `mean`, by `std`, are what its tower takes."""

    model_type: str
    rules: ImageRules
    image_token_id: int
    num_frames: int  # a picture is repeated so often: the tower reads videos, too
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float
    files: tuple[Path, ...]  # that say so, beside config.json

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any]) -> VisionPart:
        """Reads a folder whose `config` names one of IMAGE_TYPES. Raises ModelError."""
        model_type = str(config["model_type"])
        own = dict(IMAGE_TYPES[model_type])
        tower = config.get("vision_config")
        numbers = {name: _count(folder, name, {**own, **(tower if isinstance(tower, dict) else {})}) for name in own}
        numbers["image_token_id"] = _count(folder, "image_token_id", {**own, **config})
        file, given = _preprocessor(folder)
        for name, of_tower in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
            if given.get(name, numbers[of_tower]) != numbers[of_tower]:
                raise ModelError(f"{file}: {name} {given[name]}: config.json has {of_tower} {numbers[of_tower]}")
        if off := [name for name in SWITCHES if given.get(name) is False]:
            raise ModelError(f"{file}: {off[0]} false: pictures that are not so prepared are not supported")
        if given.get("resample", BICUBIC) != BICUBIC:
            raise ModelError(f"{file}: resample {given['resample']}: only {BICUBIC}, bicubic, is supported")
        sizes = {name: _area(file, name, given) for name in SIZES}
        rules = ImageRules(
            numbers["patch_size"], numbers["spatial_merge_size"], sizes["shortest_edge"], sizes["longest_edge"]
        )
        return cls(
            model_type,
            rules,
            numbers["image_token_id"],
            numbers["temporal_patch_size"],
            _three(file, "image_mean", given, MEAN),
            _three(file, "image_std", given, STD),
            _number(file, "rescale_factor", given.get("rescale_factor", RESCALE)),
            (file,),
        )


def _preprocessor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file that says how pictures are prepared, and what it says. Raises ModelError."""
    for name in FILES:
        if (file := folder / name).exists():
            found = read_json(file)
            inner = found.get("image_processor")
            return file, inner if isinstance(inner, dict) else found
    raise ModelError(f"{folder / FILES[0]}: missing; a model that takes pictures needs it: copy it from the original")


def _count(folder: Path, name: str, given: Mapping[str, Any]) -> int:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{folder / 'config.json'}: {name} {value!r}: must be a whole number of at least 1")
    return value


def _area(file: Path, name: str, given: Mapping[str, Any]) -> int:
    """Returns a bound of a picture's area, which has an older name, too."""
    size = given.get("size")
    value = (size if isinstance(size, dict) else {}).get(name) or SIZES[name]
    if given.get(OLD_SIZES[name]) is not None:
        value = given[OLD_SIZES[name]]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{file}: {OLD_SIZES[name]} {value!r}: must be a whole number of pixels")
    return value


def _three(file: Path, name: str, given: Mapping[str, Any], default: tuple[float, ...]) -> tuple[float, float, float]:
    value = given.get(name, default)
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ModelError(f"{file}: {name} {value!r}: must be three numbers, for red, green and blue")
    red, green, blue = (_number(file, name, each) for each in value)
    return red, green, blue


def _number(file: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(f"{file}: {name} {value!r}: must be a number")
    return float(value)
