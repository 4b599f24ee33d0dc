"""An offline engine without a model: a text service on a separate event loop, over a router that plays back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from pd_cluster.cluster.routing.router import Router
from pd_cluster.errors import InstanceLost
from pd_cluster.offline.loop_thread import LoopThread
from pd_cluster.offline.offline_service import OfflineConfig
from pd_cluster.service.text_service import TextService
from pd_cluster.types import RequestSpec
from tests.support.checkpoints import EOS_ID, TEMPLATE, make_tokenizer, text_checkpoint
from tests.support.playback import Playback
from tests.support.service_configs import service_config


class PlaybackOffline:
    """Like `OfflineService`, without a model. `prompts`: the text of each prompt sent."""

    def __init__(self, folder: Path, config: OfflineConfig, says: str, has_template: bool) -> None:
        self.config = config
        rust = make_tokenizer()
        self.checkpoint = text_checkpoint(folder, rust, TEMPLATE if has_template else "")
        self.router = HeldPlayback([*rust.encode(says).ids, EOS_ID])
        self.router.last_reason = "stop"
        self.service = TextService(
            cast(Router, self.router),
            self.checkpoint,
            service_config(max_model_len=config.engine.max_model_len or 4096, chat=config.chat),
        )
        self._loop = LoopThread("playback")

    @property
    def prompts(self) -> list[str]:
        return [self.service.tokenizer.decode(ids, skip_special_tokens=False) for ids in self.router.prompts]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run(work)

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return self._loop.start(work)

    def iterate(self, items: AsyncGenerator[Any, None]) -> Iterator[Any]:
        return self._loop.iterate(items)

    def close(self) -> None:
        self._loop.close()


class HeldPlayback(Playback):
    """Records prompts, fails for prompts that contain the token `fails_for`, and can stop after the first token."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__(token_ids)
        self.prompts: list[list[int]] = []
        self.fails_for: int | None = None
        self.holds = False  # stops after the first token
        self.sessions: list[str] = []

    async def serve(self, order: RequestSpec, *rest: Any) -> AsyncGenerator[Any, None]:  # type: ignore[override]
        prompt = order.prompt_token_ids
        self.prompts.append(prompt)
        self.sessions.append(order.session)
        async with contextlib.aclosing(super().serve(order, *rest)) as tokens:  # type: ignore[type-var]
            async for token in tokens:
                if self.fails_for in prompt:
                    raise InstanceLost("the engine has failed")
                yield token
                if self.holds:
                    await asyncio.Event().wait()
