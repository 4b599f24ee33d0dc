"""A model's tokenizer as transformers has it, for users' own programs. The engine has its own (text/tokenizer.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pd_cluster.errors import ModelError


def transformers_tokenizer(folder: Path) -> Any:
    """Opens a folder's tokenizer. Runs no code of the folder. Raises ModelError."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: transformers cannot read its tokenizer: {error}") from None
