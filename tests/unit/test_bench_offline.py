"""`bench offline`: rates, ratios of one round, busy times, tokens; its requests and their order."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.offline.bench import OfflineBench, in_order, make_bench
from benchmarks.offline.figures import BARE, BUSY, CONTENDERS, OF_BARE, ONE, SPLIT, Round, goals_for, results
from benchmarks.offline.service import BLOCK_SIZE, engine_config
from benchmarks.spec import PeerResult, Run
from pd_cluster.tables import Result

TOKENS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]


def one_round(
    bare_s: float = 1.0, one_s: float = 1.0, split_s: float = 1.0, one_busy_s: float = 2.0, prefill_s: float = 0.5
) -> Round:
    def ran(took_s: float, **figures: float) -> PeerResult:
        return PeerResult(runs={"mixed": Run(took_s, TOKENS), "warmup": Run(9.0, [[0]])}, figures=figures)

    return {
        BARE: ran(bare_s, busy_s=1.9),
        ONE: ran(one_s, busy_s=one_busy_s),
        SPLIT: ran(split_s, prefill_s=prefill_s, decode_s=1.5, caller_s=0.2),
    }


def judged(rounds: list[Round], num_threads: int = 1) -> dict[str, Result]:
    return {each.name: each for each in results(rounds, "mixed", goals_for(num_threads))}


def test_rates_count_the_workloads_own_tokens() -> None:
    found = judged([one_round(bare_s=2.0, one_s=4.0, split_s=5.0)])
    assert [found[name].value for name in ("bare engine", "one process", "split")] == [5.0, 2.5, 2.0]
    assert found["split took / one process took"].value == 1.25


def test_a_ratio_is_of_one_round_and_its_median_is_judged() -> None:
    """A slow minute of the machine, in which all were slow, does not count against anybody."""
    rounds = [one_round(bare_s=1.0, one_s=1.0), one_round(bare_s=10.0, one_s=10.4), one_round(bare_s=1.0, one_s=1.2)]
    of_bare = judged(rounds)[OF_BARE]
    assert of_bare.value == pytest.approx(10 / 10.4)
    assert (of_bare.goal, of_bare.met, of_bare.samples) == (0.95, True, 3)
    assert judged([one_round(one_s=1.06)])[OF_BARE].met is False


@pytest.mark.parametrize(("prefill_s", "met"), [(0.69, True), (0.71, False)])
def test_prefill_and_decode_together_are_held_against_the_one_process(prefill_s: float, met: bool) -> None:
    found = judged([one_round(prefill_s=prefill_s)])
    assert found[BUSY].value == pytest.approx((prefill_s + 1.5) / 2)
    assert (found[BUSY].goal, found[BUSY].met) == (1.1, met)
    assert found["all of split busy / one process busy"].value == pytest.approx((prefill_s + 1.7) / 2)


def test_tokens_that_differ_are_told() -> None:
    changed = {**one_round(), SPLIT: PeerResult(runs={"mixed": Run(1.0, [[1, 2, 3], [0] * 7])}, figures={})}
    changed[SPLIT].figures.update({"prefill_s": 1.0, "decode_s": 1.0, "caller_s": 1.0})
    found = judged([changed])
    assert found["one process: tokens equal to the bare engine's"].value == 100
    assert found["split: tokens equal to the bare engine's"].value == pytest.approx(30)


def test_cpu_time_is_judged_where_every_process_has_one_thread() -> None:
    several = judged([one_round()], num_threads=2)
    assert several[BUSY].goal is None
    assert several[OF_BARE].goal == 0.95


def test_every_contender_is_first_as_often_as_the_others() -> None:
    orders = [in_order(number) for number in range(3)]
    assert all(sorted(order) == sorted(CONTENDERS) for order in orders)
    assert {order[0] for order in orders} == set(CONTENDERS)


def test_prompts_are_mixed_seeded_and_fit_the_model(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 400, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    header = b"{}"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    spec = OfflineBench().spec(str(tmp_path))
    assert spec == OfflineBench().spec(str(tmp_path))
    (workload,) = spec.workloads
    assert len(workload.prompts) == 256
    assert len({len(prompt) for prompt in workload.prompts}) > 30
    assert max(len(p) + num for p, num in zip(workload.prompts, workload.output_lens, strict=True)) <= 256
    assert max(itertools.chain.from_iterable(workload.prompts)) < 400
    needed = sum(-(-(len(p) + n) // BLOCK_SIZE) for p, n in zip(workload.prompts, workload.output_lens, strict=True))
    assert (engine_config(spec).num_blocks or 0) >= needed  # nobody waits for room, which the contenders do unequally


def test_the_command_is_told_as_it_was_given() -> None:
    assert make_bench("", 256, 5, 2, False).command == (
        "pd-cluster bench offline --num-requests 256 --rounds 5 --threads 2"
    )
    quick = make_bench("/models/x", 256, 5, 1, True)
    assert (quick.num_requests, quick.rounds) == (16, 1)
    assert quick.command.endswith("--threads 1 --model /models/x --quick")
