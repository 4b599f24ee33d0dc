"""The figures and flags of `bench serve --against`; tests/model/test_bench_quick.py runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serve_against import Round, Run, Steady, make_bench, results
from pd_cluster.bench.serve import ServeBench
from pd_cluster.client.streaming import Sample
from pd_cluster.errors import ConfigError, GenerationError


def sample(gaps_s: list[float], ttft_s: float = 0.5) -> Sample:
    return Sample(ttft_s=ttft_s, itl_s=gaps_s, num_output_tokens=len(gaps_s) + 1)


def test_a_run_is_what_clients_saw() -> None:
    run = Run.of([sample([0.01] * 99 + [0.03], 0.2), sample([0.01] * 100, 0.4)], took_s=2.0)
    assert run.tokens == pytest.approx(101)
    assert run.ttft == pytest.approx(300)
    assert run.itl == pytest.approx(10.1)
    assert run.itl_p99 == pytest.approx(10)
    assert run.second == pytest.approx(10)
    with pytest.raises(GenerationError, match="1 requests failed; the first: gone"):
        Run.of([sample([0.01]), Sample(error="gone")], 1.0)


def test_ratios_are_those_within_a_round() -> None:
    """A slow round is slow for all: the ratio of the medians would be another one."""
    fast, slow = Run(200, 100, 10, 13, 15), Run(100, 300, 20, 30, 31)
    rounds = [
        Round({"split": fast, "vllm": Run(160, 150, 9, 10, 9)}, Steady(10, 12)),
        Round({"split": slow, "vllm": Run(90, 600, 20, 24, 20)}, Steady(10, 14)),
    ] * 2
    found = {each.name: each for each in results([*rounds, rounds[0]])}
    assert found["split / vllm: output tokens"].value == pytest.approx(1.25)
    assert found["vllm / split: mean TTFT"].value == pytest.approx(1.5)
    assert found["vllm / split: mean TTFT"].met
    ratio = found["split: p99 / mean between tokens"]
    assert (ratio.value, ratio.goal, ratio.met) == (pytest.approx(1.3), 1.3, True)
    assert found["vllm: p99 / mean between tokens"].goal is None
    assert found["constant work: p99 / mean"].value == pytest.approx(1.2)


def test_a_schedulers_cpu_is_compared_where_both_are_ours() -> None:
    own = Run.of([sample([0.01] * 99)], took_s=2.0, used_s=0.01)
    assert own.cpu_us == pytest.approx(100)
    runs = {"split": own, "resume": Run(200, 100, 10, 13, 15, 103), "vllm": Run(160, 150, 9, 10, 9)}
    found = {each.name: each for each in results([Round(runs, Steady(10, 12))])}
    assert found["resume / split: scheduler's CPU a token"].value == pytest.approx(1.03)
    assert "vllm / split: scheduler's CPU a token" not in found


def test_flags() -> None:
    bench = make_bench(ServeBench(concurrency=16), "hybrid, vllm", 2, "", quick=False)
    assert bench.others == ("hybrid", "vllm")
    assert bench.serve.more_flags == ("--no-enable-prefix-caching",)
    assert bench.command.endswith("--against hybrid,vllm --rounds 2")
    assert make_bench(ServeBench(), "vllm", 3, "~/peers", quick=True).peers_dir == Path("~/peers").expanduser()
    with pytest.raises(ConfigError, match="--against sglang: expected some of hybrid,resume,vllm"):
        make_bench(ServeBench(), "sglang", 1, "", quick=False)
    with pytest.raises(ConfigError, match="leave out --url"):
        make_bench(ServeBench(url="http://host:1"), "hybrid", 1, "", quick=False)
