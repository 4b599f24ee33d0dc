"""`bench router`: the fit of two loads, additions to TTFT, goals, ratios; and its reading of processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import processes as router_processes
from benchmarks.peers.sampled import places_of
from benchmarks.processes import check_open_files, cpu_s, rss_nbytes, waited_s
from benchmarks.router import compared, shared
from benchmarks.router.bench import RouterBench, make_bench
from benchmarks.router.conversations import Conversations
from benchmarks.router.figures import OURS, Cost, Measured, added_ttft_s, fit, results
from benchmarks.router.spec import LoadResult, Workload
from pd_cluster.errors import ConfigError
from pd_cluster.tables import Result

MANY = Workload(name="many", num_requests=10, num_tokens=1000, num_open=10)
FEW = Workload(name="few", num_requests=1000, num_tokens=2, num_open=10)


def result(cpu_s: float = 0.0, **more: object) -> LoadResult:
    fields = {
        "took_s": 2.0,
        "cpu_s": cpu_s,
        "own_cpu_s": 0.1,
        "num_done": 1,
        "num_events": 1,
        "errors": [],
        "times_s": {},
        "gaps_s": [],
        "waited_s": 0.0,
        "rss_before_nbytes": 0,
        "rss_after_nbytes": 0,
    }
    return LoadResult(**(fields | more))  # type: ignore[arg-type]


def by_name(found: list[Result]) -> dict[str, Result]:
    return {each.name: each for each in found}


def test_two_shapes_of_load_tell_the_two_costs_apart() -> None:
    token_s, request_s = 40e-6, 1e-3
    loads = [(w, result(w.all_tokens * token_s + w.num_requests * request_s)) for w in (MANY, FEW)]
    for found in (fit(*loads), fit(*reversed(loads))):
        assert found.token_s == pytest.approx(token_s)
        assert found.request_s == pytest.approx(request_s)


def test_what_a_router_adds_is_what_the_worker_did_not_take() -> None:
    client = {1: (10.0, 10.5), 2: (11.0, 11.2), 3: (12.0, 12.1)}
    worker = {1: (100.0, 100.4), 2: (101.0, 101.2)}  # nothing is known of the third
    assert added_ttft_s(client, worker) == pytest.approx([0.1, 0.0])


def test_goals_are_for_our_own_router_alone() -> None:
    paced = (Workload(name="p", num_requests=1, num_tokens=64, num_open=0, rate_per_s=100.0), result(cpu_s=1.0))
    held = (
        Workload(name="h", num_requests=4, num_tokens=64, num_open=4, hold=True),
        result(rss_before_nbytes=1 << 20, rss_after_nbytes=(1 << 20) + 4 * 41 * 1024),
    )
    ours = Measured(
        OURS,
        [Cost(40e-6, 1e-3), Cost(60e-6, 2e-3), Cost(44e-6, 1e-3)],
        paced,
        held,
        num_errors=1,
        inside_ms=[1.0] * 98 + [30.0, 40.0],
    )
    other = Measured("other", [Cost(20e-6, 0.5e-3), Cost(20e-6, 0.5e-3), Cost(22e-6, 1e-3)], paced, held)
    found = by_name(results([ours, other]))
    assert found["pd-cluster cpu_per_token"].value == pytest.approx(44)
    assert (found["pd-cluster cpu_per_token"].goal, found["pd-cluster cpu_per_token"].met) == (50.0, True)
    assert found["pd-cluster cpu_per_request"].value == pytest.approx(1.0)
    assert found["pd-cluster cpu_then"].value == pytest.approx(50)
    assert (found["pd-cluster memory_per_stream"].value, found["pd-cluster memory_per_stream"].met) == (41.0, False)
    assert (found["pd-cluster added_ttft_p50"].value, found["pd-cluster added_ttft_p99"].met) == (1.0, False)
    assert found["pd-cluster added_ttft_seen_outside_p99"].goal is None
    assert "other added_ttft_p99" not in found, "only this project's router tells"
    assert found["pd-cluster errors"].met is False
    assert {r.goal for name, r in found.items() if name.startswith("other") and "errors" not in name} == {None}
    assert found["cpu_per_token / other's"].value == pytest.approx(2.0)
    assert found["cpu_per_request / other's"].value == pytest.approx(2.0)
    assert not [r for r in results([ours], with_goals=False) if r.goal is not None and "errors" not in r.name]


def test_the_paced_load_takes_its_share_of_a_core() -> None:
    workload = RouterBench().paced(Cost(token_s=50e-6, request_s=1e-3))
    assert workload.rate_per_s * (1e-3 + workload.num_tokens * 50e-6) == pytest.approx(0.8)
    assert RouterBench().paced(Cost(-1.0, -1.0)).rate_per_s < 10_000, "a fit through noise"


def test_a_process_is_read_with_its_children() -> None:
    pid = os.getpid()
    before_s = cpu_s(pid)
    while cpu_s(pid) == before_s:
        sum(range(10_000))
    assert waited_s(pid) >= 0
    assert 1 << 20 < rss_nbytes(pid) < 1 << 40
    assert router_processes.family(pid)[0] == pid
    assert Path(f"/proc/{pid}").exists()


def test_too_many_streams_for_this_machine() -> None:
    with pytest.raises(ConfigError, match=r"^the hard limit of open files is \d+; 1000000000000 are needed"):
        check_open_files(10**12)


def test_quick_is_small() -> None:
    bench = make_bench(3, 4000, "", quick=True)
    assert (bench.rounds, bench.streams) == (1, 50)
    assert bench.command == "python -m benchmarks router --rounds 1 --streams 50 --quick"


def test_versions_are_compared_by_their_least_and_by_rounds() -> None:
    found = by_name(compared.results([2e-3, 1e-3, 3e-3], [2e-3, 2e-3, 2e-3]))
    assert found["cpu_per_request, least"].value == pytest.approx(1.0)
    assert found["ratio of the least"].value == pytest.approx(0.5)
    assert found["ratio of a round, median"].value == pytest.approx(1.0)


def test_the_other_version_must_be_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--against .*: no checkout of this project is there"):
        make_bench(1, 1, "", True, against=str(tmp_path))
    kept = make_bench(1, 1, "", True, against="resume")
    assert (kept.resumes, kept.against) == (True, None)


def test_time_is_booked_on_the_projects_innermost_code() -> None:
    frames = []

    def look(value: object) -> str:
        frames.append(sys._getframe())
        return "x"

    source = "def call(look):\n    return json.dumps(object(), default=look)\n"
    space = {"__name__": "pd_cluster.api.gate.some", "json": json}
    exec(compile(source, "some.py", "exec"), space)
    space["call"](look)  # type: ignore[operator]
    layer, function = places_of(frames[0].f_back)
    assert layer == "api/gate → json"
    assert function.startswith("api/gate: call → json ")


def test_several_schedulers_are_judged_by_the_least_times_of_each_load() -> None:
    few = Workload(name="few", num_requests=100, num_tokens=2, num_open=4)
    many = Workload(name="many", num_requests=10, num_tokens=100, num_open=4)
    found = [
        shared.Compared(few, {1: [0.2, 0.1], 3: [0.3, 0.108]}),
        shared.Compared(many, {1: [0.1, 0.3], 3: [0.12, 0.2]}),
    ]
    rows = {row.name: row for row in shared.results(found, with_goals=True)}
    assert rows["cpu_per_request, 3 schedulers"].value == pytest.approx(1.08)
    assert rows["cpu_per_request, 3 over 1, of the least"].met is True
    assert rows["cpu_per_token, 1 scheduler"].value == pytest.approx(100)
    assert rows["cpu_per_token, 3 over 1, of the least"].met is False


def test_routing_is_measured_with_host_caches_where_a_policy_says_so() -> None:
    bench = Conversations(policies=("least-loaded", "prefix-aware+host"), num_blocks=160, host_cache_gib=0.5)
    assert bench.flags_of("least-loaded") == ("--num-blocks=160",)
    assert bench.flags_of("prefix-aware+host") == ("--num-blocks=160", "--kv-host-cache=0.5")
    assert bench.command.endswith("--num-blocks 160 --host-cache 0.5")
    for fields in ({"policies": ("prefix-aware+host",)}, {"host_cache_gib": 1.0}):
        with pytest.raises(ConfigError, match=r"--host-cache"):
            Conversations(**fields)
    with pytest.raises(ConfigError, match="each also with"):
        Conversations(policies=("round+host",))
