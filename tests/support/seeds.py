"""Names the seed of a random exploration whose assertion fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def of_seed(seed: int) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
