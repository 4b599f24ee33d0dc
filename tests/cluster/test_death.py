"""After workers die or hang, their streams continue elsewhere token for token, and nothing stays held."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.cluster.records.request_spans import Names
from pd_cluster.types import Sampling
from tests.support.checkpoints import assert_greedy
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_same, generate, make_core, random_prompt
from tests.support.otlp_collector import Collector, Seen, collector

Checkpoints = Callable[..., Path]
Tokens = dict[int, list[int]]  # choice → tokens
PROMPT = random_prompt(random.Random(31), 20)
NUM_TOKENS = 900
ENDLESS = 15_000  # number of tokens, most of which are never generated


class Streaming:
    """A long streaming completion on a separate thread, which queues events as they arrive."""

    def __init__(
        self, url: str, max_tokens: int = NUM_TOKENS, headers: dict[str, str] | None = None, **fields: Any
    ) -> None:
        self.events: queue.Queue[tuple[float, str]] = queue.Queue()
        self._headers = headers
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, **fields}
        self._thread = threading.Thread(target=self._run, args=(url, body), daemon=True)
        self._thread.start()

    def _run(self, url: str, body: dict[str, Any]) -> None:
        cut = contextlib.suppress(httpx.RemoteProtocolError)  # when the scheduler itself is killed
        with cut, self._stream(url, body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.put((time.monotonic(), line.removeprefix("data: ")))

    def _stream(self, url: str, body: dict[str, Any]) -> contextlib.AbstractContextManager[httpx.Response]:
        path = f"{url}/v1/completions"
        return httpx.stream("POST", path, json=body, headers=self._headers, timeout=60, trust_env=False)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def next(self) -> tuple[float, str]:
        return self.events.get(timeout=30)

    def some(self) -> list[int]:
        """Returns the single choice's tokens so far, after at least one more event unless the stream has ended."""
        found: list[int] = []
        for _ in range(self.events.qsize() + 1):
            if self.has_ended and self.events.qsize() <= 1:  # [DONE]
                break
            choices = json.loads(self.next()[1])["choices"]
            found += choices[0].get("token_ids") or [] if choices else []
        return found

    def to_the_end(self) -> list[list[int]]:
        """Returns each choice's remaining tokens; asserts that the stream ends normally."""
        tokens: dict[int, list[int]] = {}
        while (data := self.next()[1]) != "[DONE]":
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
        return [tokens[index] for index in sorted(tokens)] or [[]]

    def until_error(self) -> tuple[float, dict[str, Any]]:
        """Returns the stream error's time and content; asserts that [DONE] follows."""
        while True:
            at_s, data = self.next()
            assert data != "[DONE]", "the stream ended without an error"
            if "error" in (event := json.loads(data)):
                assert self.next()[1] == "[DONE]"
                return at_s, event["error"]


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", max_position_embeddings=16384)


@pytest.fixture(scope="module")
def traces() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory, traces: Collector) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("death")
    flags = ["--num-blocks=1024", f"--otlp-traces-endpoint={traces.url}"]
    own = {"scheduler": ["--drain-timeout=600"]}  # so that the drain timeout does not end a stream
    with LiveCluster(folder, model, 1, 2, flags, member_arguments=own) as running:
        yield running


@pytest.fixture(autouse=True)
def whole_again(cluster: LiveCluster) -> Iterator[None]:
    """Restarts afterwards whatever a test killed, and waits until it serves."""
    yield
    for name, process in cluster.processes.items():
        if process.poll() is not None:
            cluster.start_member(name)
    cluster.await_ready()


def caught(cluster: LiveCluster, max_tokens: int = NUM_TOKENS, **fields: Any) -> tuple[Streaming, Tokens, str]:
    """Returns a stream, its first tokens, and the decode instance on which it is the only request.

    Retries if a stream ended before it was observed, because a fast engine is not a fault.
    """
    for _ in range(20):
        stream, begun, found = Streaming(cluster.url, max_tokens, **fields), {}, list[str]()
        for choice in json.loads(stream.next()[1])["choices"]:
            begun[choice["index"]] = choice["token_ids"]

        def busy_or_over(stream: Streaming = stream, found: list[str] = found) -> bool:
            decodes = [i for i in cluster.instances() if i["role"] == "decode"]
            found[:] = [i["instance_id"] for i in decodes if i["num_outstanding"]]
            return len(found) == 1 or stream.has_ended

        cluster.wait_until("one decode instance is busy", busy_or_over)
        if len(found) == 1:
            return stream, begun, found[0]
        stream.to_the_end()
    raise AssertionError(f"20 streams of {max_tokens} tokens ended before they were observed")


