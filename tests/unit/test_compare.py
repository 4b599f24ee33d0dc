"""`bench compare`: specs, the order of rounds, ratios, and how servers are started."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from pd_cluster import host
from pd_cluster.bench.compare.compared_servers import on_cores, vllm_command, vllm_environment, waits_of
from pd_cluster.bench.compare.comparison_file import read_spec
from pd_cluster.bench.compare.comparison_run import run_comparison
from pd_cluster.bench.compare.comparison_spec import ComparisonSpec
from pd_cluster.bench.compare.comparison_table import show, write_json
from pd_cluster.bench.compare.constant_work import constant_work_s
from pd_cluster.bench.compare.round_ratios import ComparedRun, MedianRange, compared, order_of, results, slow_runs
from pd_cluster.bench.load_report import LoadRun
from pd_cluster.bench.outcomes import GapCounts, Outcome, Slo
from pd_cluster.bench.process_times import cpu_s, family
from pd_cluster.bench.request_arrivals import prompt_of
from pd_cluster.commands.compare_chart import write_comparison
from pd_cluster.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "benchmarks" / "compare"
WORKLOAD = '[workload]\nname = "fixed"\nnum_requests = 4\n'
SERVERS = '[[server]]\nname = "hybrid"\nlayout = "1H"\n[[server]]\nname = "split"\nlayout = "1P1D"\n'
GOOD = WORKLOAD + SERVERS


def spec_of(text: str, folder: Path) -> ComparisonSpec:
    file = folder / "spec.toml"
    file.write_text(text)
    return read_spec(str(file))


# ---- the spec


BAD = {
    "": "workload: missing; give [workload]",
    WORKLOAD: "server: missing; give [[server]]",
    "rounds = 4 4": "is not TOML: ",
    'model = "a"\n' + WORKLOAD + '[[server]]\nname = "a"\nlayout = "1H"\n': (
        "server: 1 given; a comparison needs two or more [[server]]"
    ),
    "workload = 3\n" + SERVERS: "workload: 3: expected a table, or several as [[workload]]",
    'model = "../none"\n' + GOOD: "model: '../none': no such folder; a path counts from the file's own folder",
    "round = 4\n" + GOOD: "round: no such field; did you mean rounds?",
    "rounds = 0\n" + GOOD: "rounds: 0: expected int >= 1",
    'rounds = "four"\n' + GOOD: "rounds: 'four': expected int, got str",
    "speeds = [1.0, 0.0]\n" + GOOD: "speeds[1]: 0.0: expected float > 0.0",
    "speeds = [nan]\n" + GOOD: "speeds[0]: nan: ",
    "speeds = [1.0, 1.0]\n" + GOOD: "speeds: 1: given twice; leave one out",
    "speeds = [1.0]\nconcurrency = [2]\n" + GOOD: "concurrency: [2]: conflicts with speeds; give one of them",
    'cores = "0-"\n' + GOOD: "cores: '0-': expected cores such as 0-3,8",
    'cores = "60000"\n' + GOOD: "cores: '60000': this process may not use core 60000; it may use ",
    "[goals]\nttft_s = 1.0\nttft_idle = 3.0\n" + GOOD: "goals.ttft_idle: 3: conflicts with ttft_s; give one of them",
    "[goals]\nttft_idle = 0.5\n" + GOOD: "goals.ttft_idle: 0.5: expected float >= 1.0",
    "[goals]\ntpot = 1.0\n" + GOOD: "goals.tpot: no such field; did you mean tpot_s?",
    "goals = 3\n" + GOOD: "goals: 3: expected a table",
    '[workload]\nname = "fixd"\n' + SERVERS: "workload.name: 'fixd': invalid enum value 'fixd'",
    "[workload]\nrate = 2.0\n" + SERVERS: "workload.rate: no such field; did you mean rate_per_s?",
    "[workload]\nrate_per_s = -2.0\n" + SERVERS: "workload fixed: rate_per_s -2: expected 1e-06 to 1e+06",
    '[workload]\ntrace = "none.jsonl"\n' + SERVERS: "none.jsonl: cannot be read: No such file or directory",
    '[workload]\ntrace = "spec.toml"\n' + SERVERS: "spec.toml, line 1: ",
    '[workload]\ntrace = "t"\nlength = 0.5\n' + SERVERS: "workload.length: no such field; did you mean lengths?",
    GOOD + '[[server]]\nname = "split"\nlayout = "2P1D"\n': (
        "server.name: 'split': given twice; give each server a different name"
    ),
    GOOD + '[[server]]\nname = "x"\n': "server[2] (x): layout, vllm or url: none given; give one of them",
    GOOD + '[[server]]\nname = "x"\nlayout = "1H"\nurl = "http://h"\n': (
        "server[2] (x): layout, vllm or url: layout and url given; give one of them"
    ),
    GOOD + '[[server]]\nname = "x"\nlayout = "0P1D"\n': "server[2].layout: '0P1D': expected prefill and decode",
    GOOD + '[[server]]\nname = "a/b"\nlayout = "1H"\n': "server[2].name: 'a/b': it names a file of logs",
    GOOD + '[[server]]\nname = "x"\nlayout = "1H"\nflags = ["--x"]\n': (
        "server[2].flags: ['--x']: needs vllm; leave it out"
    ),
    GOOD + '[[server]]\nname = "x"\nurl = "http://h"\nsettings = { dtype = "bfloat16" }\n': (
        "server[2].settings: {'dtype': 'bfloat16'}: needs layout; leave it out"
    ),
    GOOD + '[[server]]\nname = "x"\nurl = "h:80"\n': "server[2].url: 'h:80': expected http://HOST:PORT",
    GOOD + '[[server]]\nname = "x"\nvllm = "no/python"\n': "server[2].vllm: 'no/python': no such file; give a Python",
    GOOD + f'[[server]]\nname = "x"\nvllm = "{sys.executable}"\nflags = ["--port=1"]\n': (
        "server[2].flags: '--port=1': the comparison sets this flag; leave it out"
    ),
    GOOD + '[[server]]\nname = "x"\nlayout = "1H"\nsettings = { max_num_batched_token = 1 }\n': (
        "server[2].settings.max_num_batched_token: no such setting; did you mean max_num_batched_tokens?"
    ),
    GOOD + '[[server]]\nname = "x"\nlayout = "1H"\nsettings = { max_num_batched_tokens = 0 }\n': (
        "server[2].settings: --max-num-batched-tokens 0: "
    ),
    GOOD + '[[server]]\nname = "x"\nlayout = "1H"\nsettings = { quantization = "w3" }\n': (
        "server[2].settings: --quantization 'w3': expected"
    ),
    GOOD + '[[server]]\nname = "x"\nlayout = "1H"\nsettings = { port = 80 }\n': (
        "server[2].settings.port: 80: a comparison cannot vary it; start that server yourself and give its url"
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_spec_is_one_line_that_names_the_file_the_field_and_the_value(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        spec_of(text, tmp_path)
    line = str(raised.value)
    assert line.startswith(f"{tmp_path}/spec.toml: ")
    assert BAD[text] in line
    assert "\n" not in line


def test_json_says_the_same_as_toml(tmp_path: Path) -> None:
    toml = spec_of(f"rounds = 3\n[goals]\ntpot_idle = 2\n{GOOD}", tmp_path)
    servers = [{"name": "hybrid", "layout": "1H"}, {"name": "split", "layout": "1P1D"}]
    raw = {"workload": [{"name": "fixed", "num_requests": 4}], "server": servers}
    (tmp_path / "spec.json").write_text(json.dumps({"rounds": 3, "goals": {"tpot_idle": 2}, **raw}))
    assert read_spec(str(tmp_path / "spec.json")) == toml
    (tmp_path / "spec.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not JSON"):
        read_spec(str(tmp_path / "spec.json"))


@pytest.mark.parametrize("name", sorted(file.name for file in EXAMPLES.glob("*.toml")))
def test_examples_are_specs(name: str, tmp_path: Path) -> None:
    """The example specs are valid, given the files that they name."""
    folder, build = tmp_path / "benchmarks" / "compare", tmp_path / "build"
    (build / "vllm" / "bin").mkdir(parents=True)
    (build / "model-125m").mkdir()
    (build / "vllm" / "bin" / "python").touch()
    lines = [{"timestamp": 1000 * at, "input_length": 600, "output_length": 30, "hash_ids": [0, at]} for at in range(9)]
    (build / "mooncake_conversation.jsonl").write_text("\n".join(map(json.dumps, lines)))
    folder.mkdir(parents=True)
    file = folder / name
    file.write_text((EXAMPLES / name).read_text())
    spec = read_spec(str(file))
    assert len(spec.server) > 1
    assert spec.arrivals(0, spec.levels[0])


# ---- the load of a round


def test_a_round_has_prompts_of_its_own_that_share_what_they_should(tmp_path: Path) -> None:
    shared = '[[workload]]\nname = "shared-prefix"\nnum_requests = 6\nnum_prompt_tokens = 64\nnum_prefixes = 1\n'
    short = '[[workload]]\nname = "fixed"\nnum_requests = 3\nnum_prompt_tokens = 20\nrate_per_s = 9.0\n'
    spec = spec_of(f"speeds = [1.0, 4.0]\n{shared}{short}{SERVERS}", tmp_path)
    loads = {(round_, level): spec.arrivals(round_, level) for round_ in (0, 1) for level in spec.levels}
    starts = []
    for load in loads.values():
        assert [each.at_s for each in load] == sorted(each.at_s for each in load)
        long = [each for each in load if each.num_prompt_tokens == 64]
        assert (len(long), len(load)) == (6, 9)
        assert len({each.hash_ids[:2] for each in long}) == 1
        starts += [prompt_of(load[0], 0, 256)[:16], prompt_of(long[0], 0, 256)[:16]]
    ids = [{each for arrival in load for each in arrival.hash_ids} for load in loads.values()]
    assert sum(map(len, ids)) == len(set().union(*ids)), "two loads share a cached block"
    slow, fast = loads[0, 1.0], loads[0, 4.0]
    assert [each.at_s / 4 for each in slow] == pytest.approx([each.at_s for each in fast])
    assert [each.at_s for each in loads[1, 1.0]] != [each.at_s for each in slow], "each round must draw its times"
    assert spec.arrivals(0, 1.0) == slow, "each server must get the same load"


def test_rounds_go_there_and_back() -> None:
    """Every server precedes each other server as often as it follows it, and all have the same mean position."""
    names = ["a", "b", "c"]
    assert [order_of(names, at) for at in range(3)] == [["a", "b", "c"], ["c", "b", "a"], ["a", "b", "c"]]
    places = {name: [order_of(names, at).index(name) for at in range(4)] for name in names}
    assert {sum(each) for each in places.values()} == {4}


# ---- ratios


def run_of(
    server: str, round_: int, ttft_s: float, gap_s: float, constant_s: float = 1.0, level: float = 1.0
) -> ComparedRun:
    """Returns a run of ten answers of 11 tokens, one late and one failed; the goals are 1 s and 50 ms."""
    outcomes = [
        Outcome(
            request_id=f"{at}",
            sent_s=float(at),
            first_s=at + (9.0 if at == 8 else ttft_s),
            last_s=at + (9.0 if at == 8 else ttft_s) + 10 * gap_s,
            num_output_tokens=11,
            error="gone" if at == 9 else "",
        )
        for at in range(10)
    ]
    gaps = GapCounts()
    gaps.add(gap_s, 100)
    load = LoadRun("t", 20.0, outcomes, [], Slo(1.0, 0.05), gaps)
    return ComparedRun(server, round_, level, load, constant_s, 0.5, 0.01)


def test_a_ratio_is_taken_within_a_round() -> None:
    """The second round is three times slower for all servers, so ratios of medians over rounds would differ."""
    times = [(0.1, 0.01), (0.3, 0.03), (0.1, 0.01)]
    runs = [run_of("base", at, ttft_s, gap_s) for at, (ttft_s, gap_s) in enumerate(times)]
    runs += [run_of("other", at, factor * times[at][0], 0.5 * times[at][1]) for at, factor in enumerate((2, 3, 4))]
    found = {(each.server, each.name): each for each in compared(runs)}
    ttft = found["other", "ttft_p50"]
    assert ttft.ratio is not None
    assert ttft.value is not None
    assert (ttft.ratio.middle, ttft.ratio.low, ttft.ratio.high) == pytest.approx((3.0, 2.0, 4.0))
    assert ttft.value.middle == pytest.approx(400)
    gaps = found["other", "itl_p99"].ratio
    assert gaps is not None
    assert gaps.middle == pytest.approx(0.5, rel=0.01)
    assert found["base", "ttft_p50"].ratio is None
    goodput = found["base", "goodput"].value
    assert goodput is not None
    assert goodput.middle == pytest.approx(8 / 20), "expected one late and one failed answer"
    assert {each.name: each.value for each in results(runs)}["other / base: ttft_p50"] == pytest.approx(3.0)


def test_nothing_is_divided_by_nothing() -> None:
    late = [run_of("base", at, 2.0, 0.01) for at in range(2)]  # no answer within the goals
    found = {(e.server, e.name): e for e in compared([*late, *(run_of("other", at, 0.1, 0.01) for at in range(2))])}
    assert found["other", "goodput"].ratio is None
    value = found["base", "goodput"].value
    assert value is not None
    assert value.middle == 0


def test_the_range_of_many_rounds_is_that_of_the_median() -> None:
    rng, num_inside = random.Random(1), 0
    for _ in range(40):
        values = [rng.gauss(2.0, 0.2) for _ in range(12)]
        found = MedianRange.of(values)
        assert found is not None
        assert found.middle == median(values)
        assert min(values) < found.low < found.middle < found.high < max(values), "outliers must not widen the interval"
        num_inside += found.low <= 2.0 <= found.high
    assert num_inside >= 34, "about 95 % of intervals must contain the true median"
    assert MedianRange.of([3.0, 1.0, 2.0]) == MedianRange(2.0, 1.0, 3.0, 3)
    assert MedianRange.of([]) is None


def test_the_report_says_what_is_to_be_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of(f"rounds = 2\nspeeds = [1.0, 2.0]\n{GOOD}", tmp_path)
    runs = [
        run_of(name, at, 0.1 * (1 + (name == "split")), 0.01, 1.5 if (name, at) == ("split", 1) else 1.0, level)
        for at in range(2)
        for name in order_of(["hybrid", "split"], at)
        for level in (1.0, 2.0)
    ]
    assert {(run.server, run.round_) for run in slow_runs(runs)} == {("split", 1)}
    show(spec, runs, Slo(1.0, 0.05), {})
    shown = capsys.readouterr().out
    assert "200  2.00 (2.00-2.00)" in shown
    assert "goals: TTFT 1000 ms, TPOT 50 ms, end to end none" in shown
    assert "note: round 2, split: constant work took 1.50 s; the machine was slow" in shown
    assert "compute threads of hybrid: OMP_WAIT_POLICY=passive" in shown
    write_json(spec, runs, Slo(1.0, 0.05), "command", str(tmp_path / "out.json"))
    written = json.loads((tmp_path / "out.json").read_text())
    assert len(written["runs"]) == 8
    assert written["runs"][0]["figures"]["ttft_p50"] == pytest.approx(100)
    write_comparison(runs, "title", spec.level_name, str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# ---- before anything starts


@pytest.mark.parametrize(
    ("server", "line"),
    [
        (
            'layout = "1H"\nsettings = { max_model_len = 64 }',
            r"workload: its longest .* has 640 tokens, .* \(x\) has 64;",
        ),
        ('url = "http://127.0.0.1:1"', r"server\[2\].url: 'http://127.0.0.1:1': no server answers there: "),
        (f'vllm = "{sys.executable}"', r"server\[2\].vllm: '.*': this Python has no vLLM; give a Python"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_starts(server: str, line: str, tmp_path: Path) -> None:
    spec = spec_of(f'{GOOD}[[server]]\nname = "x"\n{server}\n', tmp_path)

    async def never(*arguments: object) -> LoadRun:
        raise AssertionError("a load was sent before the check")

    with pytest.raises(ConfigError, match=f"^spec.toml: {line}") as raised:
        asyncio.run(run_comparison(spec, "spec.toml", never))
    assert "\n" not in str(raised.value)


# ---- processes


def test_vllm_gets_the_same_cores_and_says_how_its_threads_wait(tmp_path: Path) -> None:
    servers = f'[[server]]\nname = "v"\nvllm = "{sys.executable}"\nflags = ["--dtype=bfloat16"]\n'
    spec = spec_of(f'cores = "{min(host.cores())}"\n{WORKLOAD}{servers}{SERVERS}', tmp_path)
    vllm = spec.server[0]
    environment = vllm_environment(spec, vllm, {"PATH": "/bin", "VLLM_API_KEY": "secret"})
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == str(min(host.cores()))
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "VLLM_API_KEY" not in environment, "otherwise the server would refuse the client"
    assert vllm_command(spec, vllm, 80)[-1] == "--dtype=bfloat16"
    assert "spin" in waits_of(vllm, {})
    assert waits_of(vllm, {"OMP_WAIT_POLICY": "passive"}) == "OMP_WAIT_POLICY=passive"
    assert waits_of(spec.server[1], {"OMP_NUM_THREADS": "1"}).endswith("; OMP_NUM_THREADS=1 for each instance")


def test_children_stay_on_the_cores_of_their_start() -> None:
    own = os.sched_getaffinity(0)
    with on_cores({min(own)}):
        asked = subprocess.run(
            [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"],
            capture_output=True,
            text=True,
            check=True,
        )
    assert asked.stdout.strip() == str({min(own)})
    assert os.sched_getaffinity(0) == own


def test_constant_work_ends_with_its_seconds() -> None:
    assert 0.0001 < asyncio.run(constant_work_s(host.cores(), share=0.02)) < 100


def test_cpu_time_is_that_of_a_process_and_its_children() -> None:
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'sum(range(9_000_000)); print(1); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()  # the child has used CPU time, and waits
        found_s = cpu_s(parent.pid)
        children = [pid for pid in family(parent.pid) if pid != parent.pid]
        assert len(children) == 1
        assert found_s >= cpu_s(*children) > 0.02
        parent.communicate(b"\n")
    with pytest.raises(FileNotFoundError):
        cpu_s(parent.pid)
