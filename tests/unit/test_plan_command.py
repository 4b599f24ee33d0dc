"""`pd-cluster plan` command lines over the real simulator, and refusals before simulating."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.bench.trace_files import write_trace
from pd_cluster.commands.cli import app
from pd_cluster.costs.cost_files import write_costs
from pd_cluster.costs.linear_costs import Costs, HandoverCost, StepCost

STEP = StepCost(step_s=0.01, row_s=0.0001, context_token_s=1e-8, prompt_token_s=1e-4, prompt_pair_s=1e-9)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Writes a trace of long prompts, and costs measured on a CPU."""
    folder, rng = tmp_path_factory.mktemp("plan"), random.Random(5)
    at_s, arrivals = 0.0, []
    for _ in range(40):
        at_s += rng.expovariate(3)
        lengths = {"num_prompt_tokens": rng.randint(600, 1400), "num_output_tokens": rng.randint(10, 30)}
        arrivals.append(Arrival(at_s=at_s, **lengths))
    write_trace(folder / "trace.jsonl", arrivals)
    handover = HandoverCost(0.002, 1e-9)
    kept = {"kv_token_nbytes": 1000, "num_blocks": 8192, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    costs = Costs(model="m", device="cpu", source="pd-cluster profile", step=STEP, handover=handover, **kept)
    write_costs(folder / "costs.json", costs)
    return {"trace": str(folder / "trace.jsonl"), "costs": str(folder / "costs.json"), "folder": str(folder)}


def plan(files: dict[str, str], *words: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--trace", files["trace"], *words])


@pytest.mark.slow
def test_a_plan_over_the_simulator_says_what_to_start(files: dict[str, str]) -> None:
    """Prompts of 1,000 tokens take 0.1 s, so a colocated instance cannot keep tokens 14 ms apart."""
    found = Path(files["folder"], "plan.json")
    words = ("--costs", files["costs"], "--devices", "2", "--slo-ttft", "0.6", "--json", str(found))
    done = plan(files, *words, "--slo-tpot", "0.014")
    assert done.exit_code == 0, done.output
    assert "the smallest layout that meets the goals: 1P1D, 2 devices" in done.stdout
    assert "split: 1P1D meets the goals up to" in done.stdout
    assert "pd-cluster up" in done.stdout
    assert "not measured" not in done.stdout
    answer = json.loads(found.read_text())
    first = answer["layouts"][0]
    assert (first["num_prefill"], first["num_decode"], first["num_hybrid"], answer["met"]) == (1, 1, 0, True)
    assert 1 <= first["breaks_at"] < 10


def test_goals_that_no_layout_meets_name_the_nearest(files: dict[str, str]) -> None:
    """The goal is shorter than a step's fixed 10 ms."""
    goals = ("--slo-tpot", "0.001", "--num-requests", "6")
    done = plan(files, "--costs", files["costs"], "--devices", "1", *goals)
    assert done.exit_code == 1
    assert "no layout meets the goals; the nearest, 1H, takes" in done.stdout
    assert "meets them up to no load" in done.stdout
    assert "do not split" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "h100"), "--slo-ttft, --slo-tpot, --slo-e2e: none is above 0; give a goal in seconds"),
        (("--slo-ttft", "1"), "--costs, --device: give one of them"),
        (("--slo-ttft", "1", "--device", "h100", "--costs", "x"), "--costs, --device: give one of them"),
        (("--slo-ttft", "1", "--device", "h1000"), "--device h1000: expected one of a100, h100"),
        (("--slo-ttft", "1", "--costs", "no-such-file"), "--costs no-such-file: cannot be read"),
        (("--slo-ttft", "1", "--device", "h100", "--model", "/no/such"), "--model /no/such: no such folder"),
        (("--slo-ttft", "-1", "--device", "h100"), "--slo-ttft -1: expected a number of seconds"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_simulated(
    files: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    done = plan(files, "--devices", "2", *words)
    assert done.exit_code != 0
    assert done.stdout == ""
    assert message in str(done.exception)


def test_a_line_of_the_trace_that_cannot_be_is_named(files: dict[str, str]) -> None:
    broken = Path(files["folder"], "broken.jsonl")
    broken.write_text('{"timestamp": 0, "input_length": 5, "output_length": 0}\n')
    done = plan({**files, "trace": str(broken)}, "--devices", "1", "--slo-ttft", "1", "--device", "h100")
    assert f"trace {broken}, line 1: output_length" in str(done.exception)