def goes_on_after_a_kill(cluster: LiveCluster, folder: Path, role: str, num_tokens: int) -> None:
    """Kills an instance of that role during a request: the stream must end normally, and the cluster recover."""
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    (expected,) = generate(make_core(folder, num_blocks=128), [PROMPT], sampling)
    stream, begun, victim = caught(cluster, num_tokens)
    victim = "prefill-0" if role == "prefill" else victim
    cluster.kill(victim)
    (rest,) = stream.to_the_end()
    if (found := begun[0] + rest) != expected:  # ranks sum in another order
        assert len(found) == num_tokens
        assert_greedy(folder, PROMPT, found)
    cluster.await_exit(victim)
    cluster.start_member(victim)
    cluster.await_ready()
    cluster.assert_home()


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """Returns the long stream's tokens without faults."""
    sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    return generate(make_core(model, num_blocks=1024), [PROMPT], sampling)[0]


@pytest.mark.parametrize("rank_only", [False, True], ids=["worker", "rank process"])
def test_kill_9_of_the_decode_instance(
    cluster: LiveCluster, model: Path, expected: list[int], rank_only: bool, traces: Collector
) -> None:
    for attempt in range(10):  # the stream may end before the kill
        before = num_replays(cluster)
        trace_id = f"{'ab' * 14}{attempt:02x}{rank_only:02x}"
        headers = {"traceparent": f"00-{trace_id}-{'cd' * 8}-01", "tracestate": "vendor=1"}
        stream, begun, victim = caught(cluster, headers=headers)
        if rank_only:
            cluster.kill_rank(victim)
        else:
            cluster.kill(victim)
        assert cluster.await_exit(victim) != 0
        (rest,) = stream.to_the_end()
        assert begun[0] + rest == expected
        if num_replays(cluster) > before:
            break
        cluster.start_member(victim)
        cluster.await_ready()
    other = {"decode-0": "decode-1", "decode-1": "decode-0"}[victim]
    status, health = cluster.health()
    assert (status, health["status"]) == (200, "degraded")
    assert f"continues at {other}: " in cluster.log_file("scheduler").read_text()
    assert_same(model, PROMPT, cluster.complete(PROMPT, 12), 12)  # the other instance serves
    cluster.assert_home()
    if rank_only:
        assert "rank process" in cluster.logs()
    assert_a_trace_of_a_replay(traces.awaited(trace_id, is_replayed), victim, other)


def attempts_of(spans: list[Seen]) -> list[Seen]:
    found = [span for span in spans if span.name == "attempt"]
    return sorted(found, key=lambda span: int(span.attributes[Names.ATTEMPT]))


def is_replayed(spans: list[Seen]) -> bool:
    """Whether a trace contains a replay; it does not if the stream ended before the kill."""
    attempts, ids = attempts_of(spans), {span.span_id for span in spans}
    parents = {span.parent_id for span in spans if span.name == "generate"}
    return len(attempts) > 1 and attempts[-1].span_id in parents and attempts[-1].parent_id in ids


