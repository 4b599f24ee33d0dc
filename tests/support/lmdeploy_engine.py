"""LMDeploy's engine interface over a fake that plays back an answer, and whole turns of its sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.extras.lmdeploy import pipeline_setup
from pd_cluster.extras.lmdeploy.async_engine import AsyncEngine
from pd_cluster.extras.lmdeploy.pipeline import pipeline
from pd_cluster.messages import GenOut
from pd_cluster.offline.offline_service import OfflineConfig
from tests.support.playback_offline import PlaybackOffline

ANSWER = "Hello there."
NUM_TOKENS = len(ANSWER) + 1  # one token per byte, and the end token
Make = Callable[..., tuple[AsyncEngine, PlaybackOffline]]


def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A fixture: yields `make(**arguments of pipeline)`, which returns an engine with a fixed answer, and its fake."""
    made: list[PlaybackOffline] = []

    def build(says: str = ANSWER, has_template: bool = True, **arguments: Any) -> tuple[AsyncEngine, PlaybackOffline]:
        def offline(config: OfflineConfig) -> PlaybackOffline:
            made.append(PlaybackOffline(tmp_path, config, says, has_template))
            return made[-1]

        monkeypatch.setattr(pipeline_setup, "OfflineService", offline)
        return pipeline("/models/x", **arguments), made[-1]

    yield build
    for each in made:
        each.close()
    logging.getLogger("pd_cluster").setLevel(logging.NOTSET)


async def steps_of(engine: AsyncEngine, *arguments: Any, **options: Any) -> list[GenOut]:
    return [out async for out in engine.generate(*arguments, **options)]


def turn(engine: AsyncEngine, *arguments: Any, **options: Any) -> GenOut:
    """Runs one whole turn on a new event loop."""
    (out,) = asyncio.run(steps_of(engine, *arguments, stream_response=False, **options))
    return out
