"""Reads an embedding model's named prompts, which are put before texts, from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.errors import RequestError

FILE = "config_sentence_transformers.json"
# Cohere's name of a prompt -> embedding models' names for it; if none matches, no prompt is used.
COHERES: Mapping[str, tuple[str, ...]] = {
    "search_document": ("document", "passage"),
    "search_query": ("query",),
    "classification": (),
    "clustering": (),
}


class EmbeddingPrompts(NamedTuple):
    by_name: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> EmbeddingPrompts:
        """Reads `task_instructions` of config.json, otherwise sentence-transformers' prompts. Raises ModelError."""
        found = _texts(read_json(folder / "config.json").get("task_instructions"))
        if not found and (file := folder / FILE).exists():
            found = _texts(read_json(file).get("prompts"))
        return cls(found)

    def of(self, name: str | None) -> str:
        """Returns the prompt of this name; "" without a name. Raises RequestError for an unknown name."""
        if name is None:
            return ""
        for each in (name, *COHERES.get(name, ())):
            if each in self.by_name:
                return self.by_name[each]
        if name not in COHERES:
            known = ", ".join([*self.by_name, *COHERES])
            raise RequestError(f"input_type: {name[:100]!r} is not known; known are {known}", param="input_type")
        return ""


def _texts(given: Any) -> dict[str, str]:
    found = given if isinstance(given, dict) else {}
    return {name: text for name, text in found.items() if isinstance(name, str) and isinstance(text, str)}
