"""Reads, without torch, how a model prepares images.

Knows nothing of weights or pixels. media/kinds/image_kinds.py lists the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.errors import ModelError
from pd_cluster.media.folder_fields import FolderFields
from pd_cluster.media.image_rules import BICUBIC, BILINEAR, LANCZOS, ImageRules
from pd_cluster.media.kinds.image_kinds import KINDS

IMAGE_TYPES = tuple(KINDS)
PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
VIDEO_PREPROCESSOR = "video_preprocessor_config.json"
SWITCHES = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
FILTERS = {LANCZOS: "Lanczos", BILINEAR: "bilinear", BICUBIC: "bicubic"}
RESCALE = 1 / 255


@dataclass(frozen=True, slots=True)
class VisionPart:
    """How a model reads images. The input of its vision tower is (pixels * `rescale` - `mean`) / `std`."""

    model_type: str
    rules: ImageRules
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale: float
    files: tuple[Path, ...]  # the files with these settings, besides config.json

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any]) -> VisionPart:
        """Reads a folder whose `config` names one of IMAGE_TYPES. Raises ModelError."""
        model_type = str(config["model_type"])
        kind = KINDS[model_type]
        given = _given(folder, config)
        given.refuse(SWITCHES, False, "pictures without this preparation are not supported")
        resample = given.preprocessor.get("resample", kind.resample)
        if resample not in FILTERS:
            known = ", ".join(f"{number} ({name})" for number, name in FILTERS.items())
            raise ModelError(f"{given.file}: resample {resample!r}: supported are {known}")
        return cls(
            model_type,
            structs.replace(kind.rules_of(given), resample=resample),
            given.three("image_mean", kind.mean),
            given.three("image_std", kind.std),
            given.real("rescale_factor", RESCALE),
            tuple(file for name in (PREPROCESSOR, PROCESSOR, VIDEO_PREPROCESSOR) if (file := folder / name).exists()),
        )


def _given(folder: Path, config: Mapping[str, Any]) -> FolderFields:
    """Reads the preprocessor's files. Raises ModelError."""
    file = folder / PREPROCESSOR
    processor = _object(folder / PROCESSOR)
    inner = processor.get("image_processor")
    if file.exists():
        found = read_json(file)
        found = nested if isinstance(nested := found.get("image_processor"), dict) else found
    elif processor:
        file, found = folder / PROCESSOR, inner if isinstance(inner, dict) else processor
    else:
        raise ModelError(f"{file}: missing; a model that takes pictures needs it: copy it from the original")
    own = {**_object(folder / "tokenizer_config.json"), **processor}
    video = processor.get("video_processor")
    of_videos = (folder / PROCESSOR, video) if isinstance(video, dict) else (file, found)
    if not isinstance(video, dict) and (folder / VIDEO_PREPROCESSOR).exists():
        of_videos = folder / VIDEO_PREPROCESSOR, read_json(folder / VIDEO_PREPROCESSOR)
    return FolderFields(folder, config, file, found, own, lambda text: _token_id(folder, text), of_videos)


def _object(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _token_id(folder: Path, text: str) -> int | None:
    """Returns the id of a folder's control token. Raises ModelError."""
    added = read_json(folder / "tokenizer.json").get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == text and isinstance(token.get("id"), int):
            return int(token["id"])
    return None
