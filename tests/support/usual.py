"""Architectures that stand for the others where a quick run cannot try all of them: the slow one does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

USUAL = frozenset({"llama", "gpt2", "qwen3", "gemma2", "mixtral", "gpt_oss", "phi3", "glm4"})


def usual_first(architectures: Iterable[str]) -> list[Any]:
    """Returns parameters of a test: those that are not usual are slow."""
    return [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in architectures]
