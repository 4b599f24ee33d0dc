"""A load's report: figures and series computed from outcomes, and from guidellm's records."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest

from pd_cluster.bench.load.guidellm_process import Guidellm
from pd_cluster.bench.load.guidellm_results import read_results
from pd_cluster.bench.load.load_samples import LoadSamples
from pd_cluster.bench.load.request_stages import with_timeline
from pd_cluster.bench.load.scenario_file import LoadRow, Scenario, profile_of
from pd_cluster.bench.load_report import LoadRun, over_time, results_of, to_json, write_json
from pd_cluster.bench.outcomes import GapCounts, InstanceSample, Outcome, Slo
from pd_cluster.commands.load_chart import check_picture, write_picture
from pd_cluster.errors import ConfigError, GenerationError


def some_run(seed: int = 0) -> LoadRun:
    rng = random.Random(seed)
    outcomes = []
    gaps = GapCounts()
    for number in range(200):
        sent_s, first_s, num = rng.uniform(0, 50), rng.uniform(0.1, 1.0), rng.randrange(2, 40)
        last_s = first_s + num * rng.uniform(0.01, 0.05)
        gaps.add((last_s - first_s) / (num - 1), num - 1)
        outcomes.append(
            Outcome(
                request_id=str(number),
                sent_s=sent_s,
                first_s=sent_s + first_s,
                last_s=sent_s + last_s,
                num_prompt_tokens=100,
                num_cached_tokens=25,
                num_output_tokens=num,
                prefill_s=0.8 * first_s,
                handover_s=0.1 * first_s,
                error="cut" if number % 50 == 7 else "",
            )
        )
    samples = [
        InstanceSample(
            at_s=float(at), name=f"{role}-0", role=role, num_running=at % 7, num_held_blocks=at, num_blocks=200
        )
        for at in range(55)
        for role in ("prefill", "decode")
    ]
    return LoadRun(
        title="made up",
        duration_s=52.0,
        outcomes=outcomes,
        samples=samples,
        slo=Slo(ttft_s=0.6, tpot_s=0.04),
        gaps=gaps,
        client_core_share=0.25,
    )


def figures(run: LoadRun) -> dict[str, float | None]:
    return {result.name: result.value for result in results_of(run)}


def test_figures_are_those_of_the_outcomes() -> None:
    run = some_run()
    good = [each for each in run.outcomes if not each.error]
    found = figures(run)
    ttft_ms = [1e3 * (each.first_s - each.sent_s) for each in good]  # type: ignore[operator]
    tpot_ms = [1e3 * (each.last_s - each.first_s) / (each.num_output_tokens - 1) for each in good]  # type: ignore[operator]
    for percent in (50, 90, 99):
        assert found[f"ttft_p{percent}"] == pytest.approx(numpy.percentile(ttft_ms, percent))
        assert found[f"tpot_p{percent}"] == pytest.approx(numpy.percentile(tpot_ms, percent))
    both = sum(ttft <= 600 and tpot <= 40 for ttft, tpot in zip(ttft_ms, tpot_ms, strict=True))
    assert found["goodput"] == pytest.approx(both / 52.0)
    assert found["slo_met"] == pytest.approx(100 * both / 200)  # failed requests miss their goals
    assert (found["errors"], found["cache_hits"]) == (4, 25.0)
    assert found["prefill_stage_p50"] == pytest.approx(0.8 * float(numpy.percentile(ttft_ms, 50)))
    assert found["handover_stage_p50"] == pytest.approx(0.1 * float(numpy.percentile(ttft_ms, 50)))


def test_gaps_are_counted_closely() -> None:
    rng = random.Random(1)
    gaps, all_s = GapCounts(), []
    for _ in range(500):
        gap_s, num = rng.lognormvariate(-3, 1), rng.randrange(1, 9)
        gaps.add(gap_s, num)
        all_s += [gap_s] * num
    for percent in (1, 50, 90, 99):
        nearest = numpy.percentile(all_s, percent, method="inverted_cdf")
        assert gaps.percentile(percent) == pytest.approx(float(nearest), rel=0.0051)
    assert GapCounts().percentile(50) is None


@pytest.mark.parametrize(("first_s", "growth_s"), [(0.02, 0.0), (0.02, 1e-7), (0.001, 0.0007), (0.0, 1e-6)])
def test_gaps_that_grow_evenly_count_as_one_by_one(first_s: float, growth_s: float) -> None:
    together, single = GapCounts(), GapCounts()
    together.add_line(first_s, growth_s, num_gaps=257, num=3)
    for at in range(257):
        single.add(first_s + growth_s * at, 3)
    percents = range(1, 101)
    assert len(together) == len(single) == 257 * 3
    assert [together.percentile(each) for each in percents] == [single.percentile(each) for each in percents]


def test_series_over_time_against_brute_force() -> None:
    """Each stage's mean number of requests equals a count at a thousand moments per interval."""
    run = some_run()
    series = over_time(run, num_intervals=13)
    for at in (0, 5, 12):
        moments = [4.0 * at + 4.0 * (step + 0.5) / 1000 for step in range(1000)]
        in_prefill = in_decode = 0
        for each in run.outcomes:
            assert each.prefill_s is not None
            assert each.handover_s is not None
            assert each.last_s is not None
            computed_s = each.sent_s + each.prefill_s
            in_prefill += sum(each.sent_s <= moment < computed_s for moment in moments)
            in_decode += sum(computed_s + each.handover_s <= moment < each.last_s for moment in moments)
        assert series[at].num_in["prefill"] == pytest.approx(in_prefill / 1000, abs=0.05)
        assert series[at].num_in["decode"] == pytest.approx(in_decode / 1000, abs=0.05)
    assert series[0].num_running == {"decode": 1.5, "prefill": 1.5}
    assert series[0].held_share["decode"] == pytest.approx(1.5 / 200)


