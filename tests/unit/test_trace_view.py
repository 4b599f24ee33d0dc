"""`pd-cluster trace`: a fixed timeline gives known rows, lines and a picture; each fault gives one clear line."""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.commands import cli
from pd_cluster.commands.trace.timeline_chart import Bar, Mark, chart_of, details_of
from pd_cluster.commands.trace.timeline_png import WIDTH_PX, write_png

Numbers = dict[str, int]


def timeline(*changes: tuple[float, str, str, Numbers], until: str = "finished") -> dict[str, Any]:
    """Returns a timeline of 32 prompt tokens in two chunks, cut after the first event named `until`, plus `changes`."""
    first: Numbers = {"start": 0, "stop": 16, "first_layer": 0, "num_layers": 2, "nbytes": 1024}
    second = {**first, "start": 16, "stop": 32, "nbytes": 512}
    whole: list[tuple[float, str, str, Numbers]] = [
        (0.0, "scheduler", "received", {}),
        (2.0, "scheduler", "routed", {}),
        (3.0, "p", "submitted", {}),
        (5.0, "p", "admitted", {"num_tokens": 32, "num_cached": 0}),
        (5.0, "p", "offered", {}),
        (6.0, "d", "credited", {"first_token": 0}),
        (15.0, "p", "chunk", {"start": 0, "stop": 16, "took_us": 9000}),
        (15.5, "p", "credited", {"first_token": 0}),
        (16.0, "p", "sent", first),
        (17.0, "d", "landed", first),
        (25.0, "p", "chunk", {"start": 16, "stop": 32, "took_us": 10000}),
        (25.0, "p", "first token", {}),
        (26.0, "p", "sent", second),
        (26.5, "scheduler", "first token", {}),
        (27.0, "d", "landed", second),
        (27.5, "d", "landing complete", {}),
        (28.5, "d", "confirmed", {}),
        (29.0, "d", "decode start", {}),
        (39.0, "d", "finished", {"num_tokens": 1234}),
        (40.0, "scheduler", "finished", {}),
    ]
    names = [what for _, _, what, _ in whole]
    events = [*whole[: names.index(until) + 2 if until == "finished" else names.index(until) + 1], *changes]
    return {
        "request_id": "cmpl-1",
        "ids": ["cmpl-1"],
        "prefill": "p",
        "decode": "d",
        "num_prompt_tokens": 32,
        "status": "finished",
        "error": None,
        "num_dropped_events": 0,
        "events": [{"at_ms": at, "who": who, "what": what, "numbers": n} for at, who, what, n in events],
    }


LONG = ((1000.0, "scheduler", "finished", {}),)


def test_the_rows() -> None:
    chart = chart_of(timeline())
    assert [(row.name, row.bars, row.note) for row in chart.rows] == [
        ("scheduler queue", [Bar(0.0, 2.0)], "2.0 ms"),
        ("prefill queue", [Bar(3.0, 5.0)], "2.0 ms"),
        ("compute chunks", [Bar(6.0, 15.0), Bar(15.0, 25.0)], "32 tokens in 2"),
        ("offer to credit", [Bar(5.0, 15.5)], "10.5 ms"),
        ("KV groups sent", [Bar(16.0, 16.0), Bar(26.0, 26.0)], "1.5 KiB in 2"),
        ("KV groups landed", [Bar(17.0, 17.0), Bar(27.0, 27.0)], "1.5 KiB in 2"),
        ("confirm", [Bar(27.5, 28.5)], "1.0 ms"),
        ("decode", [Bar(29.0, 39.0)], "10.0 ms, 1,234 tokens"),
    ]
    assert chart.marks == [Mark(26.5, "first token")]
    assert (chart.end_ms, chart.shown_ms) == (40.0, 40.0)


def test_a_request_that_got_stuck() -> None:
    """A phase that began lasts to the end of the known time; one that did not begin has no bar."""
    chart = chart_of(timeline((90.0, "p", "failed", {}), until="offered"))
    found = {row.name: (row.bars, row.note) for row in chart.rows}
    assert found["offer to credit"] == ([Bar(5.0, 90.0)], "85.0 ms, not over")
    without = ["compute chunks", "KV groups sent", "KV groups landed", "confirm", "decode"]
    assert [name for name, (bars, _) in found.items() if not bars] == without
    assert chart.marks == [Mark(90.0, "failed")]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({}, ""),
        ({"num_tokens": 32, "num_cached": 16}, "32 tokens, 16 cached"),
        ({"start": 16, "stop": 32, "took_us": 1500}, "tokens 16-31, took 1.5 ms"),
        ({"first_layer": 2, "num_layers": 2, "nbytes": 2048}, "layers 2-3, 2.0 KiB"),
    ],
)
def test_the_details(numbers: Numbers, words: str) -> None:
    assert details_of({"numbers": numbers}) == words


@pytest.mark.parametrize("until", ["finished", "offered", "decode start"])
def test_the_picture(tmp_path: Path, until: str) -> None:
    file = tmp_path / "timeline.png"
    write_png({**timeline(*LONG, until=until), "error": "a long story " * 30}, str(file))
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width_px, height_px = struct.unpack(">II", head[16:24])
    assert width_px == WIDTH_PX == 1200
    assert 400 <= height_px <= 800


# ---- the command


class Admin(BaseHTTPRequestHandler):
    """Answers like an admin port that knows one request."""

    def do_GET(self) -> None:
        status, body = 404, {"error": {"message": "id: no request is kept", "code": "request_not_found"}}
        if self.path == "/requests/cmpl-1/timeline":
            status, body = 200, timeline()
        elif self.path == "/requests":
            entry = {"request_id": "cmpl-1", "status": "running", "age_s": 3.0, "prefill": "p", "decode": "d"}
            entry |= {"num_prompt_tokens": 32, "duration_ms": None}
            status, body = 200, {"requests": [entry], "num_kept": 1, "max_kept": 1000}
        elif self.path.startswith("/other"):
            status, body = 200, {"hello": "world"}  # type: ignore[dict-item]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def admin() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Admin) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs `pd-cluster trace`; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["pd-cluster", "trace", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, admin: str
) -> None:
    png, file = tmp_path / "t.png", tmp_path / "t.json"
    assert run(monkeypatch, "cmpl-1", "--admin", admin, "--png", str(png), "--json", str(file)) == 0
    assert capsys.readouterr().out.startswith("cmpl-1: ")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert json.loads(file.read_text()) == timeline()
    assert run(monkeypatch, "--admin", admin) == 0
    title, _, line = capsys.readouterr().out.splitlines()
    assert title == f"the last 1 of 1 requests at {admin}"
    assert line.split() == ["cmpl-1", "running", "3.0", "s", "-", "32", "p", "d"]


def test_faults_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], admin: str) -> None:
    nobody = "http://127.0.0.1:1"
    for arguments, said in (
        (("cmpl-2/../x", "--admin", admin), "pd-cluster: id: no request is kept\n"),
        (("cmpl-1", "--admin", nobody), f"no scheduler answers at {nobody}/requests/cmpl-1/timeline"),
        (("--admin", f"{admin}/other"), "does not answer as a scheduler's admin address (HTTP 200)"),
    ):
        assert run(monkeypatch, *arguments) == 1
        assert said in capsys.readouterr().err
