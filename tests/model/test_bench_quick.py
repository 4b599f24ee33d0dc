"""`pd-cluster bench engine --quick`, `kv --quick`, `offline --quick` and `gpu --quick`, from the command line on."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import child as engine_child
from benchmarks.gpu import bench as gpu
from benchmarks.gpu import parts as gpu_parts
from benchmarks.peers import fused
from pd_cluster.commands import bench as commands


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Runs in this process what each part does in a child: a child would import torch and transformers for seconds.

    Real children: test_quick_runs_our_engine_and_generate, test_quick_measures_the_machine_and_its_handover_on_cpu.
    """

    def run_here(command: Sequence[str], log: Path, deadline_s: float, num_threads: int) -> None:
        python, is_module, module, *arguments = command
        assert (python, is_module) == (sys.executable, "-m")
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        runpy.run_module(module, run_name="__main__")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which a part may change
    for each in (engine_child, gpu_parts):
        monkeypatch.setattr(each, "run_child", run_here)


@pytest.mark.slow
def test_quick_runs_our_engine_and_generate(tmp_path: Path) -> None:
    """Both in processes of their own, on a tiny model; their tokens agree."""
    file = tmp_path / "out.json"
    command = [sys.executable, "-m", "pd_cluster", "bench", "engine", "--quick", "--json", str(file)]
    command += ["--workload", "uniform,mixed", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert {result["name"] for result in written["results"]} == {
        f"{workload} {name}" for workload in ("uniform", "mixed") for name in ("ours", "generate")
    }
    ours = next(each for each in written["engines"] if each["name"] == "ours")
    assert ours["equal"]["uniform"] == ours["equal"]["mixed"] == {"tokens": 1.0, "first_tokens": 1.0}
    assert "goals" in done.stdout


@pytest.mark.slow
def test_quick_asks_a_split_cluster_and_one_instance_in_turn(tmp_path: Path) -> None:
    """`bench serve --against hybrid,vllm`, with a peer that is not there: a cluster of real processes, drained once."""
    file = tmp_path / "serve.json"
    command = [sys.executable, "-m", "pd_cluster", "bench", "serve", "--quick", "--against", "hybrid,vllm"]
    command += ["--num-requests", "4", "--concurrency", "2", "--input-len", "16", "--output-len", "8"]
    command += ["--peers-dir", str(tmp_path / "no peers"), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "note: vllm is not in " in done.stdout
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    assert all(found[f"{name}: output tokens"]["value"] > 0 for name in ("split", "hybrid"))
    assert found["split / hybrid: output tokens"]["goal"] == 0.95


@pytest.mark.slow
def test_quick_hands_over_between_two_processes(tmp_path: Path) -> None:
    """`bench kv --quick`: both transports, checks on and off, the content compared; nothing is judged."""
    file = tmp_path / "kv.json"
    command = [sys.executable, "-m", "pd_cluster", "bench", "kv", "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    names = {result["name"] for result in written["results"]}
    rates = {"memcpy", "gloo", "shm off", "shm on", "dist off", "dist on"}
    assert {f"{name} 1 MiB" for name in rates} | {"block shm on_ms", "block dist off p95_ms"} <= names
    assert all(result["value"] > 0 for result in written["results"])
    assert written["goals"] == []


@pytest.mark.usefixtures("in_this_process")
def test_quick_runs_the_engine_by_itself_in_the_service_and_split(
    checkpoint: Callable[[], Path], tmp_path: Path
) -> None:
    """`bench offline --quick`: the same tokens from all three."""
    file = tmp_path / "offline.json"
    options = ["--quick", "--threads", "1", "--model", str(checkpoint()), "--num-requests", "6", "--json", str(file)]
    done = CliRunner().invoke(commands.app, ["offline", *options])
    assert done.exit_code == 0, done.output
    found = {result["name"]: result for result in json.loads(file.read_text())["results"]}
    for name in ("one process", "split"):
        assert found[name]["value"] > 0
        assert found[f"{name}: tokens equal to the bare engine's"]["value"] == 100
    assert found["split: decode busy"]["value"] > 0
    assert all(each["goal"] is None for each in found.values())


def run_gpu(parts: str, out: Path) -> tuple[dict[str, float], dict[str, object]]:
    """Figures that have a value, by name, and the report."""
    command = [
        sys.executable,
        "-m",
        "pd_cluster.commands.cli",
        "bench",
        "gpu",
        "--quick",
        "--device",
        "cpu",
        "--parts",
        parts,
    ]
    command += ["--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    return figures_in(out)


def figures_in(out: Path) -> tuple[dict[str, float], dict[str, object]]:
    report = json.loads((out / "report.json").read_text())
    assert {part["state"] for part in report["parts"]} == {"done"}
    return {each["name"]: each["value"] for each in report["results"] if each["value"] is not None}, report


def test_quick_measures_the_machine_and_its_handover_on_cpu(tmp_path: Path) -> None:
    """`bench gpu` without a GPU: parts in processes of their own, the handover with and without checksums."""
    figures, report = run_gpu("ceilings,handover", tmp_path)
    assert figures["handover over shm, share of the copy"] > 0
    assert figures["handover over shm, without checksums"] > 0
    assert report["device"] == "CPU"


@pytest.mark.usefixtures("in_this_process")
def test_quick_measures_an_engine_on_cpu(tmp_path: Path) -> None:
    """Both models, every section, profiles."""
    parts = "ceilings,engine,small,attention"  # a share is one of the ceilings
    assert gpu.run(gpu.make_bench(parts, "cpu", True, 110, str(tmp_path), ""))
    figures, report = figures_in(tmp_path)
    for model in ("8B", "0.6B"):
        for name in ("decode 1, share of the floor", "decode 3, host overhead", "start-up from page cache"):
            assert figures[f"{model}: {name}"] >= 0  # a slow machine's is rounded to 0
        assert figures[f"{model}: prefill, share of the best product"] >= 0
        assert figures[f"{model} mixed workload, ours, second run"] > 0
        assert figures[f"{model} decode 3: context"] == 42
        for step in ("decode-2", "prefill"):
            first, *rows = (tmp_path / f"profile-{model}-{step}.txt").read_text().splitlines()
            assert first.split() == ["ms", "share", "calls", "kernel"]
            assert len(rows) > 10, "every kernel of the step"
    assert {f"attention, {what}, {who}" for what in ("decode 3", "prefill") for who in ("ours", "SDPA")} <= set(figures)
    assert report["device"] == "CPU"


@pytest.mark.slow
def test_quick_compares_a_split_cluster_with_one_engine_and_with_transformers(tmp_path: Path) -> None:
    figures, report = run_gpu("cluster,transformers", tmp_path)
    assert figures["split: KV cache received"] > 0
    assert figures["colocated: KV cache received"] == 0
    assert figures["p99 TPOT under long prompts, split / colocated"] > 0
    assert figures["TTFT of 128 tokens, added by the split"] > -100
    assert figures["8B mixed workload, transformers, second run"] > 0
    assert "continuous batching" in str(report["notes"])
    clusters = {line.partition(",")[0] for line in (tmp_path / "between-tokens.csv").read_text().splitlines()[1:]}
    assert clusters == {"split", "colocated"}


def test_quick_measures_products_of_rows(tmp_path: Path, in_this_process: None) -> None:
    """`bench rows --quick`: both kinds of steps in one engine; nothing is judged."""
    file = tmp_path / "out.json"
    result = CliRunner().invoke(
        commands.app, ["rows", "--quick", "--rounds", "1", "--steps", "5", "--json", str(file)], catch_exceptions=False
    )
    assert result.exit_code == 0
    found = {each["name"]: each for each in json.loads(file.read_text())["results"]}
    assert found["tiny, 16 at a time: a step by oneDNN"]["value"] > 0
    assert all(each["value"] > 0 and each["met"] is None for each in found.values())


def test_quick_measures_linear_layers(tmp_path: Path, in_this_process: None) -> None:
    """`bench linear --quick`: every form of weights is faster or slower than float32 by some factor; none is judged."""
    file = tmp_path / "out.json"
    arguments = ["linear", "--quick", "--rounds", "1", "--threads", "1", "--json", str(file)]
    result = CliRunner().invoke(commands.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    found = {each["name"]: each for each in json.loads(file.read_text())["results"]}
    assert found["tiny, rows 8: int4 weights, bfloat16, times float32's speed"]["value"] > 0
    assert found["tiny, rows 1: int8, times reading its bytes"]["value"] > 0
    assert all(each["met"] is None for each in found.values())


@pytest.mark.slow
def test_quick_measures_pools(tmp_path: Path, in_this_process: None) -> None:
    """`bench context --quick`: every dtype is faster or slower than float32 by some factor; none is judged."""
    file = tmp_path / "out.json"
    arguments = ["context", "--quick", "--context", "40", "--rounds", "1", "--threads", "1", "--json", str(file)]
    result = CliRunner().invoke(commands.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    found = {each["name"]: each for each in json.loads(file.read_text())["results"]}
    for dtype in ("bfloat16", "int8", "fp8_e4m3", "int4"):
        assert found[f"tiny, batch 2: {dtype}, times float32's speed"]["value"] > 0
        assert found[f"tiny, prompt of 40: {dtype}, times float32's speed"]["value"] > 0
    sizes = [found[f"tiny, a token's KV: {dtype}"]["value"] for dtype in ("bfloat16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert all(each["met"] is None for each in found.values())


def test_quick_measures_weights(tmp_path: Path, in_this_process: None) -> None:
    """`bench weights --quick`: every kind is faster or slower than float32 by some factor; none is judged."""
    file = tmp_path / "out.json"
    arguments = ["weights", "--quick", "--rounds", "1", "--threads", "1", "--json", str(file)]
    result = CliRunner().invoke(commands.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    found = {each["name"]: each for each in json.loads(file.read_text())["results"]}
    for kind in ("bfloat16", "int8", "int8_wo", "int4_wo", "w4a8", "fp8"):
        assert found[f"tiny, batch 2: {kind}, times float32's speed"]["value"] > 0
        assert found[f"tiny, prompt of 40: {kind}, times float32's speed"]["value"] > 0
    assert all(each["met"] is None for each in found.values())


def test_quick_measures_adapters(tmp_path: Path, in_this_process: None) -> None:
    """`bench lora --quick`: ours against itself without adapters and against PEFT; none is judged."""
    file = tmp_path / "out.json"
    arguments = ["lora", "--quick", "--rounds", "1", "--threads", "1", "--json", str(file)]
    result = CliRunner().invoke(commands.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    found = {each["name"]: each for each in json.loads(file.read_text())["results"]}
    without = "times the speed without --enable-lora"
    assert found[f"no sequence has an adapter, {without}"]["value"] > 0
    assert found[f"2 adapters in the batch, {without}"]["value"] > 0
    assert found["2 adapters in the batch, times the speed of transformers with PEFT"]["value"] > 0
    assert found["loading an adapter beside steps"]["value"] > 0
    assert all(each["met"] is None for each in found.values())


def test_quality_is_measured_against_the_model_as_it_is(tmp_path: Path, one_thread: None) -> None:
    """`bench quality` on the shipped model: 8 bits change next to nothing, 4 bits something."""
    file, texts = tmp_path / "out.json", tmp_path / "texts.txt"
    texts.write_text("The sea is wide, and the moon pulls the water twice a day. " * 12)
    arguments = ["quality", "--kv-cache-dtype", "int8,int4", "--quantization", "int8", "--calibration", str(texts)]
    result = CliRunner().invoke(commands.app, [*arguments, "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    found = {(each["name"], each["unit"]): each["value"] for each in json.loads(file.read_text())["results"]}
    plain = found["as it is", "perplexity"]
    assert found["--kv-cache-dtype int8", "perplexity"] == pytest.approx(plain, rel=0.02)
    assert found["--kv-cache-dtype int4", "perplexity"] != plain
    assert 90 < found["--kv-cache-dtype int8", "% same"] <= 100
    assert ("--quantization int8", "perplexity") in found


def test_fused_layers_and_modules_take_turns(tmp_path: Path) -> None:
    fused.make(tmp_path, "gpt_oss", hidden_size=64, intermediate_size=32, num_hidden_layers=2, vocab_size=300)
    cores = [fused.engine(tmp_path, is_fused) for is_fused in (True, False)]
    kernels = [core.runner.model.kernels for core in cores]  # type: ignore[attr-defined]
    assert [each.split(",")[0] for each in kernels] == ["fused layers", "transformers' modules"]
    found = fused.times(cores, num_rounds=2, num_steps=3, num_tokens=20)
    assert {name: [len(pair) for pair in pairs] for name, pairs in found.items()} == {
        "prompt": [2, 2],
        "decode": [2, 2, 2],
    }
    assert fused.ratio(found["decode"]) > 0
    assert all(not core.scheduler.running for core in cores), "every step was timed"