def assert_a_trace_of_a_replay(spans: list[Seen], victim: str, other: str) -> None:
    """Asserts spans for queue, prefill, handover and an interrupted decode, then all again at another instance.

    A further attempt may lie between. Either the scheduler or the prefill instance notices the death first, and a
    worker that dies early reports nothing.
    """
    first, *between, last = attempts_of(spans)
    root = next(span for span in spans if span.span_id == last.parent_id)
    below = [span.name for span in spans if span.parent_id == root.span_id]
    assert below == ["queue", *(["attempt"] * (2 + len(between)))]
    assert (root.name, root.parent_id, root.trace_state) == ("text_completion tiny", "cd" * 8, "vendor=1")
    usage = {Names.INPUT_TOKENS: len(PROMPT), Names.OUTPUT_TOKENS: NUM_TOKENS, Names.FINISH_REASONS: ["length"]}
    assert root.attributes.items() >= usage.items()
    assert not root.is_error
    assert all(attempt.is_error and victim in attempt.told for attempt in (first, *between))
    assert not last.is_error
    parts = {part.name: part for part in spans if part.parent_id == first.span_id}
    prefill = parts.pop("prefill")
    assert (prefill.attributes[Names.INSTANCE], prefill.is_error) == ("prefill-0", False)
    parts.pop("handover", None)
    for decode in parts.values():
        assert (decode.name, decode.attributes[Names.INSTANCE], decode.is_error) == ("decode", victim, True)
        assert decode.attributes[Names.UNREPORTED]
    (part,) = (part for part in spans if part.parent_id == last.span_id)
    assert (part.name, part.attributes[Names.INSTANCE], part.is_error) == ("generate", other, False)


def test_sampled_and_guided_sequences_go_on_as_they_would_have(cluster: LiveCluster) -> None:
    """Three sampled sequences with penalties, and one guided by a regex, are the same as in a run without faults."""
    drawn = {"n": 3, "temperature": 1.0, "seed": 9, "repetition_penalty": 1.1, "ignore_eos": True}
    guided = {"temperature": 1.0, "seed": 3, "ignore_eos": False, "guided_regex": "([a-z]{3,7} ){100}"}
    for fields in (drawn, guided):
        quiet = cluster.complete_choices(PROMPT, 400, **fields)
        stream, tokens, victim = caught(cluster, 400, **fields)
        cluster.kill(victim)
        for index, rest in enumerate(stream.to_the_end()):
            tokens[index] = tokens.get(index, []) + rest
        assert [tokens[index] for index in sorted(tokens)] == quiet
        cluster.restart(victim)
    cluster.assert_home()


def test_kill_9_of_the_only_prefill_instance(cluster: LiveCluster, model: Path) -> None:
    """Decode instances also prefill until a prefill instance is back."""
    cluster.kill("prefill-0")
    cluster.await_exit("prefill-0")
    cluster.wait_until("the prefill instance is missed", lambda: cluster.health()[1]["status"] == "degraded")
    assert cluster.health()[0] == 200
    assert_same(model, PROMPT, cluster.complete(PROMPT, 12), 12)
    cluster.assert_home()
    cluster.restart("prefill-0")
    assert_same(model, PROMPT, cluster.complete(PROMPT, 12), 12)


def test_kill_9_of_all_decode_instances(cluster: LiveCluster, model: Path, expected: list[int]) -> None:
    """The prefill instance decodes as well. A request is not retried after two deaths."""
    for name in ("decode-0", "decode-1"):
        cluster.kill(name)
        cluster.await_exit(name)
    cluster.wait_until("both are missed", lambda: cluster.health()[1]["status"] == "degraded")
    stream = Streaming(cluster.url)
    (tokens,) = stream.to_the_end()
    assert tokens == expected
    cluster.assert_home()


def test_a_decode_instance_that_stands_still(cluster: LiveCluster, model: Path, expected: list[int]) -> None:
    """A stopped decode instance counts as dead after some silence; once continued, it drops its requests and serves."""
    stream, begun, victim = caught(cluster)
    cluster.kill_rank(victim, signal.SIGSTOP)
    try:
        (rest,) = stream.to_the_end()
        assert begun[0] + rest == expected
        assert_same(model, PROMPT, cluster.complete(PROMPT, 12), 12)
    finally:
        cluster.kill_rank(victim, signal.SIGCONT)
    cluster.await_ready()
    cluster.assert_home()
    assert_same(model, PROMPT, cluster.complete(PROMPT, 12), 12)


def test_the_scheduler_is_restarted(cluster: LiveCluster, model: Path) -> None:
    """Workers drop the old scheduler's requests and serve its successor without restarting."""
    pids = {i["instance_id"]: i["pid"] for i in cluster.instances()}
    stream = Streaming(cluster.url)
    stream.next()
    cluster.kill("scheduler")
    cluster.restart("scheduler")
    cluster.assert_home()
    assert {i["instance_id"]: i["pid"] for i in cluster.instances()} == pids
    assert_same(model, PROMPT, cluster.complete(PROMPT, 12), 12)