def test_a_run_that_the_client_slowed_is_marked() -> None:
    run = some_run()
    assert run.slowed_by == ""
    run.client_core_share = 0.93
    assert run.slowed_by == "the client took 93% of a core"
    late = [Outcome(request_id="a", sent_s=0.0, first_s=0.2, late_s=0.5)]
    assert "were sent 500 ms late" in LoadRun(title="late", duration_s=1.0, outcomes=late).slowed_by


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one.json", "other.json"):
        write_json(some_run(), "command", str(tmp_path / name))
    for name in ("one.svg", "other.svg"):
        write_picture(some_run(), str(tmp_path / name))
    for suffix in ("json", "svg"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"other.{suffix}").read_bytes()
    found = json.loads((tmp_path / "one.json").read_text())
    assert found == json.loads(json.dumps(to_json(some_run(), "command")))
    assert len(found["requests"]) == 200
    assert found["slo"]["ttft_s"] == 0.6
    assert to_json(some_run(1), "command") != found
    with pytest.raises(ConfigError, match=r"--picture a.pdf: expected a name that ends in .png or .svg"):
        check_picture("a.pdf")


def test_nothing_answered_is_no_division_by_zero(tmp_path: Path) -> None:
    empty = LoadRun(title="nothing", duration_s=0.0)
    assert figures(empty)["goodput"] == 0.0
    assert over_time(empty) == []
    write_picture(empty, str(tmp_path / "empty.png"))


# ---- guidellm's side


def line(number: int, run_s: float, **fields: Any) -> dict[str, Any]:
    sent_s = run_s + number
    times = {"planned_s": sent_s - 0.01, "sent_s": sent_s, "first_s": sent_s + 0.2, "last_s": sent_s + 0.5}
    counts = {"num_prompt_tokens": 9, "num_cached_tokens": 3, "num_output_tokens": 4, "after_us": [0, 100_000, 300_000]}
    named = {"request_id": f"r{number}", "response_id": f"cmpl-r{number}", "run_s": run_s}
    return {**named, **times, **counts, "error": "", "is_cut_off": False, **fields}


