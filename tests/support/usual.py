"""Architectures that stand for the others where a quick run cannot try all of them: the slow one does."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

USUAL = frozenset({"llama", "gpt2", "qwen3", "gemma2", "mixtral", "gpt_oss", "phi3", "glm4"})


def usual_first(architectures: Iterable[str]) -> list[Any]:
    """Returns parameters of a test: those that are not usual are slow."""
    return slow_but(USUAL, architectures)


def slow_but(quick: Container[str], names: Iterable[str]) -> list[Any]:
    """Returns parameters of a test: those that are not among `quick` are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
