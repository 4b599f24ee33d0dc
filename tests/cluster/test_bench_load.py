"""`pd-cluster bench load` with a real guidellm, against a server with known times and against a real cluster."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from pd_cluster.bench.load.guidellm_process import INSTALL, Guidellm
from pd_cluster.bench.load.load_bench import LoadPlan, addresses_of, run_against
from pd_cluster.bench.load.scenario_file import NUM_TOKEN_IDS, rows_of
from pd_cluster.bench.load_report import results_of
from pd_cluster.bench.outcomes import Slo
from pd_cluster.bench.request_arrivals import prompt_of
from pd_cluster.bench.workloads import Workload, arrivals_of
from pd_cluster.result_tables import percentile
from tests.support.scripted_streams import NUM_CACHED, ScriptedServer, SentStream

VARIABLE = "PD_CLUSTER_TEST_GUIDELLM"
GUIDELLM = os.environ.get(VARIABLE, "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not GUIDELLM, reason=f"{VARIABLE} names no guidellm: {INSTALL}"),
]
ASKED = Workload(name="log-normal", num_requests=200, rate_per_s=25.0, num_prompt_tokens=80, num_output_tokens=30)


def ttft_s(stream: SentStream) -> float:
    return stream.moments[0][0] - stream.received_s


def tpot_s(stream: SentStream) -> float:
    return (stream.moments[-1][0] - stream.moments[0][0]) / max(1, stream.num_tokens - 1)


def clear_goal(streams: Sequence[SentStream], taken_s: Callable[[SentStream], float]) -> float:
    """Returns a goal in the widest gap between the middle streams' times, so that measurement errors do not matter."""
    values = sorted(map(taken_s, streams))
    middle = values[len(values) // 4 : 3 * len(values) // 4]
    _, at = max((after - before, at) for at, (before, after) in enumerate(pairwise(middle)))
    return (middle[at] + middle[at + 1]) / 2


def test_the_report_is_what_the_server_sent(tmp_path: Path) -> None:
    """The report matches 200 sent streams with gaps, grouped tokens, half characters, and errors midway."""
    arrivals = arrivals_of(ASKED)
    guidellm = Guidellm.find(GUIDELLM)
    plan = LoadPlan(title="scripted", rows=list(rows_of(arrivals)), guidellm=guidellm, folder=tmp_path)
    plan.check()
    with ScriptedServer() as server:
        (run,) = asyncio.run(run_against(plan, *addresses_of(server.url, "", "", {})))
    good = [stream for stream in server.streams if not stream.failed]
    assert len(server.streams) == len(run.outcomes) == 200
    assert 0 < len(good) < 200
    assert {stream.request_id for stream in server.streams if stream.failed} == {
        outcome.request_id.removeprefix("cmpl-") for outcome in run.outcomes if outcome.error
    }

    found = {result.name: result.value for result in results_of(run)}
    gaps_s = [b[0] - a[0] for stream in good for a, b in pairwise(stream.moments)]
    for name, sent_s in (("ttft", [*map(ttft_s, good)]), ("tpot", [*map(tpot_s, good)]), ("itl", gaps_s)):
        assert found[f"{name}_p50"] == pytest.approx(1e3 * (percentile(sent_s, 50) or 0), abs=5.0), name
    assert sum(each.num_output_tokens for each in run.outcomes if not each.error) == sum(s.num_tokens for s in good)
    assert {each.num_cached_tokens for each in run.outcomes if not each.error} == {NUM_CACHED}

    run.slo = Slo(ttft_s=clear_goal(good, ttft_s), tpot_s=clear_goal(good, tpot_s))
    num_met = sum(ttft_s(each) <= run.slo.ttft_s and tpot_s(each) <= run.slo.tpot_s for each in good)
    assert {result.name: result.value for result in results_of(run)}["goodput"] == num_met / run.duration_s

    server.streams.sort(key=lambda stream: stream.received_s)
    assert sorted(stream.prompt for stream in server.streams) == sorted(
        prompt_of(each, number, NUM_TOKEN_IDS) for number, each in enumerate(arrivals)
    )
    late_s = [
        abs(stream.received_s - server.streams[0].received_s - each.at_s)
        for stream, each in zip(server.streams, arrivals, strict=True)
    ]
    assert (percentile(late_s, 90) or 0) < 0.1


async def output_of(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pd_cluster", "bench", "load", f"--guidellm={GUIDELLM}", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


def test_a_fresh_cluster_s_requests_are_joined_with_its_timelines(tmp_path: Path) -> None:
    shape = ("--num-requests=24", "--rate=8", "--input-len=60", "--output-len=12", "--pause=1")
    file = tmp_path / "load.json"
    code, out = asyncio.run(output_of("--workload=conversation", *shape, "--slo-ttft=5", f"--json={file}"))
    assert code == 0, out
    found = json.loads(file.read_text())
    assert [each["error"] for each in found["requests"]] == [""] * 24
    assert all(each["prefill"] == "prefill-0" and each["decode"] == "decode-0" for each in found["requests"])
    assert all(each["prefill_s"] > 0 and each["handover_s"] >= 0 for each in found["requests"])
    figures = {each["name"]: each["value"] for each in found["results"]}
    assert figures["slo_met"] == 100
    assert figures["cache_hits"] > 20  # from later turns
    assert any(each["num_running"].keys() == {"prefill", "decode"} for each in found["over_time"])


def test_what_guidellm_would_refuse_starts_nothing() -> None:
    code, out = asyncio.run(output_of("--trace=absent", "--rate=3"))
    assert (code, out) == (1, "pd-cluster: --rate: of no use with --trace; leave it out\n")
    code, out = asyncio.run(output_of("--profile=kind=sweep,sweep_size=1"))
    assert (code, out.count("\n")) == (1, 1), out
    assert "sweep_size" in out
    assert "starting" not in out
