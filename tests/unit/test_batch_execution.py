"""Batches from first to last state: each custom_id is answered once, despite kills, full disks or expiry."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pd_cluster.api.files.batch_execution import BatchExecution
from pd_cluster.api.files.batch_service import BatchService, chosen
from pd_cluster.api.files.line_answers import LineAnswer
from pd_cluster.errors import Overloaded, Refused, RequestNotFound, StorageFull
from pd_cluster.service.files import batch_states, batch_store
from pd_cluster.service.files.batch_journal import BatchJournal
from pd_cluster.service.files.batch_lines import BatchEntry, line_of
from pd_cluster.service.files.batch_states import WINDOW_S, BatchObject, KeptBatch, RequestCounts, after, ended
from pd_cluster.service.files.batch_store import BatchStore, RunningBatch
from pd_cluster.service.files.file_store import CONTENT, FileStore
from pd_cluster.settings.file_settings import KeptFiles
from tests.support.full_disks import full_disk
from tests.unit.test_file_store import ALL, Clock, content_of, put

URL = "/v1/completions"


class Answers:
    """Answers lines, some with errors. `before` is called with the number of answers so far."""

    def __init__(self, before: Callable[[int], Any] = lambda number: None) -> None:
        self._before = before
        self.asked: list[str | None] = []

    async def answer(self, kept: KeptBatch, entry: BatchEntry) -> LineAnswer:
        await asyncio.sleep(0)
        if (waiting := self._before(len(self.asked))) is not None:
            await waiting
        self.asked.append(entry.custom_id)
        status = 400 if entry.body == b'"bad"' else 200
        body = msgspec.json.encode({"error": {"message": "no"}} if status == 400 else {"text": entry.custom_id})
        return LineAnswer(line_of(entry, status, body), status == 200)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[BatchStore]:
    files = FileStore(KeptFiles(str(tmp_path / "kept"), tenant_mib=16, ttl_s=1e6), clock)
    made = BatchStore(files)
    yield made
    made.close()


def lines(number: int, bad: int = 0) -> bytes:
    found = [
        {"custom_id": f"c{at}", "method": "POST", "url": URL, "body": "bad" if at < bad else at} for at in range(number)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in found)


def create(store: BatchStore, data: bytes, owner: str = "one") -> BatchObject:
    file = put(store.files, owner, data)
    batch = BatchObject(id="", endpoint=URL, input_file_id=file.id, created_at=0, expires_at=0)
    return store.create(batch, owner, None, None)


def execution(store: BatchStore, batch: BatchObject, answers: Answers, most: int = 4) -> BatchExecution:
    made = BatchExecution(store, batch.id, answers)  # type: ignore[arg-type]
    made._most = most
    return made


def execute(store: BatchStore, batch: BatchObject, answers: Answers, most: int = 4) -> BatchObject:
    asyncio.run(execution(store, batch, answers, most).run())
    return store.find("one", batch.id)


def ids_in(store: BatchStore, batch: BatchObject) -> list[str]:
    """Returns the custom_ids in the output and error files."""
    found = []
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            found += [json.loads(line)["custom_id"] for line in content_of(store.files, "one", file_id).splitlines()]
    return found


def test_a_batch_from_its_first_state_to_its_last(store: BatchStore) -> None:
    made = create(store, lines(20, bad=3))
    assert (made.status, made.expires_at - made.created_at) == ("validating", WINDOW_S)
    batch = execute(store, made, Answers())
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (20, 17, 3)
    assert None not in (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert sorted(ids_in(store, batch)) == sorted(f"c{at}" for at in range(20))
    assert batch.output_file_id is not None
    output = store.files.find("one", batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert batch.error_file_id is not None
    first, *_ = map(json.loads, content_of(store.files, "one", batch.error_file_id).splitlines())
    assert (first["response"]["status_code"], first["error"]["message"]) == (400, "no")


def test_the_counts_of_open_batches_are_those_of_all_owners(store: BatchStore) -> None:
    first, second = create(store, lines(9)), create(store, lines(4), "two")
    assert store.open_counts() == RequestCounts()  # their files have not been read yet
    for batch, number in ((first, 9), (second, 4)):
        store.note_begun(batch.id, number)
    store.note_progress(second.id, RequestCounts(4, 1, 2), {})
    assert store.open_counts() == RequestCounts(13, 1, 2)
    execute(store, first, Answers())
    assert store.open_counts() == RequestCounts(4, 1, 2)


def test_without_errors_there_is_no_error_file(store: BatchStore) -> None:
    batch = execute(store, create(store, lines(2)), Answers())
    assert batch.error_file_id is None
    assert len(os.listdir(Path(store.files.config.folder) / CONTENT)) == 2
    failed = execute(store, create(store, lines(2, bad=2)), Answers())
    assert (failed.status, failed.output_file_id) == ("completed", None)


@pytest.mark.parametrize(
    ("data", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (lines(2) + b"no JSON\n", "invalid_line", 3),
        (lines(2) + lines(1), "duplicate_custom_id", 3),
        (lines(1).replace(b"completions", b"embeddings"), "mismatched_endpoint", 1),
        (lines(1).replace(b"POST", b"GET"), "method_not_supported", 1),
        (b'{"method": "POST"}\n', "invalid_line", 1),
        (lines(50_001), "too_many_requests", None),
    ],
)
def test_an_input_file_with_errors_fails_as_a_whole(store: BatchStore, data: bytes, code: str, line: int) -> None:
    answers = Answers()
    batch = execute(store, create(store, data), answers)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    assert [(each.code, each.line) for each in batch.errors.data] == [(code, line)]
    assert not answers.asked


@pytest.mark.parametrize("seed", range(8))
def test_whatever_ends_a_process_each_request_has_one_line(store: BatchStore, seed: int) -> None:
    """A killed process leaves at most one torn line; its answered requests are not repeated."""
    rng, made = random.Random(seed), create(store, lines(60, bad=5))
    kept = store.load(made.id)
    content, num_asked = Path(store.files.config.folder) / CONTENT, 0

    class Killed(Exception):
        pass

    for _ in range(4):
        stop = rng.randrange(1, 20)

        def die(number: int, stop: int = stop) -> None:
            if number >= stop:
                raise Killed

        answers = Answers(die)
        with pytest.raises(Killed):
            execute(store, made, answers)
        num_asked += len(answers.asked)
        for file_id in (kept.output_id, kept.error_id):
            if rng.random() < 0.5:
                torn = line_of(BatchEntry(1, "torn", URL), 200, b'"' + b"x" * 50 + b'"')
                with (content / file_id).open("ab") as file:
                    file.write(torn[: rng.randrange(1, len(torn) - 1)])
    answers = Answers()
    batch = execute(store, made, answers)
    assert batch.status == "completed"
    assert Counter(ids_in(store, batch)) == Counter({f"c{at}": 1 for at in range(60)})
    assert num_asked + len(answers.asked) <= 60 + 4 * 4, "requests that were not in flight were repeated"


def test_a_cancelled_batch_keeps_its_answers(store: BatchStore) -> None:
    made = create(store, lines(30))
    answers = Answers(lambda number: asyncio.Event().wait() if number == 10 else None)

    async def run() -> None:
        executing = asyncio.ensure_future(execution(store, made, answers, 1).run())
        while len(answers.asked) < 10:
            await asyncio.sleep(0.01)
        assert store.cancel("one", made.id).status == "cancelling"
        await executing

    asyncio.run(run())
    batch = store.find("one", made.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("cancelled", 10, 20)
    assert sorted(ids_in(store, batch)) == sorted(f"c{at}" for at in range(30))
    assert batch.error_file_id is not None
    line = json.loads(content_of(store.files, "one", batch.error_file_id).splitlines()[0])
    assert (line["response"], line["error"]["code"]) == (None, "batch_cancelled")
    assert store.cancel("one", made.id) == batch
    with pytest.raises(RequestNotFound):
        store.cancel("two", made.id)


def test_a_batch_that_is_cancelled_at_once_has_no_files(store: BatchStore) -> None:
    made = create(store, lines(3))
    store.cancel("one", made.id)
    batch = execute(store, made, Answers())
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("cancelled", None, None)


def test_a_window_ends(store: BatchStore, clock: Clock) -> None:
    made = create(store, lines(30))

    def late(number: int) -> Any:
        if number < 10:
            return None
        clock.now_s += WINDOW_S
        return asyncio.Event().wait()

    batch = execute(store, made, Answers(late), most=1)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("expired", 10, 20)
    assert sorted(ids_in(store, batch)) == sorted(f"c{at}" for at in range(30))
    never_begun = create(store, lines(3))
    clock.now_s += WINDOW_S + 1
    assert execute(store, never_begun, Answers()).status == "expired"


def test_a_full_disk_loses_nothing(store: BatchStore) -> None:
    made = create(store, lines(40))
    store.note_begun(made.id, 40)
    kept = store.load(made.id)
    entries = [BatchEntry(at, f"c{at}", URL, b"1") for at in range(40)]
    journal, num_written = BatchJournal(store.files, kept), 0
    with full_disk(1000):
        for entry in entries:
            with pytest.raises(StorageFull) if num_written else _nothing():
                journal.write(entry, line_of(entry, 200, b'"' + b"x" * 600 + b'"'), True)
            num_written = 1
    journal.close()
    batch = execute(store, made, Answers())
    assert sorted(ids_in(store, batch)) == sorted(f"c{at}" for at in range(40))


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_answers_beyond_the_quota_are_errors(store: BatchStore) -> None:
    """A batch fills its key's quota with answers; each further answer becomes a short error."""

    class Large(Answers):
        async def answer(self, kept: KeptBatch, entry: BatchEntry) -> LineAnswer:
            self.asked.append(entry.custom_id)
            return LineAnswer(line_of(entry, 200, b'"' + b"x" * 200_000 + b'"'), True)

    answers = Large()
    put(store.files, "one", b"x" * (15 << 20))
    batch = execute(store, create(store, lines(40)), answers, most=1)
    assert (batch.status, batch.request_counts.completed) == ("completed", 5)
    assert len(answers.asked) <= 9
    assert sorted(ids_in(store, batch)) == sorted(f"c{at}" for at in range(40))


