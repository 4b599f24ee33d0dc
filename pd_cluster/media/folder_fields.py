"""Reads a model folder's picture settings. Each ModelError names the file and the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_cluster.errors import ModelError

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class FolderFields:
    """`file`: the preprocessor's file. `token_id_of`: returns the id of a control token by its text, or None."""

    folder: Path
    config: Mapping[str, Any]
    file: Path
    preprocessor: Mapping[str, Any]
    processor: Mapping[str, Any]  # the merged fields of processor_config.json and tokenizer_config.json
    token_id_of: Callable[[str], int | None]
    video: tuple[Path, Mapping[str, Any]]  # the video preprocessor's file and content

    @property
    def tower(self) -> Mapping[str, Any]:
        return part(self.config, "vision_config")

    def count(self, name: str, default: int | None = None, of_tower: bool = False) -> int:
        """Returns an integer of at least 1 from config.json, or from its part for the vision tower."""
        value = (self.tower if of_tower else self.config).get(name, default)
        return self._whole(self.folder / CONFIG, f"vision_config.{name}" if of_tower else name, value)

    def number(self, name: str, default: int) -> int:
        """Returns an integer of at least 1 from the preprocessor's file."""
        return self._whole(self.file, name, self.preprocessor.get(name, default))

    def token_id(self, *names: str, default: int | None = None) -> int:
        """Returns the token id in config.json under one of these names."""
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"{self.folder / CONFIG}: {names[0]} {value!r}: must be a token's id")
        vocab_size = part(self.config, "text_config").get("vocab_size", self.config.get("vocab_size"))
        if isinstance(vocab_size, int) and value >= vocab_size:
            raise ModelError(f"{self.folder / CONFIG}: {names[0]} {value}: beyond vocab_size {vocab_size}")
        return value

    def control_token(self, name: str, default: str) -> int:
        """Returns the id of the processor's control token of this name."""
        text = self.token_text(name, default)
        found = self.token_id_of(text)
        if found is None:
            raise ModelError(f"{self.folder / 'tokenizer.json'}: no token {text!r}; pictures need it ({name})")
        return found

    def token_text(self, name: str, default: str) -> str:
        """Returns the text of the processor's control token of this name."""
        text = self.processor.get(name, default)
        text = text.get("content") if isinstance(text, dict) else text
        return text if isinstance(text, str) and text else default

    def height_and_width(self, name: str, default: tuple[int, int]) -> tuple[int, int]:
        """Returns a size from the preprocessor's file."""
        given = self.preprocessor.get(name, {"height": default[0], "width": default[1]})
        sides = [given, given] if isinstance(given, int) else [part({name: given}, name).get(x) for x in SIDES]
        height, width = (self._whole(self.file, f"{name}.{side}", x) for side, x in zip(SIDES, sides, strict=True))
        return height, width

    def edge(self, name: str, edge: str, default: int) -> int:
        """Returns a size from the preprocessor's file by a key such as `shortest_edge`."""
        given = self.preprocessor.get(name, default)
        value = given.get(edge) if isinstance(given, Mapping) else given
        return self._whole(self.file, f"{name}.{edge}", value)

    def three(self, name: str, default: tuple[float, ...]) -> tuple[float, float, float]:
        value = self.preprocessor.get(name, default)
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise ModelError(f"{self.file}: {name} {value!r}: must be three numbers, for red, green and blue")
        red, green, blue = (self._real(name, each) for each in value)
        return red, green, blue

    def real(self, name: str, default: float) -> float:
        return self._real(name, self.preprocessor.get(name, default))

    def refuse(self, names: tuple[str, ...], value: bool, why: str) -> None:
        """Raises ModelError if a switch of the preprocessor has this value."""
        for name in names:
            if self.preprocessor.get(name) is value:
                raise ModelError(f"{self.file}: {name} {str(value).lower()}: {why}")

    def _whole(self, file: Path, name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{file}: {name} {value!r}: must be a whole number of at least 1")
        return value

    def _real(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.file}: {name} {value!r}: must be a number")
        return float(value)


SIDES = ("height", "width")


def part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a nested object; an empty one if there is none."""
    found = whole.get(name)
    return found if isinstance(found, Mapping) else {}
