"""What `LLM`, `pipeline` and `run-batch` stand on: a text service, and the engine or the worker processes behind it.

Knows nothing of whose names and shapes its callers have.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from pd_cluster.api.service import TextService
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.config import ChatConfig, EngineConfig

T = TypeVar("T")


class OfflineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Without `prefill` and `decode` the engine runs in this process; with both they are worker processes' numbers.

    `arguments` are further flags of `pd-cluster serve` for these.
    """

    engine: EngineConfig
    chat: ChatConfig = ChatConfig()
    prefill: int = 0
    decode: int = 0
    max_logprobs: int = 20
    arguments: tuple[str, ...] = ()


class Offline:
    """Ready when it is made, gone when it is closed: by `close`, by `with`, or at the interpreter's end.

    `service` belongs to the event loop of a thread of its own: what awaits it goes through `run`, `start` or `iterate`.
    """

    service: TextService
    checkpoint: Checkpoint

    def __init__(self, config: OfflineConfig) -> None:
        """Raises ConfigError, ModelError and the like."""
        raise NotImplementedError

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, awaited by this thread. Ctrl-C cancels it."""
        raise NotImplementedError

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Its result, later."""
        raise NotImplementedError

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Its items, as this thread asks for them. Leaving the iteration closes the generator."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends everything; once is enough."""
        raise NotImplementedError
