"""The transformers tokenizer of a model, for users' own programs. The engine uses text/tokenizer.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pd_cluster.errors import ModelError


def transformers_tokenizer(folder: Path) -> Any:
    """Opens a folder's tokenizer without running code from the folder. Raises ModelError."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: transformers cannot read its tokenizer: {error}") from None
