"""Rank 0's messages to its followers about steps, and work that a follower delays until it has rank 0's progress."""

from __future__ import annotations

import math
import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pd_cluster import wire
from pd_cluster.engine import build, hang
from pd_cluster.engine.handover.events import StopEngine
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.follower import LaneHost
from pd_cluster.engine.ranks.lead import ALL_LAYERS, LeadRunner
from pd_cluster.errors import InstanceLost
from pd_cluster.kv.layout import KVLayout, keys_and_values
from pd_cluster.model.batch import StepInput
from pd_cluster.transport.events import Drained

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, planes=keys_and_values(8), block_size=4, dtype="float32")
AT = ("conn", 1)


# ---- rank 0


class Runner:
    """Launches what it may; the steps have numbers in place of blocks."""

    eos_token_ids, vocab_size, goes_ahead, held = frozenset[int](), 8, True, None
    pool = SimpleNamespace(layout=LAYOUT)

    def __init__(self) -> None:
        self.may_launch = True
        self.progress_inside: list[to.Reached] = []
        self.lead: LeadRunner | None = None

    def can_launch(self, requests: Any) -> bool:
        return self.may_launch

    def step_of(self, chunks: Any) -> StepInput:
        return StepInput(np.array([[1, 5, 2, 1]]), np.array([7]), np.array([3, 4]))

    def sparing_pixels(self, parts: Any) -> list[Any]:
        return list(parts)

    def launch_step(self, step: StepInput, chunks: Any, after: Any, on_layer: Any) -> str:
        assert self.lead is not None
        self.progress_inside.append(self.lead.progress)
        return "tokens"


def lead_of(runner: Runner) -> tuple[LeadRunner, list[to.Step]]:
    from msgspec import msgpack

    told: list[to.Step] = []
    follower = SimpleNamespace(send_encoded=lambda data: told.append(msgpack.decode(data, type=to.Step)))
    runner.lead = LeadRunner(runner, [follower])  # type: ignore[arg-type,list-item]
    return runner.lead, told


def test_followers_are_told_of_every_step_that_is_launched() -> None:
    runner = Runner()
    lead, told = lead_of(runner)
    for runner.may_launch in (False, True):
        assert lead.can_launch([]) == runner.may_launch, "what its device can choose"
    assert (lead.progress, told) == (to.Reached(0, ALL_LAYERS), [])
    assert lead.goes_ahead
    assert lead.launch([]) == "tokens"  # type: ignore[comparison-overlap]
    assert lead.progress == to.Reached(1, ALL_LAYERS)
    assert lead.launch([], SimpleNamespace()) == "tokens"  # type: ignore[arg-type,comparison-overlap]
    assert lead.progress == to.Reached(2, ALL_LAYERS)
    assert runner.progress_inside == [to.Reached(1, 0), to.Reached(2, 0)]
    assert [(step.is_ahead, step.by_layers) for step in told] == [(False, False), (True, False)]
    assert np.frombuffer(told[0].input_ids, np.int64).tolist() == [7]
    assert np.frombuffer(told[1].rows, np.int64).tolist() == [1, 5, 2, 1]


# ---- a follower's ends of lanes


class Receiving:
    """A ReceiveEnd that records its calls."""

    received_nbytes = num_dropped = 0

    def __init__(self) -> None:
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")

    def put(self, frame: wire.KVFrame) -> None:
        self.done.append(f"frame {frame.sequence}")

    def meet(self, value: wire.LinkValue) -> None:
        self.done.append(f"met {value.key}")

    def begin(self, transfer_id: str, block_ids: list[int], first_token: int, num_tokens: int) -> None:
        self.done.append(f"begin {transfer_id}")

    def forget(self, transfer_id: str) -> None:
        self.done.append(f"forget {transfer_id}")

    def close(self) -> None:
        self.done.append("close")


def test_blocks_are_landed_in_when_what_still_writes_to_them_was_launched_here() -> None:
    """Rank 0 had launched step 2 when it released them; this rank knows of step 2, and is at step 1."""
    end, sent = Receiving(), list[Any]()
    host = LaneHost(SimpleNamespace(receive_end=lambda *_: end), LAYOUT, sent.append)  # type: ignore[arg-type]
    opened: Any = None
    host.handle(to.OpenReceive(*AT, "p", opened))
    host.handle(to.StartReceive(*AT))
    host.reached(to.Reached(1, ALL_LAYERS))
    host.handle(to.Begin(*AT, "t", [3], 0, 4, to.Reached(2, ALL_LAYERS)))
    host.handle(to.Frame(*AT, wire.KVFrame(0, b"", b"", 1)))
    host.handle(to.Forget(*AT, "t"))
    host.handle(to.CloseReceive(*AT))
    host.handle(to.Forget(*AT, "u"))
    host.handle(to.Value("another", 1, wire.LinkValue("dist", "k", b"")))  # an end that is not here
    host.handle(
        to.Value(*AT, wire.LinkValue("dist", "0/0", b"address"))
    )  # what two ranks agree about waits for no step
    assert end.done == ["start", "met 0/0"]
    host.reached(to.Reached(2, 1))
    assert end.done == ["start", "met 0/0"]
    assert not sent
    host.reached(to.Reached(2, ALL_LAYERS))
    assert end.done == ["start", "met 0/0", "begin t", "frame 0", "forget t", "close"]
    assert [message.event for message in sent] == [Drained("u")]


# ---- a rank is lost


def test_who_has_lost_a_rank_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    monkeypatch.setattr(build, "end_within", ends.append)
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    told: list[str] = []
    build.a_rank_is_lost(4, 3.0, inbox, told.append, 2, "has not answered for 3 s")
    assert told == ["rank 2 of 4 has not answered for 3 s"]
    event = inbox.get_nowait()
    assert isinstance(event, StopEngine)
    assert isinstance(event.error, InstanceLost)
    assert ends == [6.0]


def test_a_last_deadline_is_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier deadline is not put off, either."""
    armed: list[float] = [math.inf]
    clock = [100.0]
    monkeypatch.setattr(hang.faulthandler, "dump_traceback_later", lambda s, exit: armed.append(clock[0] + s))
    for step_limit_s, ends_at_s in ((600.0, 106.0), (4.0, 104.0)):
        clock[0] = 100.0
        monkeypatch.setattr(hang, "_alarm", alarm := hang._Alarm())
        came_round = hang.ends_when_hung(step_limit_s, lambda: clock[0])
        came_round()
        alarm.make_final(clock[0], 6.0)
        clock[0] += 3
        came_round()
        assert armed[-1] == ends_at_s
