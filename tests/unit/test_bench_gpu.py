"""`bench gpu`: its counts and judgement, the effect of a failed part on the others, and its report."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from benchmarks.child import ChildFailed
from benchmarks.gpu import bench as gpu
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu import picture as gpu_picture
from benchmarks.gpu.bench import GpuBench, Measured, make_bench
from benchmarks.gpu.goals import COPY, PRODUCTS, READ, judged
from benchmarks.gpu.parts import MODELS, PARTS, Part, parts_of, planned, run_part
from benchmarks.gpu.report import GpuReport, PartResult, table
from benchmarks.gpu.spec import (
    INDEX_FILE,
    LLAMA_8B,
    QUICK_SHAPES,
    QWEN_06B,
    Began,
    Device,
    Ended,
    Figure,
    GpuShape,
    GpuSpec,
    Line,
    Noted,
    Writer,
    read_lines,
)
from benchmarks.peers import gpu_engine
from pd_cluster.client.streaming import Sample
from pd_cluster.errors import ConfigError
from pd_cluster.tables import Result

ROOT = Path(__file__).parents[2]


def figure(name: str, value: float) -> Figure:
    return Figure(name=name, value=value, unit="x", better="higher")


def results_of(
    figures: dict[str, float], shapes: Sequence[GpuShape] = (LLAMA_8B,), quick: bool = False
) -> dict[str, Result]:
    found = judged({name: figure(name, value) for name, value in figures.items()}, shapes, 4096, "ipc", quick)
    return {each.name: each for each in found}


# ---- counting


def test_parameters_are_those_of_the_models_that_the_shapes_are_taken_from() -> None:
    """Norms are left out: in Llama 65 of 4,096 numbers; in Qwen3 two of 1,024 and two of 128 a layer, and one more."""
    assert LLAMA_8B.num_parameters == 8_030_261_248 - 65 * 4096
    assert QWEN_06B.num_parameters == 596_049_920 - (28 * (2 * 1024 + 2 * 128) + 1024)
    assert LLAMA_8B.kv_nbytes_per_token == 128 << 10


def test_a_decode_step_reads_each_weight_once_but_the_embedding_and_the_context_of_every_sequence() -> None:
    weights = 2 * (LLAMA_8B.num_parameters - 128256 * 4096)
    assert LLAMA_8B.decode_read_nbytes(32, 1024) == weights + 32 * 1024 * (128 << 10)
    assert QWEN_06B.decode_read_nbytes(1, 0) == 2 * QWEN_06B.num_parameters  # tied: the output layer is the embedding


def test_flops_of_a_prefill_count_pairs_that_see_each_other_and_one_row_of_logits_a_prompt() -> None:
    shape = QUICK_SHAPES[0]
    pairs = sum(key <= query for query in range(5) for key in range(5))
    wanted = 2 * 5 * shape.num_layers * shape.layer_linear_weights
    wanted += pairs * shape.num_layers * shape.num_heads * 2 * (2 * shape.head_dim)
    wanted += 2 * shape.vocab_size * shape.hidden_size
    assert shape.prefill_flops(3, 5) == 3 * wanted


# ---- judging


def test_a_step_is_held_against_its_bytes_at_the_bandwidth_that_was_measured() -> None:
    gb = LLAMA_8B.decode_read_nbytes(32, 1024) / 1e9
    found = results_of({COPY: 3000, READ: 3200, "8B decode 32: step": 8.0, "8B decode 32: context": 1024})
    assert found["8B: decode 32, floor at the copy's bandwidth"].value == pytest.approx(gb / 3)
    share = found["8B: decode 32, share of the floor"]
    assert (share.value, share.goal, share.met) == (pytest.approx(gb / 3 / 8), 0.85, False)
    of_reading = found["8B: decode 32, share of a floor at the bandwidth of reading"]
    assert of_reading.value == pytest.approx(gb / 3.2 / 8)
    assert of_reading.goal is None


@pytest.mark.parametrize(
    ("figures", "name", "value", "met"),
    [
        ({"8B start-up: process to engine ready": 20.5}, "8B: start-up from page cache", 20.5, False),
        ({"8B decode 1: host overhead": 4.9}, "8B: decode 1, host overhead", 4.9, True),
        ({"8B prefill: model FLOPs": 500, PRODUCTS: 800}, "8B: prefill, share of the best product", 0.625, False),
        ({"handover over ipc, with checksums": 1260, COPY: 3000}, "handover over ipc, share of the copy", 0.84, True),
        (
            {"split: TTFT of 4,096 tokens": 105.5, "colocated: TTFT of 4,096 tokens": 100.0},
            "TTFT of 4,096 tokens, added by the split",
            5.5,
            False,
        ),
        (
            {f"8B mixed workload, {who}, second run": rate for who, rate in (("ours", 9000), ("transformers", 3000))},
            "8B: mixed workload, ours / transformers",
            3.0,
            True,
        ),
    ],
)  # fmt: skip
def test_goals(figures: dict[str, float], name: str, value: float, met: bool) -> None:
    found = results_of(figures)[name]
    assert found.value == pytest.approx(value)
    assert found.met is met


def test_what_was_not_measured_has_no_value_and_meets_no_goal() -> None:
    found = results_of({"8B decode 32: step": 8.0})  # and no bandwidth
    assert found["8B: decode 32, share of the floor"].value is None
    assert found["8B: decode 32, share of the floor"].met is False


def test_only_the_large_model_has_goals_and_none_when_all_is_tiny() -> None:
    both = results_of({}, (LLAMA_8B, QWEN_06B))
    assert not [name for name, each in both.items() if name.startswith("0.6B") and each.goal is not None]
    assert len([each for each in both.values() if each.goal is not None]) == 11
    assert not [each for each in results_of({}, QUICK_SHAPES, quick=True).values() if each.goal is not None]


# ---- parts


def test_models_are_made_once_before_who_reads_them_first() -> None:
    assert planned(["attention"]) == [part for part in PARTS if part.kind == "attention"]
    assert planned(["models"]) == list(MODELS)
    kinds = [(part.kind, part.model) for part in planned([part.kind for part in PARTS])]
    assert kinds.count(("model", 0)) == kinds.count(("model", 1)) == 1
    assert kinds.index(("model", 0)) < kinds.index(("engine", 0))
    assert kinds.index(("cluster", 0)) < kinds.index(("model", 1)) < kinds.index(("small", 1))


def test_the_parts_of_each_stage_of_the_check_fit_four_minutes() -> None:
    """The stages are those of scripts/gpu_check.sh, each with the models that it reads."""
    text = (ROOT / "scripts/gpu_check.sh").read_text()
    bench = r'^run_(\w+)\(\) \{\n(?:    .*\n)*?    bench --stage "\$stage"\n'
    stages = re.findall(bench, text, re.MULTILINE)
    assert {kind for stage in stages for kind in parts_of(stage)} == {part.kind for part in PARTS}
    assert {stage for part in PARTS for stage in part.stages} == set(stages)
    for stage in stages:
        assert sum(part.least_s for part in planned(parts_of(stage))) < 230


def test_the_page_names_the_parts_of_each_stage() -> None:
    page = (ROOT / "docs/benchmarks/gpu.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.* the parts (.*?)(?: below.*)? \|$", page, re.MULTILINE)
    assert {stage: tuple(re.findall(r"`([\w-]+)`", names)) for stage, names in rows} == {
        stage: parts_of(stage) for stage in ("engine", "cluster", "peers")
    }


def test_a_stage_is_named_alone_and_known() -> None:
    assert make_bench("", "cpu", True, 60, "", "", stage="peers").parts == parts_of("peers")
    with pytest.raises(ConfigError, match="--stage peer: expected one of cluster, engine, peers"):
        make_bench("", "cpu", True, 60, "", "", stage="peer")
    with pytest.raises(ConfigError, match="--stage peers and --parts small: give one of them"):
        make_bench("small", "cpu", True, 60, "", "", stage="peers")


def test_the_check_runs_every_kernel_against_its_reference_on_the_gpu() -> None:
    """The same files that tests/model/test_cuda_ops.py interprets; and no file that only interprets or compiles."""
    text = (ROOT / "scripts/gpu_check.sh").read_text()
    interpreted = re.findall(r'"(cuda_\w+_cases\.py)"', (ROOT / "tests/model/test_cuda_ops.py").read_text())
    assert len(interpreted) >= 4
    assert set(interpreted) <= set(re.findall(r"tests/support/(cuda_\w+_cases\.py)", text))
    (listed,) = re.findall(r"files=\$\((grep .*)\)$", text, re.MULTILINE)
    found = subprocess.run(["sh", "-c", listed], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    names = {Path(line).stem for line in found.stdout.split()}
    assert {"test_cuda_model", "test_cuda_deterministic", "test_cuda_transport"} <= names
    assert not {"test_cuda_ops", "test_cuda_attention", "test_cuda_splits", "test_cuda_logits"} & names


class FakeChildren:
    """Replaces run_child: each attempt writes lines and ends as scripted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *attempts: tuple[list[Line], str]) -> None:
        self.sections: list[list[str]] = []
        self._attempts = list(attempts)
        monkeypatch.setattr(gpu_parts, "run_child", self._run)

    def _run(self, command: Sequence[str], log: Path, deadline_s: float, num_threads: int) -> None:
        self.sections.append(msgspec.json.decode(Path(command[-2]).read_bytes(), type=GpuSpec).sections)
        lines, why = self._attempts.pop(0)
        writer = Writer(Path(command[-1]))
        for line in lines:
            writer.put(line)
        if why:
            raise ChildFailed(why)


