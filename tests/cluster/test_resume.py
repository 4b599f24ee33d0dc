"""Streams that resume at another scheduler: after kill -9, with other keys, with two readers, without memory."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import LiveCluster, in_parallel
from tests.support.resuming import EventReader, data_of, id_of, resuming, token_ids_of

pytestmark = pytest.mark.slow

WINDOW_S = 4.0
PATIENCE_S = 60.0
DECODE = ("decode-0", "decode-1")
KEY, FOREIGN = "of-one-client", "of-another"
FLAGS = [f"--resume-window={WINDOW_S:g}", "--max-model-len=4096", "--num-blocks=1200", "--dead-after=2"]
OWN, OTHER = {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"Bearer {FOREIGN}"}
# Each draw of seed 15 is at least 4e-6 from another token. One of seed 11 is only 3e-8 away, and changes
# when keys and values are recomputed within a prompt.
LONG = {"prompt": [7, 8, 9, 10], "max_tokens": 1500, "temperature": 0.8, "seed": 15, "ignore_eos": True}
ASK: dict[str, Any] = {**LONG, "return_token_ids": True, "logprobs": 1, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields two schedulers over one prefill and two decode instances; clients have two keys."""
    flags = [*FLAGS, f"--api-key={KEY}", f"--api-key={FOREIGN}"]
    model = checkpoint("llama", max_position_embeddings=4096)
    says_more = {name: ["--log-level=debug"] for name in DECODE}
    folder = tmp_path_factory.mktemp("resume")
    with LiveCluster(folder, model, 1, 2, flags, num_schedulers=2, member_arguments=says_more) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole(pair: LiveCluster) -> list[bytes]:
    """Returns the data of the whole stream, read without interruption."""
    pair.wait_until("both schedulers serve", lambda: all(is_ready(url) for url in pair.launch.urls))
    with EventReader(pair.launch.urls[0], ASK, OWN) as reader:
        return [data_of(event) for event in reader]


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", trust_env=False).json().get("status") == "ok"
    return False


def not_found(url: str, last_id: str, headers: dict[str, str]) -> bytes:
    with resuming(url, last_id, **headers) as reader:
        assert reader.answer.status_code == 404, list(reader)
        return bytes(reader.answer.content)


def await_end_of_windows(cluster: LiveCluster) -> None:
    """Waits until no instance keeps a stream, by their logs, because a query would restart a stream's window."""

    def num_kept() -> list[int]:
        logs = (cluster.log_file(name).read_text(errors="replace") for name in DECODE)
        lives = (log.rpartition(" ready after ")[2] for log in logs)  # an earlier process's streams are gone
        told = (re.findall(r"(\d+) streams can resume", life) for life in lives)
        return [int(each[-1]) for each in told if each]

    assert num_kept()
    cluster.wait_until("nothing is kept", lambda: not any(num_kept()), WINDOW_S + 30)


def decoding(cluster: LiveCluster) -> list[str]:
    """Returns the decode instances that are computing now."""
    return [i["instance_id"] for i in cluster.instances() if i["role"] == "decode" and i["num_running"]]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("num_read", [1, 40, 700])
def test_another_scheduler_after_kill_9(pair: LiveCluster, whole: list[bytes], num_read: int) -> None:
    first, second = pair.launch.urls
    with EventReader(first, ASK, OWN) as reader:
        events = reader.take(num_read)
        pair.kill("scheduler-0")
        pair.await_exit("scheduler-0")
        with contextlib.suppress(httpx.HTTPError):
            events += list(reader)  # events in transit
    last_id = id_of(events[-1])
    told = {not_found(second, last_id, OTHER), not_found(second, "0" * 32 + "-0", OWN)}
    with resuming(second, last_id, **OWN) as reader:
        events += list(reader)
    assert [data_of(event) for event in events] == whole
    told.add(not_found(second, last_id, OTHER))
    pair.start_member("scheduler-0")
    pair.wait_until("it is back", lambda: is_ready(first))
    await_end_of_windows(pair)
    told.add(not_found(second, last_id, OWN))
    assert len(told) == 1, told
    pair.assert_home()