def test_lines_of_several_processes_become_runs(tmp_path: Path) -> None:
    strategies = [{"type_": "constant", "rate": 2.0}, {"type_": "poisson", "rate": 4.5}]
    report = {"benchmarks": [{"config": {"strategy": each}} for each in strategies], "conclusions": [{"knee": 3}]}
    (tmp_path / "guidellm.json").write_text(json.dumps(report))
    first = [line(0, 100.0), line(2, 100.0, error="broken", response_id=None), line(0, 200.0)]
    second = [line(1, 100.0), line(5, 100.0, is_cut_off=True), line(1, 200.0, first_s=None, last_s=None, after_us=[])]
    for pid, lines in ((1, first), (2, second)):
        (tmp_path / f"requests-{pid}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (one, other), conclusions = read_results(tmp_path)
    assert (one.name, other.name, conclusions) == ("constant, rate 2", "poisson, rate 4.5", [{"knee": 3}])
    assert (one.start_s, one.duration_s, one.num_cut_off, len(one.gaps)) == (100.0, 2.5, 1, 6)
    assert [each.request_id for each in one.outcomes] == ["cmpl-r0", "cmpl-r1", "r2"]
    assert one.outcomes[1].ttft_s == pytest.approx(0.2)
    assert one.outcomes[1].longest_gap_s == pytest.approx(0.2)
    assert one.outcomes[1].late_s == pytest.approx(0.01)
    assert [each.error for each in one.outcomes] == ["", "", "broken"]
    assert other.outcomes[1].ttft_s is None
    (tmp_path / "requests-1.jsonl").write_text('{"request_id": "half')
    with pytest.raises(GenerationError, match="no report that can be read"):
        read_results(tmp_path)


def test_a_timeline_adds_what_the_client_cannot_see() -> None:
    def event(at_ms: float, who: str, what: str) -> dict[str, Any]:
        return {"at_ms": at_ms, "who": who, "what": what, "numbers": {}}

    events = [event(10, "p", "chunk"), event(40, "p", "chunk"), event(47, "d", "landing complete")]
    outcome = Outcome(request_id="a", sent_s=1.0, first_s=1.05, last_s=1.5)
    found = with_timeline(outcome, {"prefill": "p", "decode": "d", "events": events})
    assert (found.prefill, found.decode, found.prefill_s, found.handover_s) == ("p", "d", 0.04, 0.007)
    moved = [*events, event(60, "q", "chunk"), event(65, "e", "landing complete")]
    assert with_timeline(outcome, {"prefill": "p", "decode": "d", "events": moved}).prefill_s == 0.06
    alone = with_timeline(outcome, {"prefill": "h", "decode": "h", "events": events[:2]})
    assert (alone.prefill_s, alone.handover_s) == (0.04, None)


def test_the_busiest_process_counts() -> None:
    samples = LoadSamples(client_cpu=[(0.0, {1: 5.0}), (10.0, {1: 6.0, 2: 0.5}), (20.0, {1: 9.0, 2: 8.5})])
    assert samples.client_core_share(10.0, 20.0) == pytest.approx(0.8)
    assert samples.client_core_share(0.0, 20.0) == pytest.approx(8.5 / 20)
    assert samples.client_core_share(30.0, 40.0) is None


def test_a_profile_is_guidellms(tmp_path: Path) -> None:
    assert profile_of("kind=concurrent,streams=[1,2,4],max_step=3") == {
        "kind": "concurrent",
        "streams": [1, 2, 4],
        "max_step": 3,
    }
    for text in ("concurrent", "streams=[1]", "kind=a,,b"):
        with pytest.raises(ConfigError, match="--profile"):
            profile_of(text)
    scenario = Scenario(target="http://h:1", model="m", is_chat=True, num_requests=3, slo=Slo(ttft_s=0.5))
    spec = json.loads(scenario.write(tmp_path).read_text())["spec"]
    assert spec["profile"] == {"kind": "replay", "schedule_turn": "timestamp"}
    assert spec["metrics"]["slo"] == {"ttft_ms": 500.0}
    assert spec["backend"]["request_format"] == "pd_cluster/chat"
    assert LoadRow(1.0, {"messages": []}, None, 5).is_chat


def test_without_guidellm_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"guidellm is not installed here.*pip install guidellm==0.8.1") as raised:
        Guidellm.find("")
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="--guidellm absent: no such command"):
        Guidellm.find("absent")
