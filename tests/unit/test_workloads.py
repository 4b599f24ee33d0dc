"""Loads: named workloads, traces, and prompts from files."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from pd_cluster.bench.prompt_lines import read_prompts
from pd_cluster.bench.request_arrivals import Arrival, prompt_of
from pd_cluster.bench.trace_files import TraceScale, read_trace, write_trace
from pd_cluster.bench.workloads import BLOCK_TOKENS, WORKLOAD_NAMES, Workload, arrivals_of
from pd_cluster.errors import ConfigError


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def shared_tokens(one: Arrival, other: Arrival) -> int:
    """Counts equal leading tokens by a plain loop."""
    first, second = prompt_of(one, 0, 1 << 16), prompt_of(other, 1, 1 << 16)
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


# ---- workloads


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_a_workload_is_seeded_and_whole(name: str) -> None:
    asked = Workload(name=name, num_requests=50, rate_per_s=3.0, num_prompt_tokens=100)  # type: ignore[arg-type]
    found = arrivals_of(asked)
    assert found == arrivals_of(asked) != arrivals_of(msgspec.structs.replace(asked, seed=1))
    assert len(found) == 50
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)
    for number, each in enumerate(found):
        assert len(each.hash_ids) == math.ceil(each.num_prompt_tokens / BLOCK_TOKENS)
        assert len(prompt_of(each, number, 256)) == each.num_prompt_tokens


def test_arrivals_come_at_the_rate() -> None:
    constant = arrivals_of(Workload(num_requests=20, rate_per_s=4.0, process="constant"))
    assert [each.at_s for each in constant] == pytest.approx([0.25 * at for at in range(20)])
    gaps_s = [b.at_s - a.at_s for a, b in pairwise(arrivals_of(Workload(num_requests=4000, rate_per_s=4.0)))]
    assert mean(gaps_s) == pytest.approx(0.25, rel=0.05)
    deviation_s = math.sqrt(mean([(gap_s - 0.25) ** 2 for gap_s in gaps_s]))
    assert deviation_s == pytest.approx(0.25, rel=0.1)  # an exponential distribution's deviation
    asked = Workload(name="conversation", num_requests=4000, rate_per_s=4.0, pause_s=2.0, process="constant")
    sessions = arrivals_of(asked)
    assert 4000 / sessions[-1].at_s == pytest.approx(4.0, rel=0.05)


def test_lengths_are_as_asked() -> None:
    fixed = arrivals_of(Workload(num_requests=5, num_prompt_tokens=77, num_output_tokens=9))
    assert {(each.num_prompt_tokens, each.num_output_tokens) for each in fixed} == {(77, 9)}
    drawn = arrivals_of(Workload(name="log-normal", num_requests=4000, num_prompt_tokens=300, num_output_tokens=50))
    assert mean([each.num_prompt_tokens for each in drawn]) == pytest.approx(300, rel=0.05)
    assert mean([each.num_output_tokens for each in drawn]) == pytest.approx(50, rel=0.05)
    logs = [math.log(each.num_prompt_tokens) for each in drawn]
    assert math.sqrt(mean([(log - mean(logs)) ** 2 for log in logs])) == pytest.approx(0.6, rel=0.05)


def test_prefixes_are_shared_as_asked() -> None:
    asked = Workload(name="shared-prefix", num_requests=400, num_prompt_tokens=128, prefix_share=0.75, num_prefixes=3)
    found = arrivals_of(asked)
    by_prefix: dict[tuple[int, ...], list[Arrival]] = {}
    for each in found:
        by_prefix.setdefault(each.hash_ids[: 96 // BLOCK_TOKENS], []).append(each)
    assert len(by_prefix) == 3
    assert all(len(group) > 80 for group in by_prefix.values())
    one, other = (group[0] for group in list(by_prefix.values())[:2])
    assert shared_tokens(one, next(iter(by_prefix.values()))[1]) == 96
    assert shared_tokens(one, other) == 0
    assert asked.prefix_tokens == 96
    assert Workload(name="fixed").prefix_tokens == 0


def test_turns_continue_their_session() -> None:
    asked = Workload(name="conversation", num_requests=200, num_prompt_tokens=50, num_output_tokens=20, num_turns=5)
    sessions: dict[str, list[Arrival]] = {}
    for each in arrivals_of(asked):
        sessions.setdefault(each.session, []).append(each)
    for turns in sessions.values():
        for before, after in pairwise(turns):
            assert after.num_prompt_tokens > before.num_prompt_tokens + before.num_output_tokens
            assert shared_tokens(before, after) == before.num_prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    (one, *_), (other, *_) = list(sessions.values())[:2]
    assert shared_tokens(one, other) == 0


def test_agents_share_their_tools() -> None:
    asked = Workload(
        name="tool-agent", num_requests=80, num_prompt_tokens=200, prefix_share=0.8, num_prefixes=1, pause_s=0.5
    )
    first, *others = arrivals_of(asked)
    assert all(each.hash_ids[:10] == first.hash_ids[:10] for each in others)
    assert shared_tokens(first, next(each for each in others if each.session != first.session)) == 160


@pytest.mark.parametrize(
    ("field", "value"),
    [("rate_per_s", 0.0), ("rate_per_s", math.nan), ("num_requests", 0), ("prefix_share", 1.5), ("sigma", -1.0)],
)
def test_a_workload_that_cannot_be_is_refused_by_its_field(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"workload fixed: {field}"):
        arrivals_of(Workload(**{field: value}))
    with pytest.raises(ConfigError, match="workload fast: expected one of fixed"):
        arrivals_of(Workload(name="fast"))  # type: ignore[arg-type]


# ---- traces

LINE = {"timestamp": 1000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}


def trace(folder: Path, *lines: dict[str, object]) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_trace_survives_writing_and_reading(tmp_path: Path) -> None:
    made = arrivals_of(Workload(name="tool-agent", num_requests=40, rate_per_s=2.0))
    rounded = [msgspec.structs.replace(each, at_s=round(1e3 * each.at_s) / 1e3) for each in made]
    write_trace(str(tmp_path / "made.jsonl"), made)
    assert read_trace(tmp_path / "made.jsonl") == rounded
    file = trace(tmp_path, LINE)
    write_trace(str(tmp_path / "again.jsonl"), read_trace(file))
    assert json.loads((tmp_path / "again.jsonl").read_text()) == {**LINE, "timestamp": 0}  # only Mooncake's fields


def test_a_trace_is_scaled(tmp_path: Path) -> None:
    file = trace(tmp_path, {**LINE, "timestamp": 5000, "hash_ids": [0, 1, 3]}, LINE, {**LINE, "timestamp": 9000})
    assert [each.at_s for each in read_trace(file)] == [0.0, 4.0, 8.0]  # sorted, starting from 0
    short = read_trace(file, TraceScale(lengths=0.25, time=0.5, limit=2))
    assert [each.at_s for each in short] == [0.0, 2.0]
    assert (short[0].num_prompt_tokens, short[0].block_tokens, short[0].num_output_tokens) == (2 * 128 + 2, 128, 2)
    assert len(prompt_of(short[0], 0, 256)) == 258
    assert shared_tokens(*short) == 256  # the same common length as before
    twice = read_trace(file, TraceScale(repeat=2))
    assert [each.at_s for each in twice] == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]
    assert twice[3].hash_ids == (4, 5, 6)
    assert not {*twice[0].hash_ids, *twice[1].hash_ids} & {*twice[3].hash_ids, *twice[4].hash_ids}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**LINE, "output_length": 0}, "line 2: output_length: expected `int` >= 1"),
        ({**LINE, "timestamp": "now"}, "line 2: timestamp: expected `float`, got `str`"),
        ({**LINE, "timestamp": -1}, "line 2: timestamp: expected `float` >= 0"),
        ({**LINE, "hash_ids": [1, 2]}, "line 2: hash_ids: 2 ids; a prompt of 1030 tokens has 3 blocks of 512"),
        ({**LINE, "hash_ids": [1, -2, 3]}, r"line 2: hash_ids\[1\]: expected `int` >= 0"),
        ({**LINE, "hash_id": []}, "line 2: object contains unknown field `hash_id`"),
        ({"timestamp": 1}, "line 2: object missing required field `input_length`"),
    ],
)
def test_a_line_that_cannot_be_is_named(tmp_path: Path, line: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"trace .*trace.jsonl, {message}") as raised:
        read_trace(trace(tmp_path, LINE, line))
    assert "\n" not in str(raised.value)


def test_files_and_factors_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace .*absent: cannot be read: No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(ConfigError, match="it has no requests"):
        read_trace(trace(tmp_path))
    with pytest.raises(ConfigError, match="trace time 0: expected a factor"):
        read_trace(trace(tmp_path, LINE), TraceScale(time=0.0))
    with pytest.raises(ConfigError, match="trace repeat 0: expected 1 or more"):
        read_trace(trace(tmp_path, LINE), TraceScale(repeat=0))


# ---- prompts


def test_prompts_are_texts_or_messages(tmp_path: Path) -> None:
    file = trace(tmp_path, {"prompt": "one", "output_tokens": 3}, {"prompt": "two"})
    assert [(each.body, each.output_tokens) for each in read_prompts(file)] == [
        ({"prompt": "one"}, 3),
        ({"prompt": "two"}, None),
    ]
    asked = {"messages": [{"role": "user", "content": "one"}]}
    assert read_prompts(trace(tmp_path, asked))[0].body == asked
    for lines, message in (
        ([{"prompt": "one"}, asked], 'line 2: "prompt" and "messages" are sent to different addresses'),
        ([{"prompt": ""}], 'line 1: give either "prompt" or "messages"'),
        ([{"text": "one"}], "line 1: object contains unknown field `text`"),
        ([{"prompt": "one", "output_tokens": 0}], "line 1: output_tokens: expected `int` >= 1"),
    ):
        with pytest.raises(ConfigError, match=f"--prompts .*{message}"):
            read_prompts(trace(tmp_path, *lines))
