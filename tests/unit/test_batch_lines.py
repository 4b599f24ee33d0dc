"""Lines of batch files: valid requests and answers, none lost or repeated when the process is killed."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.errors import ConfigError
from pd_cluster.offline.batch_job import opened_source, opened_target
from pd_cluster.service.files import batch_lines
from pd_cluster.service.files.batch_lines import (
    BatchEntry,
    Output,
    OutputFailed,
    answered_in,
    entries_of,
    entry_of,
    error_of,
    line_of,
    plan,
)

CHAT_URL = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}]}


def line(custom_id: object, **changes: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": CHAT_URL, "body": BODY} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode() + b"\n"


def test_a_request_line_has_its_id_url_and_body() -> None:
    """Blank lines and a byte order mark are skipped."""
    content = b"\xef\xbb\xbf" + line("a") + b"\n  \r\n" + line("b").rstrip()
    found = list(entries_of(io.BytesIO(content)))
    assert [(each.number, each.custom_id, each.url, each.error) for each in found] == [
        (1, "a", CHAT_URL, None),
        (4, "b", CHAT_URL, None),
    ]
    assert json.loads(found[0].body) == BODY


@pytest.mark.parametrize(
    ("text", "custom_id", "param"),
    [
        (b'"\xff"\n', None, None),
        (b"[" * 100_000 + b"\n", None, None),
        (line(""), None, "custom_id"),
        (line("a", url=None), "a", "url"),
        (line("a", body=None), "a", "body"),
    ],
)
def test_a_wrong_line_has_an_error_that_names_what_is_wrong(
    text: bytes, custom_id: str | None, param: str | None
) -> None:
    entry = entry_of(5, text)
    assert entry.error is not None
    assert (entry.custom_id, entry.error.status, entry.error.param) == (custom_id, 400, param)
    written = json.loads(error_of(entry, entry.error))
    assert (written["custom_id"], written["response"]["status_code"]) == (custom_id, 400)
    told = written["response"]["body"]["error"]
    assert written["error"] == (told if custom_id else told | {"line": 5})


def test_a_line_that_is_too_long_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_LINE_NBYTES", 200)
    long = line("b", body={"prompt": "x" * 5000})
    found = list(entries_of(io.BytesIO(line("a") + long + line("c"))))
    assert [(each.number, each.custom_id) for each in found] == [(1, "a"), (2, None), (3, "c")]
    assert found[1].error is not None
    assert found[1].error.status == 413


def test_two_lines_with_one_id_are_refused_by_their_numbers() -> None:
    file = io.BytesIO(line("a") + line("b") + b"\n" + line("b", url="/nowhere"))
    with pytest.raises(ConfigError, match=r"in\.jsonl: lines 2 and 4 have the same custom_id, 'b'"):
        plan(lambda: entries_of(file), set(), "in.jsonl")
    without = io.BytesIO(b"{}\n{}\n")
    assert plan(lambda: entries_of(without), set(), "in.jsonl") == (2, 2)


@pytest.mark.parametrize("content", [b"notes\n", b"notes", b'{"custom_id": "a"}\n', b'{"a": 1}', b"\n"])
def test_a_file_that_is_no_output_of_a_batch_is_left_alone(content: bytes) -> None:
    good = line_of(BatchEntry(1, "a"), 200, b"{}")
    for before, number in ((b"", 1), (good, 2)):
        with pytest.raises(ConfigError, match=rf"out: line {number} is not an answer"):
            answered_in(io.BytesIO(before + content), "out")


def test_the_answers_of_another_program_count_too() -> None:
    other = b'{"custom_id": "a", "id": "vllm-1", "response": {"status_code": 200}, "error": "whatever"}\n'
    assert answered_in(io.BytesIO(other), "out") == ({BatchEntry(9, "a").key}, len(other))


PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")  # as in str.isprintable()
ids = st.one_of(st.none(), st.text(PRINTABLE, min_size=1, max_size=8))


@st.composite
def inputs(draw: st.DrawFn) -> bytes:
    """Draws valid lines with different ids, invalid lines, and lines without an id."""
    found = draw(st.lists(ids, max_size=12, unique_by=lambda each: object() if each is None else each))
    kinds = draw(st.lists(st.sampled_from([CHAT_URL, "/nowhere"]), min_size=len(found), max_size=len(found)))
    blanks = draw(st.lists(st.sampled_from([b"", b"\n"]), min_size=len(found), max_size=len(found)))
    return b"".join(blank + line(each, url=url) for each, url, blank in zip(found, kinds, blanks, strict=True))


def run(source: io.BytesIO, target: Path, rng: random.Random) -> Iterator[None]:
    """Writes answers in random order, as the command does; pauses after each, where the test may kill it."""
    with target.open("a+b") as file:
        file.seek(0)
        answered = answered_in(file, "out")
        file.truncate(answered.nbytes)
        left = [entry for entry in entries_of(source) if entry.key not in answered.keys]
        assert len(left) == plan(lambda: entries_of(source), answered.keys, "in").num_left
        rng.shuffle(left)
        for entry in left:
            text = json.dumps({"text": "é\n" * rng.randrange(4)}).encode()
            Output(file.fileno()).write(error_of(entry, entry.error) if entry.error else line_of(entry, 200, text))
            yield


@settings(max_examples=60, deadline=None)
@given(content=inputs(), seed=st.integers(0, 2**32), num_kills=st.integers(0, 4))
def test_every_request_is_answered_once_whatever_was_killed(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, seed: int, num_kills: int
) -> None:
    """Each kill comes after some answers and truncates the output anywhere up to the end of the last one."""
    rng, source = random.Random(seed), io.BytesIO(content)
    target = tmp_path_factory.mktemp("batch") / "out.jsonl"
    kept: list[bytes] = []
    for _ in range(num_kills):
        before = target.stat().st_size if target.exists() else 0
        for _, _ in zip(range(rng.randrange(8)), run(source, target, rng), strict=False):
            pass
        size = target.stat().st_size if target.exists() else 0
        if size:
            os.truncate(target, rng.randint(min(before, size), size))
            kept = target.read_bytes().splitlines(keepends=True)
            kept = [each for each in kept if each.endswith(b"\n")]
    for _ in run(source, target, rng):
        pass
    lines = target.read_bytes().splitlines(keepends=True)
    assert lines[: len(kept)] == kept  # complete lines are unchanged
    found = [json.loads(each) for each in lines]
    got = [(each["custom_id"], (each["error"] or {}).get("line")) for each in found]
    wanted = [(e.custom_id, None if e.custom_id else e.number) for e in entries_of(source)]
    assert sorted(got, key=repr) == sorted(wanted, key=repr)
    assert list(run(source, target, rng)) == []


def test_a_line_that_a_system_call_takes_in_parts_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    written = bytearray()

    def write(fd: int, data: memoryview) -> int:
        written.extend(data[:3])
        return min(3, len(data))

    monkeypatch.setattr(os, "write", write)
    Output(99).write(b"0123456789\n")
    assert written == b"0123456789\n"


def test_an_output_that_takes_no_more_is_told() -> None:
    with open("/dev/full", "wb") as file, pytest.raises(OutputFailed, match="No space left"):
        Output(file.fileno()).write(b"x\n")


def test_what_was_written_is_brought_to_the_disk_once_or_the_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports a failed fsync only once, so the command stops there. Pipes and devices need no fsync."""
    synced, errors = list[int](), list[OSError]()

    def fsync(fd: int) -> None:
        synced.append(fd)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(os, "fsync", fsync)
    with opened_target(str(tmp_path / "out.jsonl")) as target:
        assert len(synced) == 1, "the folder must be synced after a new file"
        output = Output(target.fd)
        output.sync()
        output.write(b"a\n")
        output.write(b"b\n")
        output.sync()
        output.sync()
        assert synced[1:] == [target.fd]
        output.write(b"c\n")
        errors.append(OSError(errno.EIO, "Input/output error"))
        for again in (output.sync, output.sync, lambda: output.write(b"d\n")):
            with pytest.raises(OutputFailed, match="did not reach the disk: Input/output error"):
                again()
    monkeypatch.undo()
    with opened_target("/dev/null") as target:
        assert target.file is None, "nothing can be resumed from a pipe"
        output = Output(target.fd)
        output.write(b"x\n")
        output.sync()


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    name = str(tmp_path / "out.jsonl")
    with opened_target(name), pytest.raises(ConfigError, match="another run-batch writes it"), opened_target(name):
        pass
    with opened_target(name) as target:  # the first process has ended
        assert target.file is not None


def test_an_input_that_can_be_read_once_only_is_read_twice_all_the_same(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = line("a") + line("b")
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    with opened_source(str(pipe)) as source:
        assert [[each.custom_id for each in entries_of(source)] for _ in range(2)] == [["a", "b"]] * 2
    writer.join()