ENGINE = Part("engine", ("engine",), "gpu_engine", ("decode", "prefill", "mixed"), 10, 100)


def ran(tmp_path: Path, part: Part = ENGINE, deadline_s: float = 100) -> tuple[dict[str, str], list[str]]:
    """States of the part and its sections; names of figures."""
    spec = GpuBench(out=tmp_path).spec(part, tmp_path)
    became, lines = run_part(part, spec, tmp_path, deadline_s)
    return {each.name: each.state for each in became}, [line.name for line in lines if isinstance(line, Figure)]


def test_a_part_goes_on_behind_the_section_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Line] = [Began("load"), Ended("load"), Began("decode"), figure("a", 1), Ended("decode")]
    begun += [Began("prefill"), figure("b", 1)]
    again: list[Line] = [Began("mixed"), figure("c", 1), Ended("mixed")]
    children = FakeChildren(monkeypatch, (begun, "illegal memory access"), (again, ""))
    assert ran(tmp_path) == ({"engine 8B: prefill": "failed"}, ["a", "b", "c"])
    assert children.sections == [["decode", "prefill", "mixed"], ["mixed"]]


def test_a_section_within_a_section_counts_as_the_outer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[Line] = [Began("decode"), Began("decode 1"), Ended("decode 1"), Began("decode 32")]
    children = FakeChildren(monkeypatch, (lines, "no memory"), ([], ""))
    assert ran(tmp_path)[0] == {"engine 8B: decode": "failed"}
    assert children.sections[1] == ["prefill", "mixed"]


