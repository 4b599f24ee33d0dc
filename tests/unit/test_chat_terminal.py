"""`pd-cluster chat` as a real process on a pseudo-terminal, with a scripted server."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.commands.chat_command import run
from pd_cluster.errors import ConfigError

WAIT_S = 30.0
PROMPT = "> "
TAKE_TERMINAL = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"  # for Ctrl-C


class Server(ThreadingHTTPServer):
    """Answers chats as scripted; `asked`: request bodies; `left`: an item for each client that disconnected."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.left: queue.Queue[None] = queue.Queue()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        content = json.dumps({"data": [{"id": "the-first"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        question = body["messages"][-1]["content"]
        if question == "die":
            self._event("half an ans")
            return
        try:
            while question == "talk":
                self._event("and on ")
                time.sleep(0.01)
        except OSError:
            self.server.left.put(None)
            return
        if question == "tricks":
            self._event("\x1b[2J\tfine\u200d")
        self._event(f"{len(question)} characters")
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, text: str) -> None:
        event = json.dumps({"choices": [{"delta": {"content": text}}]})
        self.wfile.write(f"data: {event}\n\n".encode())
        self.wfile.flush()


class Terminal:
    """A chat in a terminal: types keys and reads the screen."""

    def __init__(self, url: str) -> None:
        self._fd, child_fd = pty.openpty()
        program = str(Path(sys.executable).with_name("pd-cluster"))
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, program, "chat", "--url", url],
            stdin=child_fd,
            stdout=child_fd,
            stderr=child_fd,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8"},
        )
        os.close(child_fd)

    def type(self, text: str) -> None:
        for byte in text.encode():
            os.write(self._fd, bytes([byte]))

    @property
    def _shows(self) -> bool:
        """Whether new output appears within a tenth of a second."""
        poller = select.poll()  # select() fails for descriptors above 1,023
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(100))

    def read_until(self, text: str) -> str:
        """Returns the new output up to and including `text`."""
        seen, until_s = b"", time.monotonic() + WAIT_S
        while text.encode() not in seen:
            assert time.monotonic() < until_s, seen
            if self._shows:
                seen += os.read(self._fd, 1)
        return seen.decode()

    def interrupt(self) -> None:
        """Presses Ctrl-C until the program ends, because Python misses one that arrives between two key reads."""
        seen, until_s, press_s = b"", time.monotonic() + WAIT_S, 0.0
        while self.process.poll() is None:
            now_s = time.monotonic()
            assert now_s < until_s, (seen, Path(f"/proc/{self.process.pid}/status").read_text())
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                if now_s >= press_s:
                    self.type("\x03")
                    press_s = now_s + 1.0
                if self._shows:
                    seen += os.read(self._fd, 4096)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def terminal(server: Server) -> Iterator[Terminal]:
    made = Terminal(server.url)
    yield made
    made.close()


def test_a_person_edits_lines_stops_an_answer_and_goes_on(server: Server, terminal: Terminal) -> None:
    long = "a long line " * 500  # without a line editor, a terminal cuts lines at 4,096 bytes
    terminal.read_until(PROMPT)
    terminal.type(f"{long}\r")
    assert f"{len(long.strip())} characters" in terminal.read_until(f"]\r\n{PROMPT}")
    terminal.type("é中🙂\x7f\x7f\r")  # sent byte by byte; backspaces erase whole characters
    assert "1 characters" in terminal.read_until(f"]\r\n{PROMPT}")
    terminal.type("tricks\r")
    assert "\ufffd[2J\t" in terminal.read_until("fine\u200d"), "control sequences must be shown, not executed"
    terminal.read_until(f"]\r\n{PROMPT}")
    terminal.type("/new\r")
    terminal.read_until(PROMPT)
    terminal.type("talk\r")
    terminal.read_until("and on and on")
    terminal.type("\x03")
    assert "stopped" in terminal.read_until(f"]\r\n{PROMPT}")
    server.left.get(timeout=WAIT_S)
    terminal.type("die\r")
    assert "half an ans" in terminal.read_until(f"]\r\n{PROMPT}")
    terminal.type("\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A\r")  # the fifth-last line
    assert "1 characters" in terminal.read_until(f"]\r\n{PROMPT}")
    assert [each["content"] for each in server.asked[-1]["messages"]] == ["é"], "a failed message must be forgotten"
    assert {each["model"] for each in server.asked} == {"the-first"}
    terminal.type("unfinished")
    # Ctrl-C discards keys that were polled but not read; readline would then wait for a key and ignore signals.
    terminal.read_until("unfinished")
    terminal.interrupt()
    # -SIGINT results from a press while the interpreter was ending. Shells report both as 130.
    assert terminal.process.returncode in (130, -signal.SIGINT)


@pytest.mark.parametrize("question", ["\udcff", ""])
def test_a_question_that_is_no_text_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch, question: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    with pytest.raises(ConfigError, match=r"^the question is not UTF-8 text$"):
        run(server.url, "", question, [], "", {})
    assert not server.asked
