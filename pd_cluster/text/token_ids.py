"""The token ids of a text, for processes that need nothing else of a tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer

from pd_cluster.errors import ModelError


def token_ids_of(folder: Path, text: str) -> list[int]:
    """Encodes `text` with the folder's tokenizer.json and the special tokens that it adds. Raises ModelError."""
    try:
        ids: list[int] = RustTokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    except Exception as error:  # the library raises no narrower type
        raise ModelError(f"{folder}/tokenizer.json: cannot be read: {error}") from None
    return ids