def test_a_part_that_cannot_even_load_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = FakeChildren(monkeypatch, ([Began("load")], "no such kernel"))
    assert ran(tmp_path) == ({"engine 8B: load": "failed"}, [])
    assert len(children.sections) == 1


def test_sections_for_which_no_time_is_left_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeChildren(monkeypatch, ([Began("decode")], "not finished within 5 s"))
    states, _ = ran(tmp_path, deadline_s=5)
    assert states == {"engine 8B: decode": "failed", "engine 8B: prefill": "not run", "engine 8B: mixed": "not run"}


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    Writer(file).figure("a", 1.5, "ms", "lower", 3, 0.1)
    with file.open("ab") as out:
        out.write(b'{"type":"Fig')
    assert read_lines(file) == [Figure(name="a", value=1.5, unit="ms", better="lower", samples=3, spread=0.1)]
    assert read_lines(tmp_path / "none") == []


# ---- the whole


def quick_bench(tmp_path: Path, parts: str, budget: float = 100) -> GpuBench:
    return make_bench(parts, "cpu", True, budget, str(tmp_path / "out"), str(tmp_path))


def test_a_part_without_its_model_or_its_time_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 8B model fails; parts that read it are not started; ceilings and the other model's parts are."""
    failed, done = ([Began("model")], "disk full"), ([], "")
    children = FakeChildren(monkeypatch, ([Device("a GPU"), figure(COPY, 3000)], ""), failed, done, done)
    bench = quick_bench(tmp_path, "ceilings,engine,small")
    assert not gpu.run(bench)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    states = {part["name"]: part["state"] for part in report["parts"]}
    wanted = {"ceilings": "done", "model 8B: model": "failed", "engine 8B": "not run", "model 0.6B": "done"}
    assert states == {**wanted, "small 0.6B": "done"}
    assert report["device"] == "a GPU"
    assert next(each["value"] for each in report["results"] if each["name"] == COPY) == 3000
    assert len(children.sections) == 4

    FakeChildren(monkeypatch)
    assert not gpu.run(quick_bench(tmp_path, "ceilings", budget=1))
    (part,) = json.loads((tmp_path / "out" / "report.json").read_text())["parts"]
    assert part["state"] == "not run"
    assert part["why"] == "1 s of --budget were left, and it takes 10 s or more"


