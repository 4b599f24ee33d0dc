"""Selects the architectures that quick runs test; slow runs test all of them."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

USUAL = frozenset({"llama", "gpt2", "qwen3", "gemma2", "mixtral", "gpt_oss", "phi3", "glm4"})


def usual_first(architectures: Iterable[str]) -> list[Any]:
    """Returns a test's parameters, with architectures outside USUAL marked slow."""
    return slow_but(USUAL, architectures)


def slow_but(quick: Container[str], names: Iterable[str]) -> list[Any]:
    """Returns a test's parameters, with names outside `quick` marked slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
