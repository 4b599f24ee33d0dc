"""`pd-cluster bench soak` without a cluster: tallies, slopes, and accepted parameters."""

from __future__ import annotations

import pytest

from benchmarks.faults.soak import SOAK_FAULTS, make_bench
from benchmarks.faults.soak_report import Soak, Tally, Use, Watch, slope_per_hour
from benchmarks.load import Answer
from pd_cluster.client.streaming import Sample
from pd_cluster.errors import ConfigError

EXPECTED = [(1, 2, 3), (4, 5, 6)]


def answer(number: int, token_ids: tuple[int, ...] = (), error: str | None = None, **more: object) -> Answer:
    sample = Sample(token_ids=token_ids, error=error, itl_s=[0.1, 0.4], ttft_s=0.2, **more)  # type: ignore[arg-type]
    return Answer(number, 1.0, 2.0, sample)


def test_every_answer_is_held_against_the_right_tokens() -> None:
    tally = Tally(EXPECTED)
    for each in (
        answer(0, (1, 2, 3)),
        answer(3, (4, 5, 6)),
        answer(2, (1, 9, 3)),
        answer(1, (4,), error="decode-1 was lost"),
        answer(4, error="HTTP 429: busy", status=429, retry_after="1"),
    ):
        tally.take(each)
    found = {result.name: (result.value, result.met) for result in tally.results()}
    assert found["complete"] == (75.0, False)
    assert found["exact"] == pytest.approx((200 / 3, False))
    assert (found["requests"][0], found["refused"][0], found["worst gap"][0]) == (5, 1, 0.4)
    assert tally.lines == [
        "request 2 (nobody) differs from token 1 on",
        "request 1 (nobody) failed after 1 tokens: decode-1 was lost",
    ]
    assert not Soak(60.0, tally, Watch()).is_right


def test_a_refusal_that_does_not_say_when_to_come_again_has_failed() -> None:
    tally = Tally(EXPECTED)
    tally.take(answer(0, error="HTTP 429: busy", status=429))
    assert (tally.num_refused, tally.num_complete, len(tally.lines)) == (0, 0, 1)


def test_a_held_block_or_a_process_that_is_left_is_wrong() -> None:
    tally = Tally(EXPECTED)
    tally.take(answer(0, (1, 2, 3)))
    assert Soak(60.0, tally, Watch()).is_right
    assert not Soak(60.0, tally, Watch(), num_held=1).is_right


def test_a_slope_is_of_an_hour() -> None:
    uses = [Use(at_s, 10 + at_s / 36, 5) for at_s in (0.0, 10.0, 30.0, 60.0)]
    assert slope_per_hour(uses, lambda use: use.memory_mib) == pytest.approx(100.0)
    assert slope_per_hour(uses, lambda use: use.num_descriptors) == 0


def test_only_processes_that_live_on_have_slopes_and_their_warm_up_does_not_count() -> None:
    watch = Watch()
    for at in range(12):
        filling = 1000.0 * at if at < 4 else 4000.0
        uses = {(1, "scheduler"): Use(10.0 * at, filling, 7)}
        if at < 11:
            uses[2, "decode-1"] = Use(10.0 * at, 1.0, 7)
        watch.note(uses)
    found = {result.name: result.value for result in watch.results()}
    assert found == {
        "scheduler memory": 4000.0,
        "scheduler memory slope": pytest.approx(0.0),
        "scheduler descriptors": 7,
        "scheduler descriptors slope": pytest.approx(0.0),
    }


def test_a_life_that_is_too_short_has_no_slope() -> None:
    watch = Watch()
    for at in range(5):
        watch.note({(1, "scheduler"): Use(float(at), 1.0, 1)})
    assert watch.results() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"faults": "kill-scheduler"}, "--faults 'kill-scheduler': expected some of kill-parent,"),
        ({"minutes": 0.0}, "--minutes 0: must be above 0"),
        ({"load": 1.5}, "--load 1.5: "),
        ({"kv_transport": "nccl"}, "--kv-transport 'nccl': expected shm or dist"),
    ],
)
def test_wrong_parameters_are_named(changes: dict[str, object], message: str) -> None:
    right = {"model": "", "minutes": 1.0, "kv_transport": "shm", "faults": "", "load": 0.4, "seed": 0, "quick": False}
    with pytest.raises(ConfigError, match=message):
        make_bench(**{**right, **changes})  # type: ignore[arg-type]


def test_the_command_can_be_repeated() -> None:
    bench = make_bench("", 30.0, "dist", "", 0.4, 7, quick=False)
    assert bench.faults == SOAK_FAULTS
    assert bench.command == "pd-cluster bench soak --minutes 30 --kv-transport dist --load 0.4 --seed 7"
    quick = make_bench("m", 30.0, "shm", "flap", 0.4, 7, quick=True)
    assert (
        quick.command == "pd-cluster bench soak --model m --faults flap --quick --kv-transport shm --load 0.4 --seed 7"
    )