def test_a_later_run_adds_to_the_report_and_makes_no_model_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    (models / "model-8B").mkdir(parents=True)
    (models / "model-8B" / INDEX_FILE).touch()

    def bench(parts: str) -> GpuBench:
        return make_bench(parts, "cpu", True, 100, str(tmp_path / "out"), "", str(models), resume=True)

    FakeChildren(monkeypatch, ([Device("a GPU"), figure(COPY, 3000)], ""), ([], "out of memory"))
    assert not gpu.run(bench("ceilings,engine"))
    children = FakeChildren(monkeypatch, ([figure("8B decode 1: host overhead", 2)], ""))
    assert gpu.run(bench("engine"))
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {part["name"]: part["state"] for part in report["parts"]} == {"ceilings": "done", "engine 8B": "done"}
    values = {each["name"]: each["value"] for each in report["results"]}
    assert (values[COPY], values["8B: decode 1, host overhead"]) == (3000, 2)
    assert len(children.sections) == 1

    (tmp_path / "out" / "report.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--resume: .*report\.json is not a report"):
        gpu.run(bench("engine"))


def test_long_among_short_is_held_against_the_bytes_of_all_contexts() -> None:
    gb = LLAMA_8B.decode_read_nbytes(1, 31 * 500 + 32_768) / 1e9
    names = ("8B decode of long among short: step", "8B decode of long among short: context")
    found = results_of({COPY: 3000, names[0]: 10.0, names[1]: (31 * 500 + 32_768) / 32})
    assert found["8B: decode of long among short, share of the floor"].value == pytest.approx(gb / 3 / 10)


def test_a_figure_that_is_measured_again_replaces_the_first() -> None:
    measured = Measured()
    measured.take([figure("a", 1), Noted("first"), figure("a", 2)])
    assert measured.figures["a"].value == 2
    assert measured.notes == ["first"]


@pytest.mark.parametrize(
    ("parts", "device", "folder", "message"),
    [
        ("engine,decode", "cuda", "", r"--parts decode: expected some of ceilings,engine,"),
        ("", "gpu", "", r"--device gpu: expected"),
        ("", "cuda", "/nowhere", r"--folder /nowhere: not a folder"),
    ],
)
def test_wrong_flags_are_refused(parts: str, device: str, folder: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_bench(parts, device, False, 10, "", folder)


def test_too_little_room_for_the_models_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1e9

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    bench = make_bench("engine", "cpu", False, 10, str(tmp_path / "out"), str(tmp_path))
    with pytest.raises(ConfigError, match=rf"--folder {tmp_path}: the models take 16 GB and 1 GB are free"):
        gpu.run(bench)


# ---- the report


def test_the_table_tells_goals_figures_failures_and_notes(tmp_path: Path) -> None:
    results = [
        Result(name="share", value=0.5, unit="x", better="higher", goal=0.85),
        Result(name="start-up", value=None, unit="s", better="lower", goal=20),
        Result(name="copy", value=3012.3, unit="GB/s", better="higher", samples=7, spread=0.012),
        Result(name="not there", value=None, unit="x", better="higher"),
    ]
    parts = [PartResult("ceilings", "done"), PartResult("engine", "failed", 3, "ended; its last lines:\nx\nno memory")]
    GpuReport("pd-cluster bench gpu", "an H100", results, parts, ["FlashInfer is not installed here"]).write(tmp_path)
    lines = table(tmp_path / "report.json").splitlines()
    assert "| share | ≥ 0.85 × | 0.5 × | **not reached** |" in lines
    assert "| start-up | ≤ 20 s |  | not measured |" in lines
    assert "| copy | 3,012 GB/s | 1.2% | 7 |" in lines
    assert "**engine: failed**: ended: no memory" in lines
    assert "- FlashInfer is not installed here" in lines
    assert not [line for line in lines if "not there" in line or "ceilings" in line]


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"results": []}')
    for name in ("x.json", "none.json"):
        with pytest.raises(ConfigError, match=rf"--table {tmp_path / name}: not a report of bench gpu"):
            table(tmp_path / name)


