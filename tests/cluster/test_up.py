"""`pd-cluster up` as used by an operator: one command, named and restarted workers, Ctrl-C, clear errors."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from pd_cluster.commands.cli import main
from pd_cluster.extras.key_file.key_file import KeyFile, write_key_file
from tests.support.cluster import free_port_pair
from tests.support.resuming import EventReader, data_of, id_of, resuming, token_ids_of

NOTICED_S = 10.0  # a third of the time for which a kept stream could be resumed
WAIT_S = 90.0
LOGS = "/dashboard/api/instances/decode-0/logs"
Checkpoints = Callable[..., Path]


class Up:
    """`pd-cluster up` as a child process whose output lines are queued."""

    def __init__(self, model: str, port: int, *flags: str) -> None:
        command = [sys.executable, "-m", "pd_cluster", "up", f"--port={port}", f"--model={model}", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip())
        self._queue.put(None)

    def await_line(self, pattern: str) -> re.Match[str]:
        deadline_s = time.monotonic() + WAIT_S
        while (line := self._queue.get(timeout=max(0.01, deadline_s - time.monotonic()))) is not None:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it ended before {pattern!r} was printed:\n" + "\n".join(self.lines))

    def descendants(self) -> list[int]:
        """Returns all its descendant processes, from /proc."""
        found, todo = [], [self.process.pid]
        while todo:
            for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
                children = [int(pid) for pid in task.read_text().split()]
                found += children
                todo += children
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> str:
    return str(checkpoint("llama"))


@pytest.fixture
def up(model: str) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(port: int, *flags: str, model: str = model) -> Up:
        started.append(Up(model, port, *flags))
        return started[-1]

    yield start
    for each in started:
        each.end()


def ask(port: int) -> int:
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "hello"}, timeout=30)
    return answer.status_code


def session_of(line: str) -> httpx.Client:
    """Opens the dashboard's link like a browser; the client has the cookie and sends the page's headers."""
    found = re.match(r"dashboard: (http://[^/]+)/dashboard/#code=(\S+)", line)
    assert found is not None, line
    page = httpx.Client(base_url=found[1], headers={"Origin": found[1]}, timeout=30)
    answer = page.post("/dashboard/api/session", json={"code": found[2]})
    assert answer.status_code == 200, answer.text
    page.headers["X-PD-Dashboard"] = answer.json()["command_token"]
    return page


def await_mark(page: httpx.Client, name: str, kind: str) -> None:
    """Waits until the overview's latest event of `name` is of this kind."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        marks = page.get("/dashboard/api/overview").json()["marks"]
        if [mark["kind"] for mark in marks if mark["instance_id"] == name][-1:] == [kind]:
            return
        assert time.monotonic() < deadline_s, marks
        time.sleep(0.02)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def await_gone(pids: list[int]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline_s, f"still running: {pids}"
        time.sleep(0.05)


def test_a_dead_worker_is_named_and_restarted_and_ctrl_c_ends_all(up: Callable[..., Up]) -> None:
    """Holds even after the preloader's death: ranks continue, and the next worker gets a new preloader.

    `up` chooses its ports itself, and prints them.
    """
    cluster = up(0, "--", "--runner=generate")
    cluster.await_line(r"^ready after")
    assert sum("--runner has no effect" in line for line in cluster.lines) == 1
    page = session_of(cluster.await_line(r"^dashboard: .*")[0])
    assert page.base_url.port is not None
    port = page.base_url.port - 1
    assert ask(port) == 200
    admin = f"http://127.0.0.1:{port + 1}/instances"
    assert page.get("/dashboard/api/overview").json()["problems"] == []
    instances = httpx.get(admin).json()["instances"]
    (preloader,) = {parent_of(pid) for entry in instances for pid in entry["rank_pids"]}
    assert parent_of(preloader) == cluster.process.pid
    os.kill(preloader, signal.SIGKILL)
    assert ask(port) == 200
    victim = next(i["pid"] for i in instances if i["instance_id"] == "decode-0")
    os.kill(victim, signal.SIGKILL)
    assert cluster.await_line(r"decode-0 \(pid (\d+)\) died with exit code -9")[1] == str(victim)
    await_mark(page, "decode-0", "down")
    cluster.await_line(r"decode-0 was restarted")
    cluster.await_line(r"link to decode-0 is up")
    deadline_s = time.monotonic() + WAIT_S
    while ask(port) != 200:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    await_mark(page, "decode-0", "up")
    assert sum("control port" in line for line in page.get(LOGS).json()["lines"]) == 2, "one for each process"
    answer = page.post(
        "/dashboard/api/chat", json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    )
    assert answer.json()["usage"]["completion_tokens"] == 2
    page.close()
    instances = httpx.get(admin).json()["instances"]
    ranks = [pid for entry in instances for pid in entry["rank_pids"]]
    assert len({parent_of(pid) for pid in ranks} - {preloader}) == 2  # the new preloader, and init
    pids = [*{*cluster.descendants(), *ranks}]
    assert len(pids) == 6  # scheduler, preloader, two parents, two rank processes
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(WAIT_S) == 0
    await_gone(pids)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_stream_outlives_the_only_scheduler_and_not_its_client(
    up: Callable[..., Up], checkpoint: Checkpoints
) -> None:
    port = free_port_pair()
    model = checkpoint("llama", max_position_embeddings=4096)
    started = up(port, "--", "--max-model-len=4096", "--num-blocks=1200", model=str(model))
    started.await_line("ready after")
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": [7, 8, 9], "max_tokens": 3000, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with EventReader(url, body) as reader:
        whole = list(reader)
    with EventReader(url, body) as reader:
        events = reader.take(40)
        token = reader.token
        os.kill(pid_of(started, "--scheduler-key-file"), signal.SIGKILL)
        with contextlib.suppress(httpx.HTTPError):
            events += reader
    assert 40 <= len(events) < len(whole)
    started.await_line(r"scheduler was restarted")
    with listening(url, id_of(events[-1])) as reader:
        assert reader.answer.status_code == 200, reader.answer.text
        assert id_of(events[0]).startswith(token)
        events += reader
    assert [data_of(event) for event in events] == [data_of(event) for event in whole]
    assert token_ids_of(events) == token_ids_of(whole)
    with EventReader(url, body) as reader:
        (event,) = reader.take(1)
    deadline_s, status = time.monotonic() + NOTICED_S, 200
    while status != 404:  # until the scheduler has noticed that the client left, the stream is still there
        assert time.monotonic() < deadline_s
        with listening(url, id_of(event)) as reader:
            status = reader.answer.status_code
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(WAIT_S) == 0


def pid_of(started: Up, flag: str) -> int:
    (pid,) = [pid for pid in started.descendants() if flag in Path(f"/proc/{pid}/cmdline").read_text()]
    return pid


@contextlib.contextmanager
def listening(url: str, last_id: str) -> Iterator[EventReader]:
    """Requests the rest of a stream as soon as a scheduler listens."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            with resuming(url, last_id, patience_s=WAIT_S) as reader:
                yield reader
            return
        except httpx.ConnectError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_in_a_terminal_a_table_stays_below_the_lines(model: str) -> None:
    port = free_port_pair()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    command = [sys.executable, "-m", "pd_cluster", "up", f"--port={port}", f"--model={model}"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    screen, deadline_s = b"", time.monotonic() + WAIT_S
    try:
        while not re.search(rb"ready after.*decode-0.*no problems", screen, re.DOTALL):
            assert time.monotonic() < deadline_s, screen.decode(errors="replace")
            screen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        threading.Thread(target=lambda: [*iter(lambda: _read(ours), b"")], daemon=True).start()  # a full pty blocks
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait(WAIT_S)


def _read(terminal: int) -> bytes:
    """Reads from a pty; returns b"" once the other end is closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


@pytest.mark.slow
def test_ctrl_c_while_the_preloader_stands_still(up: Callable[..., Up]) -> None:
    """Workers then wait for ranks, but nothing waits for the preloader."""
    cluster = up(free_port_pair())
    cluster.await_line(r"serving at")
    pids = cluster.descendants()
    (preloader,) = (pid for pid in pids if b"preload_process" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(preloader, signal.SIGSTOP)
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(WAIT_S) == 0
    await_gone(pids)


@pytest.mark.slow
def test_nothing_outlives_a_kill_9_of_the_launcher(up: Callable[..., Up], tmp_path: Path) -> None:
    """Also holds with a key file, which is reloaded as documented."""
    write_key_file(keys := tmp_path / "keys.json", KeyFile.empty())
    cluster = up(free_port_pair(), "--restart=no", "--", f"--api-key-file={keys}")
    cluster.await_line(r"^ready after")
    scheduler = cluster.await_line(rf"^to reread {keys}: kill -HUP (\d+)$")[1]
    os.kill(int(scheduler), signal.SIGHUP)
    cluster.await_line(rf"SIGHUP: the API keys were read again: 0 in {keys}$")
    pids = cluster.descendants()
    cluster.process.kill()
    cluster.process.wait(WAIT_S)
    await_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--num-blocks=2", "--device=npu", "--tensor-parallel-size=2"])
def test_what_cannot_start_says_why(up: Callable[..., Up], flag: str) -> None:
    cluster = up(free_port_pair(), "--", flag)
    cluster.await_line(rf"^pd-cluster: .*{flag.replace('=', ' ')}")
    assert cluster.process.wait(WAIT_S) == 1


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--model=/nowhere/at/all", r"--model /nowhere/at/all: no such folder"),
        ("--restart=sometimes", r"--restart 'sometimes': expected on-failure or no"),
        ("--max-model-len=100000", r"--max-model-len 100000: .*max_position_embeddings 512"),
        ("--max-modle-len=100", r"unknown flag --max-modle-len; did you mean --max-model-len\?"),
        ("--tool-call-parser=nobody", "not known; known are "),
        ("--ssl-cert-reqs=2", "needs --ssl-certfile"),
        ("--generation-config=/nowhere", "no folder with a generation_config.json"),
    ],
)
def test_a_wrong_flag_is_said_once_and_nothing_is_started(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, said: str
) -> None:
    """Covers flags of every instance. The command runs in this process; any started process would be its child."""
    own, flags = ([flag], []) if flag.startswith(("--model=", "--restart=")) else ([], ["--", flag])
    argv = ["pd-cluster", "up", f"--port={free_port_pair()}", *own, *(() if own else [f"--model={model}"]), *flags]
    monkeypatch.setattr(sys, "argv", argv)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pd-cluster: ")
    assert re.search(said, line)
    assert children.read_text() == before


