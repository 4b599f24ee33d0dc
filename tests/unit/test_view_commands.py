"""The output of commands that show a cluster: pure functions, and files of lines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from pd_cluster.api.admin.log_routes import read_lines
from pd_cluster.client.overview_reader import FINE
from pd_cluster.client.streaming_client import Sample
from pd_cluster.commands import chat_command as chat_module
from pd_cluster.commands.chat_command import Chat
from pd_cluster.commands.status_command import problem_lines
from pd_cluster.commands.top_command import ClusterSamples, plain_line, screen
from pd_cluster.errors import PdClusterError
from pd_cluster.settings.log_files import MAX_FILE_NBYTES, LogFile, file_of
from pd_cluster.settings.redaction import HIDDEN, redacted

INSTANCE: dict[str, Any] = (
    {"instance_id": "decode-0", "role": "decode", "next_role": None, "state": "unreachable", "epoch": "1"}
    | dict.fromkeys(("num_waiting", "num_cached_blocks", "kv_sent_nbytes"), 0)
    | {"num_running": 2, "num_blocks": 10, "num_held_blocks": 5, "kv_received_nbytes": 4096}
    | {"reason": "its connection was closed", "links": {"prefill-0@1": "up (shm)"}, "unit": None}
)


def found(**changes: Any) -> dict[str, Any]:
    sample = {"at_s": 5.0, "tokens_per_s": 1234.0, "num_running": 3, "ttft_p50_s": 0.1, "ttft_p99_s": 1.5}
    sample |= {"tpot_p50_s": None, "tpot_p99_s": None, "failed_per_s": 0}
    mark = {"number": 1, "at_s": 4.0, "kind": "down", "instance_id": "decode-0", "text": "is unreachable"}
    body: dict[str, Any] = {"now_s": 5.0, "started_s": 0.0, "model": "m", "num_running": 3, "num_queued": 0}
    body |= {"problems": [], "samples": [sample], "marks": [mark], "instances": [INSTANCE]}
    return body | changes


PROBLEM = {"severity": "critical", "text": "2 requests failed", "way_out": "`pd-cluster trace`", "instance_id": ""}


def _text_of(watch: ClusterSamples) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(screen(watch, "http://x", 200))
    return console.export_text()


def test_status_and_top_show_what_is_wrong_in_a_line_and_on_a_screen() -> None:
    assert problem_lines(found()) == [FINE]
    assert problem_lines(found(problems=[PROBLEM])) == ["CRITICAL: 2 requests failed; `pd-cluster trace`"]
    line = plain_line(found(problems=[PROBLEM]))
    assert "0 of 1 instances ready, tokens/s 1,234" in line
    assert line.endswith("; 2 requests failed")
    watch = ClusterSamples()
    watch.found = found(problems=[PROBLEM])
    watch.samples.extend(watch.found["samples"])
    watch.marks.extend(watch.found["marks"])
    watch.rates = {"decode-0": (0.0, 2048.0)}
    shown = ("2 requests failed", "unreachable: its connection", "2.0 KiB", "50%", "prefill-0 up (shm)")
    text = _text_of(watch)
    for each in (*shown, "decode-0 is unreachable"):
        assert each in text
    assert "unit" not in text
    place = {"unit": "decode-0..1", "unit_rank": 1, "num_rounds": 2000, "num_idle_rounds": 500}
    watch.found["instances"] = [{**INSTANCE, **place}]
    for each in ("decode-0..1, rank 1", "25% of 2,000"):
        assert each in _text_of(watch)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abc.def-123", "abc.def-123"),
        ('{"api_key": "hunter2hunter2"}', "hunter2hunter2"),
        ("--api-key=verysecretvalue", "verysecretvalue"),
        ("admin_token: 0123456789abcdef", "0123456789abcdef"),
        ("https://user:pass1234@proxy.example/x", "pass1234"),
        ("from the variable: zebra-horse-77", "zebra-horse-77"),
    ],
)
def test_keys_are_hidden(text: str, secret: str) -> None:
    shown = redacted(text, {"VLLM_API_KEY": "zebra-horse-77"})
    assert secret not in shown
    assert HIDDEN in shown


def test_lines_are_kept_privately_within_a_bound_and_read_on_from_a_byte(tmp_path: Path) -> None:
    kept = LogFile(tmp_path / "logs", "decode-0")
    file = file_of(tmp_path / "logs", "decode-0")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept.write("first")
    kept.write("second")
    body = read_lines(file, "decode-0", 1, -1)
    assert body["lines"] == ["second"]
    kept.write("third")
    body = read_lines(file, "decode-0", 10, body["next"])
    assert body["lines"] == ["third"]
    with file.open("ab") as opened:
        opened.write(b"half a li")
    assert read_lines(file, "decode-0", 10, body["next"])["lines"] == [], "a partly written line must be returned whole"
    for _ in range(40):
        kept.write("x" * (MAX_FILE_NBYTES // 16))
    assert file.stat().st_size <= MAX_FILE_NBYTES
    sizes = [each.stat().st_size for each in file.parent.iterdir()]
    assert len(sizes) == 2
    assert read_lines(file, "decode-0", 10, 1 << 40)["lines"], "expected the new file's lines"
    kept.close()


def test_another_life_of_an_instance_writes_behind_the_first(tmp_path: Path) -> None:
    for line in ("one life", "another"):
        with contextlib.closing(LogFile(tmp_path, "decode-0")) as kept:
            kept.write(line)
    assert read_lines(file_of(tmp_path, "decode-0"), "decode-0", 10, -1)["lines"] == ["one life", "another"]


async def test_a_chat_remembers_answers_and_forgets_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []
    said = Sample(text="7", num_output_tokens=1)
    answers = [said, Sample(error="HTTP 400: no"), said]

    async def measure(
        client: object, url: str, body: dict[str, Any], on_text: Any, deadline_s: float, resumes: bool
    ) -> Sample:
        assert resumes
        bodies.append(body)
        return answers[len(bodies) - 1]

    monkeypatch.setattr(chat_module, "measure", measure)
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG")

    chat = Chat("http://x/", "m", {"temperature": 0.0}, "be brief", lambda text: None, lambda text: None)
    async with httpx.AsyncClient() as client:
        chat.show(str(picture))
        for question in ("3 + 4?", "nonsense", "and 1 more?"):
            await chat.ask(client, question)
    first, _, third = bodies
    assert first["messages"][0] == {"role": "system", "content": "be brief"}
    assert first["messages"][1]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert [message["role"] for message in third["messages"]] == ["system", "user", "assistant", "user"]
    assert third["messages"][-1]["content"] == "and 1 more?"
    assert (third["model"], third["temperature"]) == ("m", 0.0)


async def test_a_stopped_question_takes_its_picture_with_it(tmp_path: Path) -> None:
    """Covers Ctrl-C, which cancels the request."""
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG")
    bodies: list[dict[str, Any]] = []
    began = asyncio.Event()

    async def hang(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(await request.aread()))
        began.set()
        await asyncio.sleep(60)
        raise AssertionError("never cancelled")

    chat = Chat("http://x", "m", {}, "", lambda text: None, lambda text: None)
    async with httpx.AsyncClient(transport=httpx.MockTransport(hang)) as client:
        chat.show(str(picture))
        for text in ("what is this?", "hello"):
            began.clear()
            asking = asyncio.create_task(chat.ask(client, text))
            await asyncio.wait_for(began.wait(), 60)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
    assert [type(body["messages"][-1]["content"]) for body in bodies] == [list, str]


async def test_a_server_that_is_slow_is_there() -> None:
    errors = [httpx.ReadTimeout("slow"), httpx.ConnectError("refused")]

    async def answer(request: httpx.Request) -> httpx.Response:
        raise errors[0]

    chat = Chat("http://x", "", {}, "", lambda text: None, lambda text: None)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        await chat.find_server(client)
        del errors[0]
        with pytest.raises(PdClusterError, match="no server answers at http://x: refused"):
            await chat.find_server(client)
