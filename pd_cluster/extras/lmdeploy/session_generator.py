"""The result of LMDeploy's `get_generator`: a handle to one session. Knows nothing of engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import Future
from typing import Any, Protocol

from pd_cluster.extras.lmdeploy.generation_config import GenOut


class Done:
    """The result of a completed call. Programs for LMDeploy's first version await it; later versions do not."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class Owner(Protocol):
    """The engine that has the session."""

    def generate(self, messages: Any, session_id: int, **options: Any) -> AsyncGenerator[GenOut, None]: ...

    def stop_session(self, session_id: int) -> Done: ...

    def end_session(self, session_id: int) -> Done: ...

    def turn(self, session_id: int) -> Future[None] | None: ...


class SessionGenerator:
    def __init__(self, owner: Owner, session_id: int) -> None:
        self._owner = owner
        self.session_id = session_id

    def generate(self, messages: Any, **options: Any) -> AsyncGenerator[GenOut, None]:
        """Runs a turn, with the options of AsyncEngine.generate."""
        return self._owner.generate(messages, self.session_id, **options)

    def cancel(self) -> None:
        """Ends the current answer."""
        self._owner.stop_session(self.session_id)

    def end(self) -> None:
        """Removes the session."""
        self._owner.end_session(self.session_id)

    async def idle(self) -> None:
        """Waits until the session has no current answer."""
        while (turn := self._owner.turn(self.session_id)) is not None:
            await asyncio.wait([asyncio.wrap_future(turn)])  # cancelling this does not cancel the turn
