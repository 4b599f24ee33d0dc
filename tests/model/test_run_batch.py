"""`pd-cluster run-batch` on a tiny model: answers equal the HTTP API's, each once in the file, despite kills."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pd_cluster.api.middleware.direct_routes import add_routes
from pd_cluster.api.middleware.error_responses import install_error_handlers
from pd_cluster.api.routes.api_routes import api_routes
from pd_cluster.api.routes.in_process_api import InProcessApi
from pd_cluster.commands.cli import main
from pd_cluster.errors import InstanceLost, NoCapacity, Unavailable
from pd_cluster.offline import batch_runner as batch_module
from pd_cluster.offline.batch_job import BatchJob
from pd_cluster.offline.batch_runner import BatchRunner
from pd_cluster.offline.offline_service import OfflineConfig, OfflineService
from pd_cluster.service.files.batch_lines import BatchEntry, Output, OutputFailed, entry_of
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import RequestSpec

DEADLINE_S = 60.0
NAME = "tiny"
CHAT_URL, COMPLETIONS_URL, RESPONSES_URL = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES_URL, EMBEDDINGS_URL, SCORE_URL, RERANK_URL = "/v1/messages", "/v1/embeddings", "/score", "/v2/rerank"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}
MESSAGES = {"messages": CHAT["messages"], "max_tokens": 4, "temperature": 0}
TEXT = {"prompt": "once upon", "max_tokens": 5, "temperature": 0}


@pytest.fixture(scope="module")
def offline(checkpoint: Callable[..., Path]) -> Iterator[OfflineService]:
    engine = EngineConfig(model=str(checkpoint()), device="cpu", num_blocks=256)
    with OfflineService(OfflineConfig(engine=engine, served_model_names=(NAME,))) as made:
        yield made


READ_BY: dict[str, tuple[Any, str]] = {  # url -> a body, and the openai client's type for the answer
    CHAT_URL: (CHAT | {"logprobs": True, "top_logprobs": 1}, "chat.ChatCompletion"),
    COMPLETIONS_URL: (TEXT | {"logprobs": 1}, "Completion"),
    RESPONSES_URL: ({"input": "hello", "max_output_tokens": 3}, "responses.Response"),
    EMBEDDINGS_URL: ({"input": ["a", "bc"]}, "CreateEmbeddingResponse"),
}


def request(custom_id: str, url: str, body: Any, **changes: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | changes).encode() + b"\n"


def answers(offline: OfflineService, entries: list[BatchEntry], concurrency: int = 8) -> dict[str | None, Any]:
    """Returns each custom_id's answer line."""
    written: list[bytes] = []
    offline.run(BatchRunner(offline.service, written.append, concurrency).run(iter(entries)))
    lines = [json.loads(each) for each in written]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines) == len(entries)
    return found


async def over_http(offline: OfflineService, url: str, body: Any) -> httpx.Response:
    app = FastAPI()
    for routes in api_routes(offline.service, None):
        add_routes(app, routes)
    install_error_handlers(app)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch") as client:
        return await client.post(url, json=body)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT_URL, CHAT | {"model": NAME, "logprobs": True, "top_logprobs": 2}),
        (CHAT_URL, CHAT | {"n": 2, "temperature": 1.0, "seed": 7}),
        (COMPLETIONS_URL, TEXT | {"prompt": ["a", "bc"], "echo": True, "logprobs": 1}),
        (COMPLETIONS_URL, TEXT | {"prompt": [1, 2, 3], "return_token_ids": True}),
        (CHAT_URL, CHAT | {"model": "another"}),
        (CHAT_URL, {"max_tokens": 3}),
        (COMPLETIONS_URL, TEXT | {"max_tokens": 100_000}),
        (COMPLETIONS_URL, TEXT | {"guided_regex": "("}),
        (COMPLETIONS_URL, []),
        (RESPONSES_URL, {"input": "hello", "max_output_tokens": 4, "temperature": 0}),
        (RESPONSES_URL, {"input": "hello", "store": True}),
        (MESSAGES_URL, MESSAGES),
        (MESSAGES_URL, MESSAGES | {"max_tokens": "many"}),
        (EMBEDDINGS_URL, {"input": ["a", "bc"], "encoding_format": "base64"}),
        (EMBEDDINGS_URL, {"input": []}),
        (SCORE_URL, {"queries": "a", "documents": ["b", "c"]}),
        (RERANK_URL, {"query": "a", "documents": ["b", "c"], "top_n": 1}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "temperature": 0}}),
        ("/v1/chat/completions/batch", {"messages": [CHAT["messages"]] * 2, "max_tokens": 3, "temperature": 0}),
    ],
)
def test_an_answer_is_the_http_apis(offline: OfflineService, url: str, body: Any) -> None:
    (line,) = answers(offline, [entry_of(1, request("x", url, body))]).values()
    there = offline.run(over_http(offline, url, body))
    assert line["response"]["status_code"] == there.status_code
    mine, its = line["response"]["body"], there.json()
    for each in (mine, its):
        without_what_differs(each)
    assert mine == its
    assert line["error"] == its.get("error")