def answers(status: int, url: str, last_id: str) -> bool:
    with resuming(url, last_id, **OWN) as reader:
        return reader.answer.status_code == status


@pytest.mark.timeout(120)
def test_the_later_of_two_readers_reads(pair: LiveCluster, whole: list[bytes]) -> None:
    first, second = pair.launch.urls
    for other in (second, first):
        with EventReader(first, ASK, OWN) as one:
            events = one.take(5)
            with resuming(other, id_of(events[-1]), **OWN) as two:
                later = two.take(3)
                rest = list(one)
                assert b"another reader has taken this stream over" in rest[-2], rest[-2:]
                assert not rest[-2].startswith(b"id: ")
                assert rest[-1] == b"data: [DONE]"
                later += list(two)
        assert [data_of(event) for event in events + later] == whole
    pair.assert_home()


@pytest.mark.timeout(120)
def test_it_goes_on_without_a_reader_and_ends_with_the_window(pair: LiveCluster, whole: list[bytes]) -> None:
    first, second = pair.launch.urls
    with EventReader(first, {**ASK, "max_tokens": 4000}, OWN) as reader:
        events = reader.take(2)
    pair.wait_until("it goes on", lambda: bool(decoding(pair)))
    await_end_of_windows(pair)
    pair.wait_until("it is over", lambda: not decoding(pair))
    not_found(second, id_of(events[-1]), OWN)
    pair.assert_home()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("has_reader", [True, False])
def test_its_instance_is_killed(pair: LiveCluster, whole: list[bytes], has_reader: bool) -> None:
    first, second = pair.launch.urls
    with EventReader(first, ASK, OWN) as reader:
        events = reader.take(60)
        (name,) = decoding(pair)
        if has_reader:
            pair.kill_rank(name)
            events += reader.take(300)  # at another instance, which has the record from the first token
    if not has_reader:
        pair.kill_rank(name)
    pair.await_exit(name)
    if has_reader:
        with resuming(second, id_of(events[-1]), **OWN) as reader:
            events += list(reader)
        assert token_ids_of(events) == token_ids_of(whole)  # logprobs of recomputed tokens may differ slightly
        with resuming(second, id_of(events[0]), **OWN) as reader:
            assert list(reader) == events[1:]
    else:
        pair.wait_until("the other scheduler knows", lambda: answers(404, second, id_of(events[-1])), 20)
    pair.start_member(name)
    pair.await_ready()
    pair.assert_home()


@pytest.mark.timeout(120)
def test_a_scheduler_that_drains_hands_its_streams_over(pair: LiveCluster, whole: list[bytes]) -> None:
    first, second = pair.launch.urls
    with EventReader(first, ASK, OWN) as reader:
        events = reader.take(5)
        for _ in range(2):  # the second signal ends the drain
            pair.kill("scheduler-0", signal.SIGTERM)
        rest = list(reader)
    events += [event for event in rest if event.startswith(b"id: ")]
    assert pair.await_exit("scheduler-0") == 0
    with resuming(second, id_of(events[-1]), **OWN) as reader:
        assert reader.answer.status_code == 200, reader.answer.text
        events += list(reader)
    assert [data_of(event) for event in events] == whole
    pair.start_member("scheduler-0")
    pair.wait_until("it is back", lambda: is_ready(first))
    pair.assert_home()


