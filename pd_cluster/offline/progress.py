"""How far a call is, and how fast: a bar on a terminal, lines elsewhere. Knows nothing of who makes the outputs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

NUM_LINES = 10  # of a call, at most


class Progress:
    """`is_shown` False shows nothing."""

    def __init__(
        self,
        num_requests: int,
        is_shown: bool = True,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = sys.stderr if out is None else out
        self._num_requests = num_requests
        self._is_shown = is_shown
        self._clock = clock
        self._started_s = clock()
        self._num_done = self._num_in = self._num_out = 0
        self._bar: Any = None
        if is_shown and self._out.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=num_requests, desc="Processed prompts", file=self._out, dynamic_ncols=True)

    def add(self, num_in: int, num_out: int) -> None:
        """One more has ended, with so many tokens."""
        before = self._num_done * NUM_LINES // self._num_requests
        self._num_done += 1
        self._num_in += num_in
        self._num_out += num_out
        if self._bar is not None:
            self._bar.set_postfix_str(self._speed, refresh=False)
            self._bar.update()
        elif self._is_shown and self._num_done * NUM_LINES // self._num_requests > before:
            print(f"Processed prompts: {self._num_done}/{self._num_requests} [{self._speed}]", file=self._out)

    @property
    def _speed(self) -> str:
        elapsed_s = max(self._clock() - self._started_s, 1e-6)
        return f"{self._num_in / elapsed_s:.1f} tokens/s in, {self._num_out / elapsed_s:.1f} tokens/s out"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
