"""Estimated costs of a device that was not measured, against manual figures, and commands that start a layout."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.costs.linear_costs import Costs, HandoverCost, StepCost, StepWork
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.model.planning.model_needs import ModelNeeds
from pd_cluster.plan.computed_costs import Infeasible, InstanceShape, computed_costs, step_cost
from pd_cluster.plan.cost_sources import ComputedSource, MeasuredSource, coarser
from pd_cluster.plan.device_models import device_model
from pd_cluster.plan.layout_candidates import LayoutCandidate
from pd_cluster.plan.start_commands import StartCommands
from pd_cluster.simulate.simulated_layout import SimulatedLayout
from ranktable_tools import cli as ranktable_cli
from tests.unit.test_deploy_helm import CHART
from tests.unit.test_page_commands import parse, words_of

NUM_TABLE = 128_256 * 8192  # weights of the embeddings, and of the output layer
NUM_WEIGHTS = 70_553_706_496
LLAMA_70B = ModelNeeds(
    name="llama-70b",
    dtype="bfloat16",
    weights_nbytes=2 * NUM_WEIGHTS,
    read_nbytes=2 * (NUM_WEIGHTS - NUM_TABLE),
    num_active_weights=NUM_WEIGHTS - NUM_TABLE,
    pair_flops=80 * 64 * 2 * (128 + 128),
    num_layers=80,
    num_heads=64,
    hidden_size=8192,
    widest=28_672,
    vocab_size=128_256,
    max_model_len=131_072,
    layouts=(KVLayout(80, 8, keys_and_values(128), 1, "bfloat16"),),
)
H100 = device_model("h100")
READ_S = 2 * (NUM_WEIGHTS - NUM_TABLE) / (3.35e12 * 0.85)  # 48.8 ms for one device to read all weights
FOUR = InstanceShape(tp_size=4, max_num_batched_tokens=2048, max_num_seqs=128)
LOAD = [Arrival(at_s=float(i), num_prompt_tokens=3000, num_output_tokens=200) for i in range(4)]


def test_a_decode_step_of_llama_70b_is_bound_by_its_bytes() -> None:
    costs = computed_costs(LLAMA_70B, H100, FOUR)
    assert isinstance(costs, Costs)
    assert not costs.is_measured
    assert costs.kv_token_nbytes == 80 * 2 * 2 * 128 * 2 == 327_680 // 4  # layers, keys and values, heads, width, bytes
    by_hand_s = READ_S / 4 + 0.001 + 160 * 20e-6  # the weights, the overhead, 160 sums
    assert costs.step.seconds(StepWork(num_rows=1)) == pytest.approx(by_hand_s, rel=1e-3)
    assert by_hand_s == pytest.approx(0.0164, rel=1e-2)
    context = StepWork(num_rows=1, num_context_tokens=100_000)
    added_s = costs.step.seconds(context) - costs.step.seconds(StepWork(num_rows=1))
    assert added_s == pytest.approx(100_000 * 81_920 / (3.35e12 * 0.85))
    pool_nbytes = costs.num_blocks * costs.block_size * costs.kv_token_nbytes
    assert 0.9 * 80e9 - 2 * NUM_WEIGHTS / 4 - 3e9 < pool_nbytes < 0.9 * 80e9 - 2 * NUM_WEIGHTS / 4 - 1e9


def test_a_full_chunk_takes_the_time_of_its_operations_or_of_its_bytes() -> None:
    """It takes the longer of both, and sums over ranks: 160 times 2 x 3/4 x 8192 numbers per token."""
    for chunk, is_bound_by_flops in ((2048, True), (64, False)):
        step = step_cost(LLAMA_70B, H100, replace(FOUR, max_num_batched_tokens=chunk))
        flops_s = chunk * 2 * (NUM_WEIGHTS - NUM_TABLE) / 4 / (989e12 * 0.65)
        sums_s = chunk * 160 * 1.5 * 8192 * 2 / (450e9 * 0.7)
        expected = max(flops_s, READ_S / 4) + sums_s + 0.001 + 160 * 20e-6
        assert (flops_s > READ_S / 4) == is_bound_by_flops
        assert step.seconds(StepWork(num_prompt_tokens=chunk)) == pytest.approx(expected, rel=1e-6)


def test_rows_are_free_until_their_operations_take_longer_than_the_weights() -> None:
    """On one device (without sums): 989e12 x 0.65 / (3.35e12 x 0.85) = 225.8 rows with 2 bytes per weight."""
    step = step_cost(LLAMA_70B, H100, replace(FOUR, tp_size=1))
    assert step.num_flat_rows == 225
    assert step.row_s == pytest.approx(2 * (NUM_WEIGHTS - NUM_TABLE) / (989e12 * 0.65))
    for num_tokens in (16, 225, 300, 2048):  # of a prompt, which reads the weights, too
        took_s = max(num_tokens * step.row_s, READ_S) + 0.001
        assert step.seconds(StepWork(num_prompt_tokens=num_tokens)) == pytest.approx(took_s, rel=0.01)


@pytest.mark.parametrize(
    ("shape", "device", "num_tokens", "reason"),
    [
        (replace(FOUR, tp_size=1), "h100", 1, "1 x h100: weights of 141.1 GB a device and a step's activations leave"),
        (replace(FOUR, tp_size=16), "h100", 1, "16 ranks: a host has 8 h100"),
        (replace(FOUR, tp_size=3), "h100", 1, "64 attention heads cannot be divided among 3 ranks"),
        (FOUR, "h100", 10**7, r"4 x h100: the KV pool has room for \d+ tokens, and the longest request has 10000000"),
        (replace(FOUR, tp_size=2), "910b", 1, "2 x 910b: weights of 70.6 GB"),
    ],
)
def test_instances_that_do_not_fit_are_left_out_with_the_reason(
    shape: InstanceShape, device: str, num_tokens: int, reason: str
) -> None:
    found = computed_costs(LLAMA_70B, device_model(device), shape, num_tokens)
    assert isinstance(found, Infeasible)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(found.reason)


def test_an_npu_has_its_own_blocks_and_slower_links() -> None:
    costs = computed_costs(LLAMA_70B, device_model("910b"), FOUR)
    assert isinstance(costs, Costs)
    assert costs.block_size == 128
    assert costs.handover == HandoverCost(0.002, pytest.approx(1 / (28e9 * 0.7)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"--device h10: expected one of a100, h100, .*did you mean h100"):
        device_model("h10")


def test_measured_costs_are_of_one_number_of_ranks() -> None:
    costs = Costs(model="m", device="cpu", source="pd-cluster profile", step=StepCost(0.01), num_blocks=8192)
    source = MeasuredSource(costs, "costs.json", LOAD)
    assert source.remark == ""
    assert ComputedSource(LLAMA_70B, H100, LOAD).remark == "not measured"
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 1 2: costs.json was measured with one size"):
        source.space((1, 2), False)
    assert source.space((), True).are_neighbours
    space = source.space((2,), False)
    assert (space.tp_sizes, space.chunks, space.seats) == ((2,), (512, 2048), (64, 256))
    assert coarser(costs, LOAD) == Costs(
        **{**{name: getattr(costs, name) for name in costs.__struct_fields__}, "block_size": 32, "num_blocks": 4096}
    )
    small = MeasuredSource(Costs(model="m", device="cpu", source="x", step=StepCost(0.01), num_blocks=100), "f", LOAD)
    found = small.costs(LayoutCandidate(SimulatedLayout(num_hybrid=1)))
    assert found == Infeasible("f: its num_blocks hold 1600 tokens, and the longest request has 3200")


def lines_of(kind: DeviceKind, per_host: int, tp_size: int = 1, **numbers: int) -> StartCommands:
    layout = SimulatedLayout(max_num_batched_tokens=2048, max_num_seqs=64, **numbers)  # type: ignore[arg-type]
    return StartCommands(model="/m", candidate=LayoutCandidate(layout, tp_size), kind=kind, devices_per_host=per_host)


@pytest.mark.parametrize(
    ("start", "num_gen"),
    [
        (lines_of("cuda", 8, tp_size=2, num_prefill=1, num_decode=2), 1),
        (lines_of("cuda", 8, tp_size=4, num_prefill=2, num_decode=3), 3),
        (lines_of("cpu", 1 << 30, num_prefill=1, num_decode=1), 1),
    ],
)
def test_lines_that_start_a_split_are_valid(start: StartCommands, num_gen: int, tmp_path: Path) -> None:
    """The commands parse, and the tables that they write have the files and ports used by the other lines."""
    for line in start.on_this_machine:
        words = words_of(line)
        assert words[0] == "pd-cluster"
        parse(words[1:], True)
    assert bool(start.on_this_machine) == (num_gen == 1)
    tables = [line for line in start.from_tables if line.startswith("pd-ranktable")]
    assert len(tables) == num_gen + (num_gen > 1)
    for line in tables:
        words = [str(tmp_path / word) if "ranktables" in word else word for word in shlex.split(line)[1:]]
        with contextlib.redirect_stdout(io.StringIO()):
            assert ranktable_cli.main(words) == 0
    exported = dict(word.split("=") for word in shlex.split(start.from_tables[len(tables)])[1:])
    whole = tmp_path / exported["GLOBAL_RANK_TABLE_FILE_PATH"]
    size = str(start.candidate.tp_size)
    check = ["check", str(whole), "--node-ports", exported["NODE_PORTS"], "--tensor-parallel-size", size]
    starts = start.from_tables[len(tables) + 1 :]
    assert len(starts) == len(start.places) + 1
    for line in starts:
        variable, sh, script, *flags = shlex.split(line)
        check += ["--local", str(tmp_path / variable.removeprefix("RANK_TABLE_FILE_PATH="))]
        assert (sh, script) == ("sh", "scripts/start_servers.sh")
        parse(["serve", *flags], True)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert ranktable_cli.main(check) == 0, said.getvalue()
    servers = json.loads(whole.read_text())["server_group_list"]
    assert sum(int(group["server_count"]) for group in servers) == len(start.places) + 1


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_lines_that_start_hybrids_register_decode_instances_alone(kind: DeviceKind) -> None:
    start = lines_of(kind, 8, tp_size=2, num_hybrid=2)
    for line in start.on_this_machine:
        assert "--hybrid 2" in line
        parse(words_of(line)[1:], True)
    keys, scheduler, *workers = start.joining
    assert keys == "pd-ranktable keys --save-dir secrets"
    for line in (scheduler, *workers):
        words = words_of(line.removesuffix(" &"))
        parse(words[1:], True)
        assert "--role=prefill" not in words
    assert len(workers) == 2


@pytest.mark.parametrize("numbers", [{"num_prefill": 2, "num_decode": 3}, {"num_hybrid": 4}])
@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_values_for_the_chart_fit_its_schema(kind: DeviceKind, numbers: dict[str, int]) -> None:
    command, *lines = lines_of(kind, 8, tp_size=2, **numbers).helm
    files = [word for word in command.split() if word.startswith("deploy/helm/pd-cluster/")]
    assert all((CHART.parents[2] / name).exists() for name in files)
    assert len(files) == (kind != "cpu")
    values: dict[str, Any] = yaml.safe_load("\n".join(lines))
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))
    total = sum(role["replicas"] for role in values["roles"].values())
    assert total == sum(numbers.values())
    for role in values["roles"].values():
        parse(["serve", *role["args"], *values["scheduler"]["args"]], True)