@pytest.mark.timeout(120)
def test_records_beyond_their_room_are_forgotten_and_streams_go_on(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    flags = ["--resume-window=60", "--resume-memory=1", "--max-model-len=4096", "--num-blocks=1200"]
    heavy = {**ASK, "logprobs": 5, "max_tokens": 900}  # takes 0.65 MiB
    model = checkpoint("llama", max_position_embeddings=4096)
    with LiveCluster(tmp_path, model, 1, 1, flags) as cluster:
        last = []
        for _ in range(2):
            with EventReader(cluster.url, heavy) as reader:
                last.append(list(reader))
        assert not_found(cluster.url, id_of(last[0][3]), {})  # evicted for the second stream
        with resuming(cluster.url, id_of(last[1][3])) as reader:
            assert list(reader) == last[1][4:]
        with EventReader(cluster.url, {**heavy, "max_tokens": 2000}) as reader:  # more than the available memory
            events = list(reader)
        assert len(token_ids_of(events)) == 2000
        assert events[-1].endswith(b"[DONE]")
        assert not_found(cluster.url, id_of(events[-1]), {})
        with EventReader(cluster.url, {**heavy, "max_tokens": 3500}) as reader:
            reader.take(1800)  # it is no longer kept, so it ends with its client
        cluster.assert_home()
        assert "forgotten" not in cluster.logs()


@pytest.mark.timeout(240)
def test_it_meets_ranks_preemption_stop_strings_and_guides(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Runs four streams at once in a pool for two; every connection breaks after 60 events."""
    flags = ["--resume-window=60", "--max-model-len=512", "--num-blocks=64", "--api-workers=2"]
    free = {"max_tokens": 400, "temperature": 0.7, "ignore_eos": True}
    asks = [{**free, "prompt": [20 + at] * 9, "seed": at, "return_token_ids": True} for at in range(2)]
    asks.append({**free, "prompt": [5] * 40, "seed": 9, "stop": ["<word17>"]})
    asks.append({"prompt": "json", "max_tokens": 80, "temperature": 1.0, "seed": 3, "guided_regex": "(ab|cd){30}x"})
    with LiveCluster(tmp_path, checkpoint("llama"), 1, 1, flags, tp_sizes={"decode-0": 2}) as cluster:
        whole: list[list[bytes]] = []
        for ask in asks:
            with EventReader(cluster.url, ask) as reader:
                whole.append([data_of(event) for event in reader])
        found: dict[int, list[bytes]] = {}

        def read(at: int) -> None:
            with EventReader(cluster.url, asks[at]) as reader:
                events = reader.take(60)
            while not events[-1].endswith(b"[DONE]"):
                with resuming(cluster.url, id_of(events[-1]), PATIENCE_S) as reader:
                    assert reader.answer.status_code == 200, reader.answer.text
                    events += reader.take(60)
            found[at] = events

        assert in_parallel([lambda at=at: read(at) for at in range(4)], 4) == []  # type: ignore[misc]
        for at, events in found.items():
            assert [data_of(event) for event in events] == whole[at], at
        cluster.assert_home()


@pytest.fixture(scope="module")
def patient(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a scheduler over one prefill and two decode instances, which keep streams for longer than any test."""
    flags = ["--resume-window=120", "--max-model-len=4096", "--num-blocks=1200"]
    model = checkpoint("llama", max_position_embeddings=4096)
    with LiveCluster(tmp_path_factory.mktemp("patient"), model, 1, 2, flags) as cluster:
        yield cluster


@pytest.mark.timeout(180)
def test_its_instance_is_silent_for_a_while(patient: LiveCluster) -> None:
    with EventReader(patient.url, ASK) as reader:
        whole = [data_of(event) for event in reader]
    with EventReader(patient.url, ASK) as reader:
        events = reader.take(5)
        (name,) = decoding(patient)
    patient.kill_rank(name, signal.SIGSTOP)
    with resuming(patient.url, id_of(events[-1])) as reader:
        assert reader.answer.status_code == 503
    patient.kill_rank(name, signal.SIGCONT)
    with resuming(patient.url, id_of(events[-1]), PATIENCE_S) as reader:
        assert reader.answer.status_code == 200, reader.answer.text
        events += list(reader)
    assert [data_of(event) for event in events] == whole
    patient.await_ready()
    patient.assert_home()