def test_a_closed_journal_takes_no_late_answer(store: BatchStore) -> None:
    made = create(store, lines(2))
    store.note_begun(made.id, 2)
    journal = BatchJournal(store.files, store.load(made.id))
    entry = BatchEntry(1, "c0", URL, b"1")
    journal.write(entry, line_of(entry, 200, b"1"), True)
    journal.write(entry, line_of(entry, 400, b'{"error": {}}'), False)
    journal.close()
    journal.write(BatchEntry(2, "c1", URL, b"1"), b"late\n", True)
    assert journal.counts.completed == 1
    assert journal.counts.failed == 0


def test_late_news_of_a_batch_changes_nothing(store: BatchStore) -> None:
    made = create(store, lines(2))
    store.note_begun(made.id, 2)
    kept = store.load(made.id)
    journal = BatchJournal(store.files, kept)
    journal.close()
    batch = execute(store, made, Answers())
    store.note_progress(made.id, journal.counts, {kept.output_id: 0, kept.error_id: 0})
    assert store.find("one", made.id) == batch
    assert sorted(ids_in(store, batch)) == ["c0", "c1"]
    assert len(store.files.files_of("one", "batch_output", ALL)) == 1


def test_one_process_owns_a_batch(store: BatchStore, tmp_path: Path, clock: Clock) -> None:
    made = create(store, lines(1))
    other = BatchStore(FileStore(store.files.config, clock))
    lock = store.take(made.id)
    assert lock is not None
    assert other.take(made.id) is None
    store.release(made.id, lock, has_ended=False)
    taken = other.take(made.id)
    assert taken is not None
    execute(other, made, Answers())
    other.release(made.id, taken, has_ended=True)
    assert store.take(made.id) is None
    assert os.listdir(tmp_path / "kept" / batch_store.LOCKS) == []