@pytest.mark.slow
def test_a_unix_socket_in_the_public_ports_place(up: Callable[..., Up], tmp_path: Path) -> None:
    """Prints when it is ready, the API's address, and the admin port, whose number is given here.

    `up` reads a file of flags as its instances do.
    """
    path, (port, admin) = tmp_path / "api.sock", (free_port_pair(), free_port_pair())
    (tmp_path / "flags.yaml").write_text(f"uds: {path}\nadmin_port: {admin}\n")
    cluster = up(port, "--", f"--config={tmp_path / 'flags.yaml'}")
    cluster.await_line(f"^ready after .* OpenAI API at the Unix socket {path}, admin at http://127.0.0.1:{admin}$")
    session_of(cluster.await_line("^dashboard: .*")[0]).close()
    command = cluster.await_line("^try: (curl .*)")[1]
    done = subprocess.run(["sh", "-c", f"{command} -sS"], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert "error" not in done.stdout
    assert json.loads(done.stdout)["choices"]
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(WAIT_S) == 0


def test_a_taken_port(up: Callable[..., Up]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = up(port)
        cluster.await_line(rf"^pd-cluster: --port: cannot listen at \S+:{port}: the port is taken; stop the process")
        assert cluster.process.wait(WAIT_S) == 1


def test_an_unsupported_architecture_is_named(up: Callable[..., Up], tmp_path: Path, model: str) -> None:
    for file in Path(model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "bloom"')
    (tmp_path / "config.json").write_text(config)
    cluster = up(free_port_pair(), model=str(tmp_path))
    cluster.await_line(r"^pd-cluster: .*model_type 'bloom' is not supported: it is not listed, and no ")
    assert cluster.process.wait(WAIT_S) == 1
