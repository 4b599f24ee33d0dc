"""Reads the message of an expected error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pd_cluster.errors import ConfigError


def fault(work: Callable[[], object], kind: type[Exception] = ConfigError) -> str:
    """Returns the message of the error that `work` raises; asserts that it has one line."""
    with pytest.raises(kind) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)