def test_tokens_times_are_written_for_both_clusters_and_drawn(tmp_path: Path) -> None:
    from benchmarks.peers.gpu_cluster import write_gaps

    file = tmp_path / gpu_picture.CSV_FILE
    write_gaps(file, "split", [Sample(ttft_s=0.5, itl_s=[0.01, 0.02])])
    write_gaps(file, "colocated", [Sample(ttft_s=0.25, itl_s=[0.5])])
    assert gpu_picture.points_of(file, "split") == [(0.51, 10.0), (0.53, 20.0)]
    assert gpu_picture.points_of(file, "colocated") == [(0.75, 500.0)]
    assert len(list(csv.reader(file.open(newline="")))) == 4
    pytest.importorskip("matplotlib")
    assert gpu_picture.draw(tmp_path) == ""
    assert (tmp_path / gpu_picture.PNG_FILE).read_bytes().startswith(b"\x89PNG")


# ---- the script


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--fast", "unknown option --fast"),
        ("tests", "unknown stage tests; there are correct, engine, cluster and peers"),
    ],
)
def test_the_check_names_an_argument_that_it_does_not_know(argument: str, message: str) -> None:
    command = ["sh", str(ROOT / "scripts/gpu_check.sh"), argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 1
    assert message in done.stderr


def test_a_check_that_is_stopped_leaves_what_it_has(tmp_path: Path) -> None:
    """SIGTERM in the middle of a step: its process ends, and the files are written."""
    out, models = tmp_path / "out", tmp_path / "models"
    models.mkdir()
    check = subprocess.Popen(
        ["sh", str(ROOT / "scripts/gpu_check.sh"), "peers", "--quick", "--device", "cpu"],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(out), "FOLDER": str(models), "WHEELS": ""},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert check.stderr is not None
    lines = iter(check.stderr.readline, "")
    assert any("bench-peers, " in line for line in lines)
    check.terminate()
    assert check.wait(60) == 143
    check.stderr.close()
    assert sorted(file.name for file in out.iterdir()) == ["logs.tar.gz", "summary.txt"]
    with tarfile.open(out / "logs.tar.gz") as archive:
        assert "logs/summary.txt" in archive.getnames()
    assert not list(models.iterdir())


def test_the_check_names_what_a_python_lacks_before_it_begins(tmp_path: Path) -> None:
    """The Python has a torch that names a GPU, and nothing else."""
    torch = "class cuda:\n    is_available = lambda: True\n    get_device_name = lambda at: 'H100 80GB'\n"
    (tmp_path / "torch.py").write_text(torch)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    done = subprocess.run(
        ["sh", str(ROOT / "scripts/gpu_check.sh")],
        env={**os.environ, "PYTHON": str(bare), "OUT": str(tmp_path / "out"), "WHEELS": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 1
    assert "lacks" in done.stderr
    assert "msgspec>=0.19" in done.stderr
    assert "--download FOLDER" in done.stderr
    assert "torch>" not in done.stderr


def test_the_phases_of_a_start_are_functions_of_the_runner() -> None:
    """The bench replaces them by name while an engine is built."""
    assert all(callable(getattr(gpu_engine.runner_module, name)) for name in gpu_engine.PHASES)