def without_what_differs(answer: dict[str, Any]) -> None:
    """Removes ids, times and the number of cached tokens, which differ between two equal requests."""
    for name in ("created", "created_at", "completed_at", "id", "request_id"):
        answer.pop(name, None)
    for item in answer.get("output", ()):
        item.pop("id")
    for name in ("prompt_tokens_details", "input_tokens_details", "input_tokens", "cache_read_input_tokens"):
        (answer.get("usage") or {}).pop(name, None)


def test_a_wrong_line_does_not_stop_the_rest(offline: OfflineService) -> None:
    """Streaming lines are refused for every url; a wrong url's error lists the valid ones."""
    nowhere = ["/v1/models", "http://host/v1/embeddings", "x" * 9000]
    streams = {"stream": (CHAT_URL, CHAT), "message": (MESSAGES_URL, MESSAGES)}
    lines = [request("good", CHAT_URL, CHAT), b"{torn"]
    lines += [request(name, url, body | {"stream": True}) for name, (url, body) in streams.items()]
    lines += [*(request(f"nowhere {url[:99]}", url, {}) for url in nowhere), request("too", COMPLETIONS_URL, TEXT)]
    found = answers(offline, [entry_of(at, line) for at, line in enumerate(lines, 1)])
    assert found["good"]["response"]["status_code"] == found["too"]["response"]["status_code"] == 200
    assert (found[None]["response"]["status_code"], found[None]["error"]["line"]) == (400, 2)
    assert found["stream"]["error"]["param"] == "stream"
    for name in streams:
        assert found[name]["response"]["status_code"] == 400
        assert "stream: a batch cannot be streamed" in found[name]["error"]["message"]
    for url in nowhere:
        each = found[f"nowhere {url[:99]}"]
        assert (each["response"]["status_code"], each["error"]["param"]) == (404, "url")
        assert each["error"]["message"].endswith(", ".join(InProcessApi(offline.service).paths))
        assert len(each["error"]["message"]) < 600


def test_every_line_is_of_the_batch(offline: OfflineService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is marked as a batch's, so that decode steps may gather them, as no answer is needed early."""
    asked: list[RequestSpec] = []
    make = Generation.__init__

    def noted(self: Generation, order: RequestSpec, *more: Any, **fields: Any) -> None:
        asked.append(order)
        make(self, order, *more, **fields)

    monkeypatch.setattr(Generation, "__init__", noted)
    bodies = {CHAT_URL: CHAT, COMPLETIONS_URL: TEXT, RESPONSES_URL: {"input": "x", "max_output_tokens": 2}}
    answers(offline, [entry_of(at, request(url, url, body)) for at, (url, body) in enumerate(bodies.items())])
    (name,) = {each.batch for each in asked}
    assert len(asked) == 3
    assert name


def test_answers_are_counted_and_the_first_error_is_told(offline: OfflineService) -> None:
    """Counts output tokens under either name, and shows the first error, so that the file need not be opened."""
    written: list[bytes] = []
    batch = BatchRunner(offline.service, written.append, 1)
    ignoring: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT_URL, CHAT | ignoring),
        (RESPONSES_URL, {"input": "x", "max_output_tokens": 2} | ignoring),
        (EMBEDDINGS_URL, {"input": "a"}),
        (CHAT_URL, CHAT | {"model": "another"}),
        (CHAT_URL, CHAT | {"stream": True}),
    ]
    offline.run(batch.run(iter([entry_of(at, request(str(at), *each)) for at, each in enumerate(bodies, 1)])))
    assert (batch.counts.num_done, batch.counts.num_failed, batch.counts.num_output_tokens) == (5, 2, 8)
    assert batch.counts.first_failure.startswith("line 4, custom_id '4': the model 'another'")


def test_no_more_requests_are_read_than_are_worked_at(offline: OfflineService) -> None:
    """Inputs may be long, so at a concurrency of 3 a line is read only while at most 3 earlier ones lack answers."""
    written: list[bytes] = []
    most = 0

    def lines() -> Iterator[BatchEntry]:
        nonlocal most
        for at in range(40):
            most = max(most, at - len(written))
            yield entry_of(at + 1, request(str(at), COMPLETIONS_URL, TEXT | {"max_tokens": 1 + at % 5}))

    offline.run(BatchRunner(offline.service, written.append, 3).run(lines()))
    assert len({json.loads(each)["custom_id"] for each in written}) == 40
    assert most == 3


