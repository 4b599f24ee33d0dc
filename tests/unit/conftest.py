"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.fake_device import FakeModule


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yields the module's `World`; asserts afterwards that nothing of any request is left."""
    made = request.module.World()
    yield made
    made.assert_home()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModule]:
    """Yields a fake accelerator; aborts afterwards what its groups still do."""
    from tests.support.fake_device import FakeGroup, install

    yield install(monkeypatch)
    for group in FakeGroup.made:
        group.aborted.set()