def test_two_services_over_one_folder(store: BatchStore, clock: Clock) -> None:
    made = [create(store, lines(10)) for _ in range(6)]
    other = BatchStore(FileStore(store.files.config, clock))
    mine, theirs = Answers(), Answers()

    async def run() -> None:
        services = [BatchService(each, by, lambda owner: True) for each, by in ((store, mine), (other, theirs))]  # type: ignore[arg-type]
        running = [asyncio.ensure_future(service.run()) for service in services]
        async with asyncio.timeout(30):
            while any(store.find("one", batch.id).is_running for batch in made):
                await asyncio.sleep(0.05)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(run())
    assert len(mine.asked) + len(theirs.asked) == 60
    for batch in made:
        ids = ids_in(store, store.find("one", batch.id))
        assert sorted(ids) == sorted(f"c{at}" for at in range(10))


def test_batches_of_an_owner_without_a_key_stand_still(store: BatchStore) -> None:
    made, keys = create(store, lines(20)), {"one"}
    answers = Answers(lambda number: asyncio.Event().wait() if number else None)

    async def run() -> None:
        service = BatchService(store, answers, lambda owner: owner in keys)  # type: ignore[arg-type]
        running = asyncio.ensure_future(service.run())
        async with asyncio.timeout(30):
            while not answers.asked:
                await asyncio.sleep(0.01)
            keys.clear()
            while os.listdir(Path(store.files.config.folder) / batch_store.LOCKS) and store.take(made.id) is None:
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    batch = store.find("one", made.id)
    assert (batch.status, batch.request_counts.completed < 20) == ("in_progress", True)


