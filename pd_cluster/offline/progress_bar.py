"""Shows progress and speed of a call: a bar on a terminal, otherwise lines. Knows nothing of engines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO

NUM_LINES = 10  # maximum per call


class Progress:
    """Shows progress if `is_shown`."""

    def __init__(
        self,
        num_requests: int,
        is_shown: bool = True,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stderr if out is None else out
        self._num_requests = num_requests
        self._clock = clock
        self._started_s = clock()
        self._num_done = self._num_in = self._num_out = 0
        self._bar: Any = None
        # A program's stderr can be closed or missing.
        self._out: TextIO | None = stream if is_shown and stream is not None and not stream.closed else None
        with self._nobody_has_to_read():
            self._open_bar()

    def add(self, num_in: int, num_out: int) -> None:
        """Counts a complete answer and its tokens."""
        before = self._num_done * NUM_LINES // self._num_requests
        self._num_done += 1
        self._num_in += num_in
        self._num_out += num_out
        with self._nobody_has_to_read():
            if self._bar is not None:
                self._bar.set_postfix_str(self._speed, refresh=False)
                self._bar.update()
            elif self._out is not None and self._num_done * NUM_LINES // self._num_requests > before:
                print(f"Processed prompts: {self._num_done}/{self._num_requests} [{self._speed}]", file=self._out)

    def _open_bar(self) -> None:
        if self._out is not None and self._out.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._num_requests, desc="Processed prompts", file=self._out, dynamic_ncols=True)

    @contextlib.contextmanager
    def _nobody_has_to_read(self) -> Iterator[None]:
        """Stops showing progress if the pipe or terminal is closed; the call continues, so that no answers are lost."""
        try:
            yield
        except (OSError, ValueError):
            self._out = self._bar = None

    @property
    def _speed(self) -> str:
        elapsed_s = max(self._clock() - self._started_s, 1e-6)
        return f"{self._num_in / elapsed_s:.1f} tokens/s in, {self._num_out / elapsed_s:.1f} tokens/s out"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._nobody_has_to_read():
            if self._bar is not None:
                self._bar.close()
