"""A bar on stderr that counts prompts. Knows nothing of them."""

from __future__ import annotations

from typing import Any, Self


class Progress:
    def __init__(self, total: int, is_shown: bool) -> None:
        self._bar: Any = None
        if is_shown:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=total)

    def one_more(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
