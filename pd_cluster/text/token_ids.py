"""Returns a text's token ids, for processes that use a tokenizer for nothing else."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer

from pd_cluster.checkpoints.sentencepiece import tokenizer_text
from pd_cluster.errors import ModelError


def token_ids_of(folder: Path, text: str) -> list[int]:
    """Encodes `text` with the folder's tokenizer, which adds its special tokens. Raises ModelError."""
    try:
        tokenizer = RustTokenizer.from_str(tokenizer_text(folder / "tokenizer.json"))
        tokenizer.no_truncation()  # tokenizer.json may still have a truncation from training
        tokenizer.no_padding()
        ids: list[int] = tokenizer.encode(text).ids
    except ModelError:
        raise
    except Exception as error:  # the library raises no narrower type
        raise ModelError(f"{folder}/tokenizer.json: cannot be read: {error}") from None
    return ids


def vocabulary_of(folder: Path) -> dict[str, int]:
    """Returns the ids of all tokens of the folder's tokenizer, added ones included. Raises ModelError."""
    try:
        found: dict[str, int] = RustTokenizer.from_str(tokenizer_text(folder / "tokenizer.json")).get_vocab()
    except ModelError:
        raise
    except Exception as error:  # the library raises no narrower type
        raise ModelError(f"{folder}/tokenizer.json: cannot be read: {error}") from None
    return found