def test_an_owner_has_a_bounded_number_of_unfinished_batches(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MAX_RUNNING", 2)
    first, _ = (create(store, lines(1)) for _ in range(2))
    with pytest.raises(Overloaded, match="2 unfinished batches"):
        create(store, lines(1))
    execute(store, first, Answers())
    create(store, lines(1))


def test_an_input_file_that_is_gone(store: BatchStore) -> None:
    made = create(store, lines(3))
    store.note_begun(made.id, 3)
    (Path(store.files.config.folder) / CONTENT / made.input_file_id).unlink()
    batch = execute(store, made, Answers())
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data[0].code == "file_not_found"


# ---- pure


def batch_in(status: batch_states.Status) -> BatchObject:
    return BatchObject(id="batch_1", endpoint=URL, input_file_id="file-1", created_at=1, expires_at=2, status=status)


@pytest.mark.parametrize("status", batch_states.get_args(batch_states.Status))
def test_states_and_events(status: batch_states.Status) -> None:
    batch = batch_in(status)
    for event in batch_states.get_args(batch_states.Event):
        wanted = batch_states.NEXT.get((status, event))
        if wanted is None:
            with pytest.raises(Refused, match=f"batch_1: it is {status}"):
                after(batch, event, 5.0)
        else:
            assert after(batch, event, 5.0).status == wanted
    if batch.is_running:
        assert not ended(batch, 5.0).is_running


def test_owners_take_turns() -> None:
    running = [RunningBatch(f"a{at}", "a", False) for at in range(5)] + [RunningBatch("b0", "b", False)]
    assert [each.id for each in chosen(running, {}, 8)][:2] == ["a0", "b0"]
    mine = {each.id: each for each in running[:3]}
    assert [each.id for each in chosen(running, mine, 8)] == ["b0", "a3", "a4"]
    due = RunningBatch("c0", "c", True)
    assert chosen([*running, due], mine, 3) == [due]
