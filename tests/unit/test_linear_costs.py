"""Fitting a step's cost terms to synthetic steps with known terms, and cost files."""

from __future__ import annotations

import json
import math
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import astuple, replace

from pd_cluster.costs.cost_files import read_costs, write_costs
from pd_cluster.costs.cost_fit import Sample, fit_step, mean_error
from pd_cluster.costs.linear_costs import Costs, HandoverCost, HostCost, NeighbourCost, StepCost, StepWork
from pd_cluster.errors import ConfigError

FLAT = StepCost(0.006, 0.0002, 3e-7, 8e-5, 2e-8, 8)
DECODES = [StepWork(n, n * context) for n, context in product((1, 2, 4, 8, 12, 16, 24, 32, 64), (64, 256, 1024))]
PROMPTS = [
    StepWork(0, 0, n, n * before + n * (n + 1) // 2) for n, before in product((16, 64, 256, 1024, 2048), (0, 512, 4096))
]
COSTS = Costs(
    model="m",
    device="cpu",
    source="pd-cluster profile",
    step=FLAT,
    handover=HandoverCost(0.004, 1e-9),
    host=HostCost(1e-3, 2e-3, 3e-5),
    neighbour=NeighbourCost(1.6, 1.2),
    kv_token_nbytes=4096,
    error={"step": 0.04},
)


def measured(cost: StepCost, works: list[StepWork], seed: int, noise: float) -> list[Sample]:
    rng = random.Random(seed)
    return [(work, cost.seconds(work) * math.exp(rng.gauss(0, noise))) for work in works for _ in range(3)]


def test_exact_steps_give_their_terms() -> None:
    for cost in (FLAT, replace(FLAT, num_flat_rows=0), replace(FLAT, num_flat_rows=16, step_s=0.0)):
        found, error = fit_step([(work, cost.seconds(work)) for work in DECODES + PROMPTS])
        assert astuple(found) == pytest.approx(astuple(cost), rel=1e-6, abs=1e-15)
        assert error < 1e-9


def test_rows_use_the_free_ones_before_prompt_tokens() -> None:
    def seconds(num_rows: int, num_tokens: int) -> float:
        return FLAT.seconds(StepWork(num_rows, 0, num_tokens))

    assert seconds(0, 8) == seconds(8, 0) == seconds(3, 5) == FLAT.step_s
    assert seconds(0, 10) == pytest.approx(FLAT.step_s + 2 * FLAT.prompt_token_s)
    assert seconds(6, 10) == pytest.approx(FLAT.step_s + 8 * FLAT.prompt_token_s)
    assert seconds(9, 10) == pytest.approx(FLAT.step_s + FLAT.row_s + 10 * FLAT.prompt_token_s)


def test_a_step_that_reads_weights_as_long_as_it_computes_few_tokens_is_fitted() -> None:
    """A line through prompts alone would miss the times of usual lengths by a tenth."""
    true = StepCost(step_s=0.04, prompt_token_s=0.0015, prompt_pair_s=6e-7, num_flat_rows=32)
    prompts = [StepWork(0, 0, num, num * (num + 1) // 2) for num in (8, 16, 32, 64, 128, 256, 512, 1024)]
    found, error = fit_step([(work, true.seconds(work)) for work in [StepWork(1, 32), StepWork(2, 64), *prompts]])
    assert (found.num_flat_rows, error) == (32, pytest.approx(0.0, abs=1e-6))


def test_noisy_steps_predict_steps_that_were_not_measured() -> None:
    held_out = [StepWork(20, 10_000), StepWork(48, 9_000), StepWork(3, 1_500), StepWork(0, 0, 500, 500 * 1_000)]
    held_out += [StepWork(10, 4_000, 700, 700 * 350)]  # decode rows beside a prompt, a mix that was not fitted
    for seed in range(20):
        found, error = fit_step(measured(FLAT, DECODES + PROMPTS, seed, 0.05))
        assert 0.02 < error < 0.06, "the noise's mean magnitude is 4 %"
        for work in held_out:
            assert found.seconds(work) == pytest.approx(FLAT.seconds(work), rel=0.1), (seed, work, found)


def test_the_fit_is_the_best_of_a_grid() -> None:
    """Negative terms become 0, and the others are the best fit without them."""
    rng = random.Random(3)
    grid = [StepCost(step_s=1e-4 * a, row_s=1e-5 * b) for a in range(300) for b in range(20)]
    for _ in range(20):
        samples = [(StepWork(n), max(0.001, 0.02 - 0.0004 * n + rng.gauss(0, 0.001))) for n in (1, 2, 4, 8, 16)]
        found, _ = fit_step(samples)
        assert min(astuple(found)) >= 0
        assert loss(found, samples) <= min(loss(cost, samples) for cost in grid) + 1e-9


def loss(cost: StepCost, samples: list[Sample]) -> float:
    return sum((cost.seconds(work) / took_s - 1) ** 2 for work, took_s in samples)


@pytest.mark.parametrize(
    ("work", "term"),
    [(StepWork(4, 400), "step_s"), (StepWork(0, 0, 512, 512 * 256), "prompt_token_s"), (StepWork(1, 0), "step_s")],
)
def test_samples_of_one_kind_give_one_term(work: StepWork, term: str) -> None:
    cost = StepCost(step_s=0.01)
    found, _ = fit_step(measured(cost, [work] * 7, 1, 0.05))
    assert found.seconds(work) == pytest.approx(0.01, rel=0.05)
    assert [name for name in found.__struct_fields__ if getattr(found, name)] == [term]


def test_steps_without_work_or_time_are_not_fitted() -> None:
    assert fit_step([(StepWork(), 1.0), (StepWork(1), 0.0), (StepWork(1), 0.5)])[0].seconds(StepWork(1)) == 0.5
    assert mean_error(StepCost(), []) == 0.0
    for samples in ([], [(StepWork(), 1.0)]):
        with pytest.raises(ValueError, match="no step"):
            fit_step(samples)


# ---- files


def test_a_file_has_every_number_under_its_name(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    write_costs(file, COSTS)
    assert read_costs(file) == COSTS
    assert json.loads(file.read_text())["step"]["prompt_pair_s"] == 2e-8
    file.write_text(
        '{"model": "m", "device": "h100", "source": "computed", "step": {"step_s": 1, "prompt_token_s": 1}}'
    )
    assert not read_costs(file).is_measured
    assert read_costs(file).max_num_seqs == 256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": {"row_s": -1}}, "step.row_s is -1: Expected `float` >= 0.0"),
        ({"step": {"num_flat_rows": 0.5}}, "step.num_flat_rows is 0.5: Expected `int`"),
        ({"step": {"step_ms": 3}}, "step.step_ms: no such field; expected step_s, row_s"),
        ({"step": [1, 2]}, "step is [1, 2]; expected a JSON object"),
        ({"step": {}}, "step: a step of 1 decoding rows takes no time at all"),
        ({"step": {"step_s": 1e400}}, "not JSON"),
        ({"neighbour": {"decode_beside_prefill": "2"}}, "neighbour.decode_beside_prefill is '2': Expected `float`"),
        ({"num_blocks": 0}, "num_blocks is 0: Expected `int` >= 1"),
        ({"model": None}, "model is None: Expected `str`"),
        ({"error": {"step": "x"}}, "error is {'step': 'x'}: Expected `float`"),
    ],
)
def test_a_file_that_cannot_be_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = tmp_path / "costs.json"
    whole = {"model": "m", "device": "cpu", "source": "s", "step": {"step_s": 1.0, "prompt_token_s": 1.0}}
    file.write_text(json.dumps(whole | change))
    with pytest.raises(ConfigError) as caught:
        read_costs(file)
    assert str(caught.value).startswith(f"--costs {file}: {words}")
    assert "\n" not in str(caught.value)


def test_no_file_no_json_and_a_missing_field(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    for text, words in (("", "not JSON"), ("[1]", "the file is [1]"), ('{"model": "m"}', "device is missing")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(words)):
            read_costs(file)
    with pytest.raises(ConfigError, match=r"--costs .*: cannot be read: Is a directory"):
        read_costs(tmp_path)
    with pytest.raises(ConfigError, match=r"--out .*cannot be written"):
        write_costs(tmp_path / "nowhere" / "f", COSTS)


def test_more_instances_than_cores_share_them() -> None:
    cost = NeighbourCost(1.1, 2.0, num_cores=2)
    assert [cost.factor(True, number) for number in (1, 2, 3, 4)] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert [cost.factor(False, number) for number in (1, 2, 4)] == pytest.approx([1.0, 1.1, 2.2])
    assert NeighbourCost(1.1, 2.0).factor(True, 4) == 2.0, "without a core count there is no crowding"
