"""`bench overload`: capacity by the clock, counted requests, ratios, goals; and the timing of paced workers."""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.peers.paced_workers import PacedWorker
from benchmarks.peers.router_workers import Leg
from benchmarks.router.overload import SHAPES, WARM_S, OverloadBench, Run, Shape, _results, make_bench
from benchmarks.router.targets import Pace
from pd_cluster import wire
from pd_cluster.client.streaming import Sample
from pd_cluster.errors import ConfigError
from pd_cluster.types import Order, Sampling

PREFILL = Shape("prefill", Pace(1000.0, 8), 11, 1, 1.0)
DECODE = Shape("decode", Pace(1e6, 10), 100, 4, 1.0)


def complete(ttft_s: float, num_prompt: int = 300, num_output: int = 11, e2e_s: float = 1.0) -> Sample:
    return Sample(ttft_s=ttft_s, e2e_s=e2e_s, num_prompt_tokens=num_prompt, num_output_tokens=num_output, status=200)


def refused(after_s: float) -> Sample:
    return Sample(e2e_s=after_s, status=429, error="HTTP 429: it would wait")


def run_of(*samples: tuple[float, Sample], took_s: float = 13.0, shape: Shape = PREFILL, share: float = 3.0) -> Run:
    return Run(shape, "a run", share, took_s, list(samples))


def test_capacity_is_what_the_clock_allows() -> None:
    assert PREFILL.capacity == pytest.approx(2 * 1000 / 300)
    assert DECODE.capacity == pytest.approx(2 * 10 / (100 * 0.04))
    assert all(10 < shape.capacity < 20 for shape in SHAPES)


def test_goodput_is_what_was_done_of_what_could_be() -> None:
    samples = [(WARM_S + at, complete(0.1)) for at in range(9)]
    assert run_of(*samples).goodput == pytest.approx(9 * 0.15 / 10)
    late = (12.5, complete(0.1))  # it ends after requests have stopped coming
    early = (0.0, complete(0.1))
    failed = (5.0, Sample(error="HTTP 500", status=500, num_prompt_tokens=300))
    assert run_of(*samples, late, early, failed).goodput == pytest.approx(9 * 0.15 / 10)


def test_what_comes_while_it_warms_up_does_not_count() -> None:
    run = run_of((0.0, refused(9.0)), (1.0, complete(9.0)), (4.0, refused(0.01)), (5.0, complete(0.2)))
    assert (run.first_token_s(99), run.refusal_s(99)) == (0.2, 0.01)
    assert (len(run.refused), len(run.complete), len(run.failed)) == (1, 1, 0)


def test_goals() -> None:
    normal = run_of((4.0, complete(0.5)), share=0.8)
    overload = run_of(*((WARM_S + at / 10, complete(0.9)) for at in range(66)), (5.0, refused(0.05)))
    guest = run_of((4.0, complete(0.1)), (5.0, complete(0.2)), (6.0, refused(0.1)), share=0.1)
    found = {result.name.partition(": ")[2]: result for result in _results(PREFILL, [normal, overload, guest], True)}
    assert found["served at 3 x capacity"].met
    assert found["first token p99, 3 x to 80 %"].value == pytest.approx(1.8)
    assert found["refusal p99"].met
    assert found["guest of a hog, answered"].value == pytest.approx(2 / 3)
    assert not found["guest of a hog, answered"].met
    assert all(result.met is None for result in _results(PREFILL, [normal, overload, guest], False))


def test_arguments() -> None:
    assert make_bench(10.0, None, "", 0, quick=True).seconds == WARM_S + 2
    assert make_bench(10.0, 2.0, "decode", 3, quick=False) == OverloadBench(
        seconds=10.0, max_queue_s=2.0, shapes=("decode",), seed=3
    )
    with pytest.raises(ConfigError, match="--shapes 'both': expected some of prefill,decode"):
        make_bench(10.0, None, "both", 0, quick=False)
    with pytest.raises(ConfigError, match="--seconds 1"):
        make_bench(1.0, None, "", 0, quick=False)


def paced(role: str, max_num_seqs: int = 4) -> PacedWorker:
    """One without a mailbox."""
    worker = cast(Any, PacedWorker.__new__(PacedWorker))
    worker.me = SimpleNamespace(role=role)
    worker._spec = SimpleNamespace(
        prefill_tokens_per_s=1000.0, max_num_seqs=max_num_seqs, step_s=0.02, token_ids=[1, 2, 3]
    )
    worker._free_s, worker._waiting, worker._num_running = 0.0, deque(), 0
    worker._expected, worker._running, worker._landed, worker._ends, worker.links = {}, {}, set(), {}, {}
    worker._schedulers, worker._outstanding = {}, {}
    worker.sent = []
    worker._send = lambda conn, tokens, ends, prompts: worker.sent.extend(tokens)
    worker._handed_over = lambda peer, transfer_id: None
    worker._note = lambda *_: None
    return cast(PacedWorker, worker)


def leg(request_id: str, num_prompt: int = 100, n: int = 1, max_tokens: int = 3, read_s: float = 0.0) -> Leg:
    sampling = Sampling(n=n, max_tokens=max_tokens)
    submit = wire.Submit(request_id, 0, f"{request_id}-0", "prefill", "", Order([1] * num_prompt, sampling), 0.0)
    return Leg("to-scheduler", submit, read_s)


def test_a_paced_prefill_instance_takes_its_time() -> None:
    worker, now_s = paced("prefill"), time.monotonic()
    for at in range(3):
        worker._submitted(leg(f"r{at}", read_s=now_s - 0.25))  # 0.1 s each, one after another
    worker.prefill_step()
    sent = [token.request_id for token in cast(Any, worker).sent]
    assert sent == ["r0", "r1"]
    assert (worker.load().num_waiting, worker.load().num_queued_tokens) == (1, 100)


def test_a_paced_decode_instance_has_so_many_places() -> None:
    worker = paced("decode", max_num_seqs=4)
    for name, n in (("r0", 3), ("r1", 2), ("r2", 1)):
        worker._submitted(leg(name, n=n))
        worker.landed(f"{name}-0")
    worker.decode_step()
    sent = cast(Any, worker).sent
    assert [(token.request_id, token.index, token.position) for token in sent] == [
        ("r0", index, 0) for index in range(3)
    ]
    assert (worker.load().num_running, worker.load().num_waiting) == (3, 2)
    worker._aborted("r1-0")
    worker.decode_step()
    worker.decode_step()
    assert worker.load().num_running == 1  # r0 has ended, r2 has begun
    for _ in range(3):
        worker.decode_step()
    assert (worker.load().num_running, worker._running) == (0, {})
    assert {token.request_id for token in sent} == {"r0", "r2"}
