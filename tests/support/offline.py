"""`LLM` over a router that plays back tokens instead of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from pd_cluster import LLM
from pd_cluster.cluster.routing.router import Router
from pd_cluster.offline.llm_adapters import RequestedAdapters
from pd_cluster.offline.offline_service import OfflineConfig
from pd_cluster.service.text_service import TextService
from tests.support.checkpoints import make_tokenizer, text_checkpoint
from tests.support.playback import Playback
from tests.support.service_configs import service_config

T = TypeVar("T")
LIMIT = 1000


class FakeOffline:
    """Has the attributes of OfflineService that `LLM` uses; `service.router` is the Playback."""

    def __init__(self, config: OfflineConfig, folder: Path, text: str, dtype: str) -> None:
        self.config = config
        self.is_closed = False
        self.router = Playback(make_tokenizer().encode(text).ids)
        self.checkpoint = text_checkpoint(folder, make_tokenizer(), dtype=dtype)
        limit = config.engine.max_model_len or LIMIT
        self.service = TextService(
            cast(Router, self.router),
            self.checkpoint,
            service_config(
                max_model_len=limit,
                names=(),
                engine=config.engine,
                seed=config.engine.seed,
                max_logprobs=config.max_logprobs,
                chat=config.chat,
            ),
        )
        self.adapters = RequestedAdapters(config.engine.adapters, self.service.names.adapters, None)
        self._runner = asyncio.Runner()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._runner.run(self.service.close())
            self._runner.close()


MakeLLM = Callable[..., tuple[LLM, FakeOffline]]


def same(**fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (given, expected) for fields that reach the engine with unchanged names and values."""
    return fields, fields


def fake_llms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    """A fixture: yields `make(text, **arguments)`, which makes an LLM that always generates that text."""
    made: list[FakeOffline] = []

    def make(text: str = "", dtype_on_disk: str = "bfloat16", **arguments: Any) -> tuple[LLM, FakeOffline]:
        def offline(config: OfflineConfig) -> FakeOffline:
            made.append(FakeOffline(config, tmp_path, text, dtype_on_disk))
            return made[-1]

        monkeypatch.setattr("pd_cluster.offline.offline_llm.OfflineService", offline)
        llm = LLM(**{"model": str(tmp_path), **arguments})
        return llm, made[-1]

    yield make
    for each in made:
        each.close()