def test_huge_requests_come_one_after_the_other(offline: OfflineService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "MAX_NBYTES", 10)  # smaller than every request
    written: list[bytes] = []
    begun: list[int] = []

    def lines() -> Iterator[BatchEntry]:
        for at in range(5):
            begun.append(len(written))
            yield entry_of(at + 1, request(str(at), COMPLETIONS_URL, TEXT))

    offline.run(BatchRunner(offline.service, written.append, 100).run(lines()))
    assert begun == [0, 0, 1, 2, 3]  # a line read ahead waits for the running one


@pytest.mark.parametrize("error", [InstanceLost("the engine has failed"), Unavailable("the engine was closed")])
def test_an_engines_end_is_no_requests_answer(
    offline: OfflineService, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Unanswered lines are not written, because another run can still answer them."""

    async def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(offline.service, "complete", fail)
    written: list[bytes] = []
    entries = [entry_of(at, request(str(at), COMPLETIONS_URL, TEXT)) for at in range(1, 6)]
    with pytest.raises(type(error), match=str(error)):
        offline.run(BatchRunner(offline.service, written.append, 2).run(iter(entries)))
    assert written == []


def test_an_unexpected_error_is_one_requests_alone(offline: OfflineService, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = offline.service.complete

    async def fail_once(generations: Any) -> Any:
        if len(generations[0].prompt_token_ids) == 3:
            raise ZeroDivisionError
        return await complete(generations)

    monkeypatch.setattr(offline.service, "complete", fail_once)
    lines = [request("bad", COMPLETIONS_URL, TEXT | {"prompt": [1, 2, 3]}), request("good", COMPLETIONS_URL, TEXT)]
    found = answers(offline, [entry_of(at, line) for at, line in enumerate(lines)])
    assert [found[name]["response"]["status_code"] for name in ("bad", "good")] == [500, 200]
    assert found["bad"]["error"]["type"] == "internal_error"


def test_a_guide_that_cannot_be_checked_yet_is_tried_again(
    offline: OfflineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    completions, tries = offline.service.completions, []

    async def full_at_first(request: Any, *more: Any) -> Any:
        tries.append(request)
        if len(tries) < 3:
            raise NoCapacity("too many guides are being checked", retry_after_s=0)
        return await completions(request, *more)

    monkeypatch.setattr(offline.service, "completions", full_at_first)
    found = answers(offline, [entry_of(1, request("a", COMPLETIONS_URL, TEXT))])
    assert (found["a"]["response"]["status_code"], len(tries)) == (200, 3)


def test_a_full_disk_ends_the_batch_and_what_runs(offline: OfflineService) -> None:
    """The first answer cannot be written; the others are cancelled, not waited for."""
    tried: list[bytes] = []

    def write(line: bytes) -> None:
        tried.append(line)
        raise OutputFailed("the output cannot be written: No space left on device")

    entries = [entry_of(1, request("1", COMPLETIONS_URL, TEXT))]
    long = TEXT | {"max_tokens": 300, "ignore_eos": True}
    entries += [entry_of(at, request(str(at), COMPLETIONS_URL, long)) for at in range(2, 6)]
    with pytest.raises(OutputFailed, match="No space"):
        offline.run(BatchRunner(offline.service, write, 9).run(iter(entries)))
    assert [json.loads(line)["custom_id"] for line in tried] == ["1"]


def test_what_a_run_counts_at_its_end_is_on_the_disk(
    offline: OfflineService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the run ends or is stopped, a power cut after its report loses no answer."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_input(source, 6, num_tokens=4)
    on_disk, fsync = [b""], os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        on_disk.append(target.read_bytes())

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr("pd_cluster.offline.batch_job.OfflineService", lambda config: contextlib.nullcontext(offline))
    job = BatchJob(str(source), str(target), OfflineConfig(engine=EngineConfig(model="")), concurrency=2)
    write, num_written = Output.write, itertools.count(1)

    def interrupted(self: Output, line: bytes) -> None:
        write(self, line)
        if next(num_written) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "write", interrupted)
        code = job.run()
    assert code in (0, 130)
    assert on_disk[-1] == target.read_bytes()
    assert job.run() == 0
    assert on_disk[-1] == target.read_bytes()
    assert target.read_bytes().count(b"\n") == 6
    assert "run-batch: " in capsys.readouterr().err


# ---- the command


ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(model: Path, source: Path | str, target: Path | str, *more: str) -> list[str]:
    flags = [f"--model={model}", f"--served-model-name={NAME}", "--num-blocks=256", "--concurrency=4", *more]
    return [sys.executable, "-m", "pd_cluster", "run-batch", "-i", str(source), "-o", str(target), *flags]


def run(arguments: list[str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(arguments, input=stdin, capture_output=True, timeout=DEADLINE_S, check=False, env=ENV)


def begun(arguments: list[str], target: Path, num_lines: int) -> subprocess.Popen[bytes]:
    """Starts a run; returns once it has written at least `num_lines` lines."""
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=ENV)
    deadline_s = time.monotonic() + DEADLINE_S
    while not target.exists() or target.read_bytes().count(b"\n") < num_lines:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return process


def write_input(file: Path, num_requests: int, num_tokens: int = 60) -> list[str]:
    body = TEXT | {"max_tokens": num_tokens, "ignore_eos": True}
    ids = [f"request-{at}" for at in range(num_requests)]
    file.write_bytes(b"".join(request(each, COMPLETIONS_URL, body | {"seed": at}) for at, each in enumerate(ids)))
    return ids


def ids_in(file: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in file.read_bytes().splitlines()]


@pytest.mark.slow
def test_a_killed_run_is_gone_on_with(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The first run is killed and its last line torn, the second is stopped by Ctrl-C, and the third completes."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = write_input(source, 150)
    arguments = command(checkpoint(), source, target)
    process = begun(arguments, target, 20)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    whole = target.read_bytes()[: target.read_bytes().rindex(b"\n") + 1]
    num_first = whole.count(b"\n")
    assert 20 <= num_first < 150
    target.write_bytes(whole + whole[:50])

    process = begun(arguments, target, num_first + 20)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    num_second = target.read_bytes().count(b"\n")
    assert f"{num_first} of 150 requests have their answers".encode() in said
    assert f"stopped; {num_second} of 150 requests".encode() in said
    assert b"the same command goes on there" in said
    assert num_second < 150

    done = run(arguments)
    assert done.returncode == 0, done.stderr
    assert f"{150 - num_second} requests answered".encode() in done.stderr
    assert target.read_bytes().startswith(whole)
    assert sorted(ids_in(target)) == sorted(ids)

    before = target.read_bytes()
    done = run([*arguments, "--model=/no/such/model"])  # without work, no model is needed
    assert (done.returncode, target.read_bytes()) == (0, before)
    assert b"nothing to do" in done.stderr


@pytest.mark.slow
def test_pipes_and_worker_processes(checkpoint: Callable[..., Path]) -> None:
    """The batch runs over standard input and output, split into prefill and decode; stdout has nothing else.

    The openai client's own types read each answer.
    """
    import openai

    lines = [request(url, url, body | {"model": NAME}) for url, (body, _) in READ_BY.items()]
    lines += [request("wrong", EMBEDDINGS_URL, {"input": [], "model": NAME}), b"wrong\n"]
    done = run(command(checkpoint(), "-", "-", "--prefill=1", "--decode=1"), b"".join(lines))
    assert done.returncode == 0, done.stderr
    found = {each["custom_id"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == {*READ_BY, "wrong", None}
    for url, (_, kind) in READ_BY.items():
        assert found[url]["error"] is None, found[url]
        body = found[url]["response"]["body"]
        answer_type = attrgetter(kind)(openai.types)
        assert answer_type.model_validate(body, strict=True).model_dump(exclude_unset=True).keys() <= body.keys()
    assert found["wrong"]["error"]["param"] == "input"
    num_lines, num_wrong = len(READ_BY) + 2, 2
    assert f"{num_lines} requests answered in -, {num_wrong} of them with an error (".encode() in done.stderr


def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such errors come before the model is opened, and change no file."""
    files = {"in": request("a", CHAT_URL, CHAT), "notes": b"mine", "twice": 2 * request("a", CHAT_URL, CHAT)}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for *paths, words in (
        ("/no/such/file", "out", "-i /no/such/file: cannot be read: No such file"),
        ("in", "HTTP://host/out", "-o HTTP://host/out: must be a file"),
        ("in", "/no/such/folder/out", "cannot be written: No such file"),
        ("in", "in", "the same file as the input"),
        ("in", "notes", "notes: line 1 is not an answer of a batch"),
        ("twice", "out", "lines 1 and 2 have the same custom_id, 'a'"),
    ):
        source, target = (name if "/" in name else str(tmp_path / name) for name in paths)
        monkeypatch.setattr(sys, "argv", command(Path("/no/such/model"), source, target)[2:])
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            logging.captureWarnings(False)
        written = capsys.readouterr()
        assert (ended.value.code, written.out) == (1, "")
        (line,) = written.err.splitlines()
        assert words in line
        assert {name: (tmp_path / name).read_bytes() for name in files} == files
