"""`bench engine`: its requests, its judgement, and that one engine's end does not stop the others."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks.child import ChildFailed, run_child
from benchmarks.engine import bench as engine
from benchmarks.engine import workloads as engine_workloads
from benchmarks.engine.bench import PEERS, EngineBench, absent_peers, check_lengths, make_bench
from benchmarks.engine.goals import (
    Goal,
    equal_tokens,
    guided_goals,
    ratios,
    step_goals,
    throughput_goals,
    tokens_per_s,
)
from benchmarks.engine.report import make_report
from benchmarks.spec import PeerResult, Run, Spec
from benchmarks.tiny_model import ModelShape
from pd_cluster.errors import ConfigError

STEP_FIGURES = {
    "decode_1_ms": 13.0,
    "decode_32_ms": 25.0,
    "prefill_1024_ms": 400.0,
    "bookkeeping_32_ms": 0.6,
    "greedy_32_ms": 2.0,
    "drawn_32_ms": 2.0,
    "drawn_step_32_ms": 25.0,
    "prefix_ttft_ms": 24.0,
    "alone_ttft_ms": 22.0,
}
FLOOR_FIGURES = {
    "read_weights_ms": 10.0,
    "linears_32_stock_ms": 50.0,
    "linears_32_packed_ms": 21.0,
    "linears_1024_stock_ms": 300.0,
    "linears_1024_packed_ms": 310.0,
}


def ran(**took_s: float) -> PeerResult:
    """100 tokens of each workload."""
    return PeerResult(runs={name: Run(took, [[1] * 60, [2] * 40]) for name, took in took_s.items()})


def by_name(goals: list[Goal]) -> dict[str, Goal]:
    return {goal.name: goal for goal in goals}


# ---- workloads


def test_workloads_are_the_same_every_time_and_share_no_prompt() -> None:
    made = [(each(32000), each(32000)) for each in (engine_workloads.uniform, engine_workloads.mixed)]
    assert all(first == second for first, second in made)
    prompts = [
        tuple(p) for each in (*(first for first, _ in made), engine_workloads.warmup(32000)) for p in each.prompts
    ]
    assert len(set(prompts)) == len(prompts) == 32 + 64 + 32


def test_shapes_of_the_workloads() -> None:
    uniform, mixed = engine_workloads.uniform(32000), engine_workloads.mixed(32000)
    assert {len(prompt) for prompt in uniform.prompts} == {128}
    assert uniform.num_output_tokens == 32 * 64
    assert len(mixed.prompts) == len(mixed.output_lens) == 64
    assert all(16 <= len(prompt) <= 1024 for prompt in mixed.prompts)
    assert all(8 <= num <= 256 for num in mixed.output_lens)
    assert max(map(len, mixed.prompts)) > 4 * sorted(map(len, mixed.prompts))[32]  # a long tail
    assert all(259 <= token < 32000 for prompt in mixed.prompts for token in prompt)


def test_the_model_has_the_size_it_says() -> None:
    shape = ModelShape()
    assert shape.layer_linears() == [(1280, 768), (768, 768), (4096, 768), (768, 2048)]
    assert shape.num_parameters == 124_668_672
    assert shape.read_nbytes == 4 * (shape.num_parameters - 31999 * 768 - 25 * 768)
    assert ModelShape.parse(shape.dump()) == shape


# ---- ratios and goals


def test_a_ratio_compares_what_ran_in_the_same_round() -> None:
    rounds = [
        {"ours": ran(uniform=1.0), "generate": ran(uniform=2.0)},
        {"ours": ran(uniform=2.0), "generate": ran(uniform=5.0)},
    ]
    goal = by_name(throughput_goals(rounds, ["vllm"], {"vllm": "absent"}))["uniform: tokens/s, times generate()"]
    assert goal.values == pytest.approx([2.0, 2.5])
    assert goal.met


def test_what_ran_only_in_the_first_round_is_compared_by_that() -> None:
    rounds = [{"generate": ran(uniform=2.0, mixed=10.0)}, {"generate": ran(uniform=4.0)}]
    assert tokens_per_s(rounds, "generate", "mixed") == [10.0, 10.0]
    assert tokens_per_s(rounds, "generate", "uniform") == [50.0, 25.0]
    assert tokens_per_s(rounds, "vllm", "uniform") == [None, None]
    assert ratios([None, 3.0, 4.0], [1.0, None, 2.0]) == [2.0]


def test_the_best_other_is_the_best_of_each_round() -> None:
    rounds = [
        {"ours": ran(uniform=1.0), "llama.cpp": ran(uniform=2.0), "vllm": ran(uniform=4.0)},
        {"ours": ran(uniform=1.0), "llama.cpp": ran(uniform=4.0), "vllm": ran(uniform=1.25)},
    ]
    goal = by_name(throughput_goals(rounds, ["llama.cpp", "vllm"], {}))["uniform: tokens/s, times the best other"]
    assert goal.values == pytest.approx([2.0, 1.25])
    assert goal.met
    absent = throughput_goals(rounds, ["llama.cpp", "vllm", "x"], {"x": "peer absent: run setup"})[-1]
    assert absent.values == goal.values
    assert not absent.met
    assert "peer absent: run setup" in absent.row()[-1]


def test_goals_of_steps_are_judged_by_the_faster_linears() -> None:
    goals = step_goals([{"floors": PeerResult(figures=FLOOR_FIGURES), "steps": PeerResult(figures=STEP_FIGURES)}])
    values = [goal.values[0] for goal in goals]
    assert values == pytest.approx([1.3, 25 / 21, 400 / 300, 0.6, 2.0, 8.0, 24 / 22])
    assert [goal.met for goal in goals] == [True, True, False, False, True, True, True]
    assert step_goals([{"ours": ran(uniform=1.0)}]) == []


def test_a_goal_is_met_by_the_median() -> None:
    goal = Goal(name="g", goal=1.2, better="lower", values=[1.0, 1.5, 1.1])
    assert goal.met
    assert (goal.to_json()["min"], goal.to_json()["median"], goal.to_json()["max"]) == (1.0, 1.1, 1.5)
    assert not Goal(name="g", goal=1.2, better="lower", values=[1.0, 1.5, 1.3]).met
    assert not Goal(name="g", goal=1.2, better="lower", values=[]).met
    assert not Goal(name="g", goal=1.2, better="lower", values=[1.0], missing="vllm absent").met


def test_equal_tokens() -> None:
    assert equal_tokens(Run(1.0, [[1, 2, 3], [4]]), Run(1.0, [[1, 2, 9], [5]])) == (0.5, 0.5)


def test_the_report_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [{"ours": ran(uniform=1.0), "generate": ran(uniform=2.0)}]
    report = make_report("pd-cluster bench engine", rounds, ("generate", "vllm"), {"vllm": "peer absent: do this"})
    report.write(str(tmp_path / "out.json"))
    written = json.loads((tmp_path / "out.json").read_text())
    assert [result["name"] for result in written["results"]] == ["uniform ours", "uniform generate"]
    assert [goal["met"] for goal in written["goals"]] == [True, False]
    assert [each["missing"] for each in written["engines"]] == [None, None, "peer absent: do this"]
    assert written["engines"][0]["equal"] == {"uniform": {"tokens": 1.0, "first_tokens": 1.0}}
    engine.show(report, "title")
    assert "NO: peer absent: do this" in capsys.readouterr().out


# ---- the command


def test_flags() -> None:
    assert make_bench("", "", 3, 2, "", quick=False, full=False).peers == tuple(PEERS)
    quick = make_bench("", "", 3, 2, "", quick=True, full=False)
    assert (quick.peers, quick.rounds) == (("generate",), 1)
    assert make_bench("vllm, generate", "mixed", 2, 2, "", quick=False, full=True).peers == ("vllm", "generate")
    with pytest.raises(ConfigError, match="--peers sglang"):
        make_bench("sglang", "", 3, 2, "", quick=False, full=False)
    with pytest.raises(ConfigError, match="--workload long"):
        make_bench("", "long", 3, 2, "", quick=False, full=False)


def test_absent_peers_come_with_the_command_that_makes_them(tmp_path: Path) -> None:
    bench = EngineBench(peers_dir=tmp_path)
    found = dict(absent_peers(bench))
    assert sorted(found) == ["llama.cpp", "vllm"]
    assert f"sh scripts/setup_bench_peers.sh {tmp_path}" in found["vllm"]
    (tmp_path / "vllm/lib/python3.11/site-packages/vllm").mkdir(parents=True)
    assert sorted(dict(absent_peers(bench))) == ["llama.cpp"]


def test_a_wrong_number_of_tokens_is_refused() -> None:
    workload = engine_workloads.uniform(320, 2, 4, 3)
    spec = Spec(model="", warmup=workload, workloads=[workload])
    check_lengths(spec, PeerResult(runs={"uniform": Run(1.0, [[1] * 3] * 2)}))
    with pytest.raises(ChildFailed, match="5 output tokens instead of 6"):
        check_lengths(spec, PeerResult(runs={"uniform": Run(1.0, [[1] * 3, [1] * 2])}))


def test_specs_travel() -> None:
    spec, _ = EngineBench(quick=True).specs(Path("/model"))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=Spec) == spec


# ---- children


def run_python(code: str, tmp_path: Path, deadline_s: float = 20.0) -> None:
    run_child([sys.executable, "-c", code], tmp_path / "child.log", deadline_s, 1)


def test_a_child_that_fails_says_its_last_lines(tmp_path: Path) -> None:
    run_python("pass", tmp_path)
    with pytest.raises(ChildFailed, match=r"(?s)code 3.*the reason"):
        run_python("import sys; print('the reason'); sys.exit(3)", tmp_path)


def test_a_late_child_and_what_it_started_are_ended(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, pathlib, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(file)!r}).write_text(str(other.pid))\n"
        "time.sleep(60)"
    )
    with pytest.raises(ChildFailed, match="not finished within 2 s"):
        run_python(code, tmp_path, 2.0)
    deadline_s = time.monotonic() + 5
    while is_running(int(file.read_text())):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Returns whether the process runs; an unreaped zombie has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_guide_adds_is_judged_by_round() -> None:
    figures = {"guided_greedy_16_over_unguided": 1.05, "guided_drawn_16_over_unguided": 1.2}
    rounds = [{"guided": PeerResult(figures=figures)}, {}]
    greedy, drawn = guided_goals(rounds)
    assert [round(value) for value in (*greedy.values, *drawn.values)] == [5, 20]
    assert (greedy.met, drawn.met) == (True, False)
    assert guided_goals([{}]) == []
