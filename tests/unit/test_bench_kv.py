"""`bench kv`: its children's commands, its judgement, and that a failing or hanging child is named and ended."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks.child import ChildFailed
from benchmarks.engine.goals import Goal
from benchmarks.kv import bench as kv
from benchmarks.kv import child as kv_child
from benchmarks.kv import streaming as kv_streaming
from benchmarks.kv.bench import KVBench, make_bench
from benchmarks.kv.child import Child
from benchmarks.kv.goals import (
    KVReport,
    figure,
    handover_goals,
    is_balanced,
    late_share,
    latencies,
    other_goals,
    results,
    shares,
    show,
)
from benchmarks.kv.spec import Answer, Command, Handover, LastTransfer, MakePool, Move
from pd_cluster.client.streaming import Sample
from pd_cluster.errors import ConfigError
from pd_cluster.transport.table import choices_for

ROUNDS = [
    {"memcpy 16 MiB": 20.0, "shm off 16 MiB": 18.0, "shm on 16 MiB": 10.0, "block shm on_ms": 0.5},
    {"memcpy 16 MiB": 10.0, "shm off 16 MiB": 8.0, "shm on 16 MiB": 7.0, "block shm on_ms": 0.7},
    {"memcpy 16 MiB": 10.0, "shm off 16 MiB": 9.0, "shm on 16 MiB": 5.0, "block shm on_ms": 1.7},
]


def by_name(goals: list[Goal]) -> dict[str, Goal]:
    return {goal.name: goal for goal in goals}


# ---- ratios and goals


def test_a_share_is_of_the_baseline_of_its_own_round() -> None:
    assert shares(ROUNDS, "shm off", "memcpy", 16) == pytest.approx([0.9, 0.8, 0.9])
    assert shares([*ROUNDS, {"shm off 16 MiB": 1.0}], "shm off", "memcpy", 16) == pytest.approx([0.9, 0.8, 0.9])
    assert shares(ROUNDS, "dist off", "gloo", 16) == []


def test_goals_of_handovers_begin_at_16_mib() -> None:
    goals = by_name(handover_goals(ROUNDS, ("shm",), (1, 16)))
    assert list(goals) == ["shm, checks off, 16 MiB: share of memcpy", "shm, checks on, 16 MiB: share of memcpy"]
    assert [(goal.goal, goal.met) for goal in goals.values()] == [(0.85, True), (0.60, False)]


def test_every_transport_has_its_own_goals() -> None:
    goals = handover_goals([{}], ("shm", "dist"), (16, 256))
    assert [goal.goal for goal in goals] == [0.85, 0.85, 0.60, 0.60, 0.90, 0.90, 0.80, 0.80]
    assert not any(goal.met for goal in goals), "what was not measured is not met"


def test_one_block_is_judged_by_the_median() -> None:
    (goal,) = other_goals(ROUNDS)
    assert (goal.values, goal.met) == ([0.5, 0.7, 1.7], True)


def test_late_share_is_one_where_nothing_is_hidden() -> None:
    assert late_share(throttled_gap_s=6.5, free_gap_s=0.5, transfer_s=6.0) == pytest.approx(1.0)
    assert late_share(0.8, 0.2, 6.0) == pytest.approx(0.1)


def test_a_computation_that_differs_from_the_link_is_no_measurement() -> None:
    assert is_balanced(5.0, 5.2)
    assert not is_balanced(4.0, 5.0)
    slow = {"token one, slow link_s": 4.0}
    goal = other_goals([slow])[0]
    assert not goal.met
    assert "speed changed" in goal.row()[-1]
    assert other_goals([slow, {**slow, "late_share": 0.08}])[0].met


def test_rounds_of_streaming() -> None:
    free, slow = (Sample(ttft_s=ttft, itl_s=[gap, 0.1]) for ttft, gap in ((4.0, 0.1), (5.1, 0.5)))
    (figures,) = kv_streaming._judged(free, slow, 5.0)
    assert figures["late_share"] == pytest.approx(0.08)
    (figures,) = kv_streaming._judged(free, slow, 10.0)
    assert "late_share" not in figures


def test_latencies_of_single_blocks() -> None:
    found = latencies("shm on", [1.0, 2.0, 3.0], [1.003, 2.001, 3.002], [1.002, 2.0005, 3.001])
    assert found["block shm on_ms"] == pytest.approx(2.0)
    assert found["block shm on p95_ms"] == pytest.approx(2.9)
    assert found["block shm on one way_ms"] == pytest.approx(1.0)


def test_the_report_has_every_figure_and_the_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = KVReport("pd-cluster bench kv", results(ROUNDS), handover_goals(ROUNDS, ("shm",), (16,)))
    report.write(str(tmp_path / "out.json"))
    written = json.loads((tmp_path / "out.json").read_text())
    assert [(r["name"], r["value"], r["unit"], r["better"]) for r in written["results"]] == [
        ("memcpy 16 MiB", 10.0, "GB/s", "higher"),
        ("shm off 16 MiB", 9.0, "GB/s", "higher"),
        ("shm on 16 MiB", 7.0, "GB/s", "higher"),
        ("block shm on_ms", 0.7, "ms", "lower"),
    ]
    assert [goal["met"] for goal in written["goals"]] == [True, False]
    show(report, "title")
    assert "share of memcpy" in capsys.readouterr().out


# ---- the command


def test_flags() -> None:
    bench = make_bench(5, "", "", streaming=True, quick=False)
    assert (bench.transports, bench.sizes_mib, bench.streaming) == (choices_for("cpu"), (1, 16, 256), True)
    assert make_bench(5, "dist", "16", streaming=False, quick=False).command == (
        "pd-cluster bench kv --rounds 5 --transports dist --sizes 16 --no-streaming"
    )
    quick = make_bench(5, "", "", streaming=True, quick=True)
    assert (quick.rounds, quick.sizes_mib, quick.streaming) == (1, (1,), False)
    for transports, sizes, flag in (("rdma", "", "--transports rdma"), ("", "big", "--sizes"), ("", "0", "--sizes")):
        with pytest.raises(ConfigError, match=flag):
            make_bench(1, transports, sizes, streaming=False, quick=False)


def test_moves_fit_the_pool_and_are_large_enough() -> None:
    bench = KVBench()
    for size, move in bench.moves:
        assert move.num_blocks * move.num_under_way <= bench.num_pool_blocks
        assert move.count >= move.num_under_way
        assert size < 16 or move.nbytes >= 512 << 20
    assert figure("shm on", 16) == "shm on 16 MiB"


def test_commands_travel() -> None:
    move = Move(num_blocks=2, count=3, num_under_way=1)
    assert move.nbytes == 6 << 20
    for command in (Handover("shm on", move), LastTransfer("dist off"), MakePool(8)):
        assert msgspec.json.decode(msgspec.json.encode(command), type=Command) == command


# ---- children


def child_of(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    script = tmp_path / "child.py"
    script.write_text(code)

    class Runs(Child):
        pass

    popen = kv_child.subprocess.Popen
    monkeypatch.setattr(
        kv_child.subprocess, "Popen", lambda command, **more: popen([sys.executable, str(script)], **more)
    )
    return Runs("child", tmp_path)


def test_a_child_that_cannot_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = msgspec.json.encode(Answer(error="no such lane")).decode()
    child = child_of(f"import sys\nfor line in sys.stdin: print({answer!r}, flush=True)", tmp_path, monkeypatch)
    with pytest.raises(ChildFailed, match="child: no such lane"):
        child.ask(MakePool(1), 10)
    child.end()


def test_a_child_that_has_ended_says_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_of("import sys; print('the reason', file=sys.stderr)", tmp_path, monkeypatch)
    with pytest.raises(ChildFailed, match=r"(?s)has ended.*the reason"):
        child.ask(MakePool(1), 10)
    child.end()


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = child_of("import time; time.sleep(60)", tmp_path, monkeypatch)
    with pytest.raises(ChildFailed, match=r"did not answer within 0\.2 s"):
        child.ask(MakePool(1), 0.2)
    started_s = time.monotonic()
    child.end()
    assert time.monotonic() - started_s < 10


def test_what_has_landed_must_be_what_was_sent() -> None:
    class Fake:
        def __init__(self, *answers: Answer) -> None:
            self.answers = list(answers)

        def ask(self, command: object, deadline_s: float) -> Answer:
            return self.answers.pop(0)

    lane = kv.Lane(transport="shm", checked=True)
    move = Move(num_blocks=2, count=1, num_under_way=1)
    for blocks, fits in (([4, 5], True), ([4, 9], False)):
        sender, receiver = Fake(Answer(), Answer(blocks=[4, 5])), Fake(Answer(blocks=blocks, landings_s=[1.0]))
        pair = kv.Pair(KVBench(), sender, receiver)  # type: ignore[arg-type]
        if fits:
            assert pair._hand_over(lane, move).landings_s == [1.0]
        else:
            with pytest.raises(ChildFailed, match="not what was sent"):
                pair._hand_over(lane, move)
