"""Rank 0's side of an instance with several ranks.

The followers compute the same steps, which they receive over a `Channel` each. Does not know which requests the steps
serve.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import structs

from pd_cluster.checkpoints.replaced_weights import Stamp
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.rank_adapters import LeadAdapters
from pd_cluster.engine.ranks.rank_channel import Channel, encode
from pd_cluster.engine.scheduling.step_plan import Move
from pd_cluster.errors import InstanceLost
from pd_cluster.kv.tier_commands import AnyTierCommand, LowerKind
from pd_cluster.model.inputs.forward_batch import EncoderTotals, OnLayer, RunnerOutput
from pd_cluster.model.inputs.step_input import NO_DRAFTS, Drafts, StepInput
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.model.sampling.device_tokens import After, Tokens
from pd_cluster.types import Request, StateCopy
from pd_cluster.wire import SleepLevel

ALL_LAYERS = 1 << 30


class Watch:
    """Reads followers' messages, and pings all followers, also while they compute nothing.

    Calls `lost(rank, why)` when a follower is gone or has not answered for `timeout_s`.
    """

    def __init__(
        self,
        followers: Sequence[Channel],
        hear: Callable[[Any], None],
        lost: Callable[[int, str], None],
        timeout_s: float,
    ) -> None:
        self._followers = followers
        self._hear = hear
        self._lost = lost
        self._timeout_s = timeout_s
        self._heard_s = [time.monotonic()] * len(followers)
        self._is_over = threading.Event()

    def start(self) -> None:
        for at, channel in enumerate(self._followers):
            channel.start(f"rank {at + 1}", partial(self._read, at), partial(self._ended, at))
        threading.Thread(target=self._ask, name="ranks", daemon=True).start()

    def _read(self, at: int, message: Any) -> None:
        self._heard_s[at] = time.monotonic()
        if not isinstance(message, to.Pong):
            self._hear(message)

    def _ended(self, at: int) -> None:
        self._is_over.set()
        self._lost(at + 1, "is gone")

    def _ask(self) -> None:
        while not self._is_over.wait(min(1.0, self._timeout_s / 4)):
            for at, channel in enumerate(self._followers):
                if time.monotonic() - self._heard_s[at] > self._timeout_s:
                    self._lost(at + 1, f"has not answered for {self._timeout_s:g} s")
                    return
                try:
                    channel.send(to.Ping())
                except InstanceLost:  # the follower accepts no more messages
                    self._lost(at + 1, f"has accepted no message for {self._timeout_s:g} s")
                    return


class LeadRunner:
    """The engine's Runner: sends each step to the followers, then computes its own share."""

    def __init__(self, runner: ModelRunner, followers: Sequence[Channel]) -> None:
        self.runner = runner
        self.followers = followers
        self.eos_token_ids = runner.eos_token_ids
        self.vocab_size = runner.vocab_size
        self.goes_ahead = runner.goes_ahead
        self.progress = to.Reached(0, ALL_LAYERS)  # this rank's progress
        self._unit_rows: tuple[int, ...] = ()  # by member of the unit: its rows in the next step
        self.adapters = LeadAdapters(runner.held, len(followers), self._tell)

    @property
    def encoded(self) -> EncoderTotals:
        return self.runner.encoded

    def move(self, moves: Sequence[Move]) -> None:
        """Moves blocks on every rank.

        Counts as a step: a landing in a block must wait until the block's old content has moved.
        """
        self._tell(to.Moves(list(moves)))
        self.runner.move(moves)
        self.progress = to.Reached(self.progress.num_steps + 1, ALL_LAYERS)

    def order(self, kind: LowerKind, orders: Sequence[AnyTierCommand]) -> None:
        """See ModelRunner. Every rank executes the commands for its own share of the blocks."""
        self._tell(to.TierCommands(kind, list(orders)))
        self.runner.order(kind, orders)

    def close_tiers(self) -> None:
        self.runner.close_tiers()

    def expect(self, rows: Sequence[int]) -> None:
        """See ModelRunner. The followers receive the rows with the step."""
        self._unit_rows = tuple(rows)
        self.runner.expect(rows)

    def take_part(self) -> None:
        self._tell(to.TakePart(self._unit_rows))
        self.runner.take_part()

    def sleep(self, level: SleepLevel) -> None:
        """See ModelRunner. All ranks do this at the same time."""
        self._tell(to.Rest(level))
        self.runner.sleep(level)

    def change_weights(self, path: str, stamp: Stamp) -> None:
        """See ModelRunner. All ranks do this at the same time."""
        self._tell(to.LoadWeights(path, stamp))
        self.runner.change_weights(path, stamp)

    def can_launch(self, requests: Sequence[Request]) -> bool:
        return self.runner.can_launch(requests)

    def launch(
        self, chunks: Sequence[tuple[Request, int]], after: After | None = None, on_layer: OnLayer | None = None
    ) -> Tokens:
        """Launches a step on all ranks. Rank 0's device broadcasts tokens that the host does not know yet."""
        step = self.runner.step_of(chunks)
        advance = self._begin(step, after is not None, on_layer)
        tokens = self.runner.launch_step(step, chunks, after, advance)
        self.progress = to.Reached(self.progress.num_steps, ALL_LAYERS)
        return tokens

    def forward(
        self,
        chunks: list[tuple[Request, int]],
        on_layer: OnLayer | None = None,
        drafts: Drafts = NO_DRAFTS,
        keeps: Sequence[StateCopy] = (),
    ) -> RunnerOutput:
        step = self.runner.step_of(chunks, drafts, keeps=keeps)
        output = self.runner.compute(step, self._begin(step, False, on_layer))
        self.progress = to.Reached(self.progress.num_steps, ALL_LAYERS)
        return output

    def _begin(self, step: StepInput, is_ahead: bool, on_layer: OnLayer | None) -> OnLayer | None:
        """Sends the step to the followers.

        Returns a function that updates this rank's progress and then calls `on_layer`.
        """
        message = message_of(step, is_ahead, on_layer is not None)
        if self._unit_rows:
            message = structs.replace(message, unit_rows=self._unit_rows)
        if step.images:
            for rank, follower in enumerate(self.followers, start=1):
                parts = self.runner.without_foreign_pixels(step.images, rank)
                follower.send(structs.replace(message, images=tuple(to.StepImage(*part) for part in parts)))
        else:
            self._tell(message)
        num_steps = self.progress.num_steps + 1
        self.progress = to.Reached(num_steps, 0)
        if on_layer is None:
            return None

        def advance(num_layers: int) -> None:
            self.progress = to.Reached(num_steps, num_layers)
            on_layer(num_layers)

        return advance

    def _tell(self, message: to.RankMessage) -> None:
        data = encode(message)
        for follower in self.followers:
            follower.send_encoded(data)


def message_of(step: StepInput, is_ahead: bool, by_layers: bool) -> to.Step:
    """Returns the message for a step, without the step's images."""
    rows, input_ids, blocks = (each.tobytes() for each in (step.rows, step.input_ids, step.blocks))
    rope_positions, adapters, virtual, leaders, keeps = (
        b"" if each is None else each.tobytes()
        for each in (step.rope_positions, step.adapters, step.virtual, step.leaders, step.keeps)
    )
    return to.Step(
        *(rows, input_ids, blocks, is_ahead, by_layers, rope_positions, adapters, (), virtual, leaders),
        further=tuple((each.nums_blocks.tobytes(), each.blocks.tobytes()) for each in step.further),
        keeps=keeps,
    )