def test_sigterm_lets_running_streams_end(cluster: LiveCluster, expected: list[int]) -> None:
    """During the drain the port stays open: /health and new requests get 503, on old and new connections."""
    with cluster.unfinished(), httpx.Client(base_url=cluster.url, trust_env=False) as kept_alive:
        assert kept_alive.get("/health").status_code == 200
        stream = Streaming(cluster.url)
        begun = {0: json.loads(stream.next()[1])["choices"][0]["token_ids"]}
        cluster.kill("scheduler", signal.SIGTERM)
        cluster.wait_until("it is draining", lambda: cluster.health()[1]["status"] == "draining")
        health = httpx.get(f"{cluster.url}/health", trust_env=False)
        body = {"prompt": PROMPT, "max_tokens": 1}
        refused = [
            kept_alive.post("/v1/completions", json=body),
            httpx.post(f"{cluster.url}/v1/completions", json=body, trust_env=False),
            httpx.get(f"{cluster.url}/v1/models", trust_env=False),
        ]
        for answer in (health, *refused):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        for answer in refused:
            assert "stopping" in answer.json()["error"]["message"]
            assert answer.headers["connection"] == "close"
        (rest,) = stream.to_the_end()
    assert begun[0] + rest == expected
    assert cluster.await_exit("scheduler") == 0


def test_a_second_signal_and_a_drain_that_takes_too_long_end_streams_in_band(cluster: LiveCluster) -> None:
    patient = cluster.member_arguments
    for has_second in (True, False):
        stream = Streaming(cluster.url, ENDLESS)
        stream.next()
        cluster.kill("scheduler", signal.SIGTERM)
        if has_second:
            cluster.wait_until("it is draining", lambda: cluster.health()[1]["status"] == "draining")
            cluster.kill("scheduler", signal.SIGTERM)
        _, error = stream.until_error()
        assert "shutting down" in error["message"]
        assert cluster.await_exit("scheduler") == 0
        cluster.member_arguments = {"scheduler": ["--drain-timeout=0.1"]} if has_second else patient
        cluster.restart("scheduler")


def num_replays(cluster: LiveCluster) -> int:
    return cluster.log_file("scheduler").read_text().count("continues at")


def test_sigterm_drains_a_worker(cluster: LiveCluster, model: Path, expected: list[int]) -> None:
    """A draining worker finishes its requests while new ones go elsewhere, then exits with code 0."""
    before = num_replays(cluster)
    stream, begun, victim = caught(cluster)
    for pid in cluster.rank_pids(victim):  # as at a host's shutdown, which signals every process
        os.kill(pid, signal.SIGTERM)
    cluster.kill(victim, signal.SIGTERM)
    cluster.wait_until("it is draining, or has ended", lambda: cluster.health()[1]["instances"][victim] != "ready")
    assert_same(model, PROMPT, cluster.complete(PROMPT, 12), 12)
    (rest,) = stream.to_the_end()
    assert begun[0] + rest == expected
    assert cluster.await_exit(victim) == 0
    assert num_replays(cluster) == before
    said = f"{victim} is unreachable: it stopped as announced: "
    cluster.wait_until("the scheduler says so", lambda: said in cluster.log_file("scheduler").read_text())


@pytest.mark.slow
def test_every_worker_is_restarted_under_load(cluster: LiveCluster, model: Path) -> None:
    """Workers restart one after the other by SIGTERM, unnoticed by clients."""
    rng = random.Random(7)
    prompts = [random_prompt(rng, rng.randrange(2, 60)) for _ in range(12)]
    done, wrong = threading.Event(), []

    def work() -> None:
        while not done.is_set():
            prompt = rng.choice(prompts)
            try:
                assert_same(model, prompt, cluster.complete(prompt, 24), 24)
            except AssertionError as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for name in ("prefill-0", "decode-0", "decode-1"):
        cluster.kill(name, signal.SIGTERM)
        assert cluster.await_exit(name) == 0
        cluster.restart(name)
    done.set()
    for thread in threads:
        thread.join(30)
    assert not wrong, wrong[0]
    cluster.assert_home()
