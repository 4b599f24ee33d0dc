"""The environment, disk and clock of a fault's cluster, if it needs its own.

Knows nothing of the faults themselves.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager


class Ground:
    """The ordinary environment. Its processes get these arguments and the variables of `stand`."""

    restart = "on-failure"
    arguments: tuple[str, ...] = ()

    def problem(self) -> str:
        """Returns why this environment is impossible on this machine, for this user; "" if it is possible."""
        return ""

    def stand(self) -> AbstractContextManager[Mapping[str, str]]:
        return contextlib.nullcontext({})


ORDINARY = Ground()


@contextlib.contextmanager
def standing_on(ground: Ground) -> Iterator[None]:
    """Sets the environment's variables in this process, so that all its children inherit them."""
    with ground.stand() as variables:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        tempfile.tempdir = None  # Python caches it
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            tempfile.tempdir = None
