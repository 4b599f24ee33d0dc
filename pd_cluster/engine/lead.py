"""Rank 0's side of an instance with several ranks: what it computes, its followers compute, too.

One follower is one `Channel`. Knows nothing of what the steps are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pd_cluster.engine import rank_messages as to
from pd_cluster.engine.channel import Channel, encode
from pd_cluster.engine.core import OnLayer
from pd_cluster.engine.scheduler import Move
from pd_cluster.model.batch import step_input
from pd_cluster.model.runner import ModelRunner
from pd_cluster.types import Request

ALL_LAYERS = 1 << 30


class LeadRunner:
    """The engine's Runner: tells the followers a step, then takes its own share in it."""

    def __init__(self, runner: ModelRunner, followers: Sequence[Channel]) -> None:
        self._runner = runner
        self._followers = followers
        self.eos_token_ids = runner.eos_token_ids
        self.vocab_size = runner.vocab_size
        self.progress = to.Progress(0, ALL_LAYERS)  # of this rank

    def move(self, moves: Sequence[Move]) -> None:
        self._tell(to.Moves(list(moves)))
        self._runner.move(moves)

    def forward(self, chunks: list[tuple[Request, int]], on_layer: OnLayer | None = None) -> torch.Tensor:
        step = step_input(chunks, self._runner.pool.layout.block_size)
        self._tell(to.Step(step.rows.tobytes(), step.input_ids.tobytes(), step.blocks.tobytes()))
        num_steps = self.progress.num_steps + 1
        self.progress = to.Progress(num_steps, 0)

        def advance(num_layers: int) -> None:
            self.progress = to.Progress(num_steps, num_layers)
            if on_layer is not None:
                on_layer(num_layers)

        logits = self._runner.compute(step, advance if on_layer is not None else None)
        self.progress = to.Progress(num_steps, ALL_LAYERS)
        return logits

    def _tell(self, message: to.Message) -> None:
        data = encode(message)
        for follower in self._followers:
            follower.send_encoded(data)
