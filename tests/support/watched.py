"""Records each step of real engines: its numbers of sequences, tokens and moved blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from pd_cluster.engine.assembly import build_engine
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.runner.model_runner import ModelRunner


@dataclass
class Watched:
    """One engine's parts. The lists have an entry per step."""

    scheduler: StepScheduler
    runner: ModelRunner
    num_seqs: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_moves: list[int] = field(default_factory=list)


@contextmanager
def watching() -> Iterator[list[Watched]]:
    """Yields a list to which each engine made within the block is added."""
    made: list[Watched] = []
    build_core = build_engine.build_core

    def build_watched(*args: Any, **kwargs: Any) -> tuple[EngineCore, ModelRunner]:
        core, runner = build_core(*args, **kwargs)
        made.append(notes := Watched(core.scheduler, runner))
        run = core.run

        def noting(plan: Any, *rest: Any) -> Any:
            notes.num_seqs.append(len(plan.chunks))
            notes.num_tokens.append(plan.num_tokens)
            notes.num_moves.append(len(plan.moves))
            return run(plan, *rest)

        core.run = noting  # type: ignore[method-assign]
        return core, runner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_engine, "build_core", build_watched)
        yield made
