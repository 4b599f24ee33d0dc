"""The first commands of a new user, as separate processes: quickstart, instances, bench serve."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from PIL import Image as Pictures

from pd_cluster.cluster.processes.launch_preloader import DIE_WITH_PARENT
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.commands.cli import main as cli_main
from pd_cluster.commands.quickstart import main as quickstart_main
from tests.support.pictures import file_of

DEADLINE_S = 100
QUICKSTART = [sys.executable, "-m", "pd_cluster.commands.quickstart"]
PD_CLUSTER = [sys.executable, "-m", "pd_cluster"]

Checkpoints = Callable[[str], Path]


def started_by(pid: int) -> list[int]:
    """Returns all processes of the cluster that `pid` started, ranks included, by an inherited variable."""
    mark = f"{DIE_WITH_PARENT}={pid}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def assert_nothing_left(pid: int, port: int | None = None) -> None:
    assert started_by(pid) == []
    if port is not None:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def run(*command: str) -> tuple[int, int, str, str]:
    """Runs a command that must end by itself; returns (pid, exit code, stdout, stderr)."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.pid, process.returncode, out, err


class Refusal(NamedTuple):
    code: object
    out: str
    err: str


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Refusal]:
    """Returns a function that runs a refused command line in this process, and returns the refusal."""

    def run_here(main: Callable[[], None], *argv: str) -> Refusal:
        monkeypatch.setattr(sys, "argv", ["command", *argv])
        before = {*started_by(os.getpid())}  # for example, an earlier test's preloader
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert {*started_by(os.getpid())} <= before
        return Refusal(ended.value.code, out, err)

    return run_here


def row(out: str, start: str) -> str:
    (line,) = [line for line in out.splitlines() if line.startswith(start)]
    return line


def test_once(checkpoint: Checkpoints) -> None:
    """Prints an answer and each instance's work, exits with code 0, and leaves nothing."""
    port = free_port_pair()
    pid, code, out, err = run(*QUICKSTART, "--once", f"--port={port}", f"--model={checkpoint('llama')}")
    assert (code, err) == (0, ""), out + err
    assert "starting 1 prefill, 1 decode and the scheduler" in out
    assert "> What is 3 + 4?" in out
    assert row(out, "time to first token (TTFT)").endswith("prefill-0 computed the prompt and token 1")
    assert "decode-0 computed" in row(out, "time per output token (TPOT)")
    moved = row(out, "KV cache moved").split()
    assert moved[4] in ("KiB", "MiB")
    assert float(moved[3]) > 0
    assert "prefill-0 → decode-0 over shm" in row(out, "KV cache moved")
    assert_nothing_left(pid, port)


@pytest.mark.slow
def test_the_shipped_adapter_answers_in_its_own_manner() -> None:
    port = free_port_pair()
    pid, code, out, err = run(*QUICKSTART, "--once", "--adapter", f"--port={port}")
    assert (code, err) == (0, ""), out + err
    asked = [index for index, line in enumerate(out.splitlines()) if line.startswith("> What is 3 + 4?")]
    answers = [out.splitlines()[index + 1] for index in asked]
    assert answers == ["7", "Arr, 7 it be!"]
    assert_nothing_left(pid, port)


@pytest.mark.slow
def test_the_shipped_model_that_sees_is_asked_about_an_image(tmp_path: Path) -> None:
    port = free_port_pair()
    image = tmp_path / "a.png"
    image.write_bytes(file_of(Pictures.new("RGB", (96, 96), (40, 160, 60))))  # plain green
    pid, code, out, err = run(*QUICKSTART, "--once", f"--image={image}", f"--port={port}")
    assert (code, err) == (0, ""), out + err
    lines = out.splitlines()
    at = lines.index(f"> What is in the picture? ({image})")
    assert "green" in lines[at + 1]
    assert_nothing_left(pid, port)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--image=/no/such.png"], "--image /no/such.png: cannot be read: No such file or directory"),
        (["--image=a.png", "--adapter"], "--image: the adapter's model takes no images; leave out one of the two"),
        (
            ["--adapter", "--model=x"],
            "--adapter: the adapter is for the shipped model; leave out --model",
        ),
    ],
)
def test_what_cannot_be_asked_is_one_line(refused: Callable[..., Refusal], given: list[str], said: str) -> None:
    assert refused(quickstart_main, "--once", *given) == (1, "", f"quickstart: {said}\n")


def test_a_missing_model_is_one_line(refused: Callable[..., Refusal], tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    for main, *command in ((quickstart_main, "--once"), (cli_main, "bench", "serve")):
        code, out, err = refused(main, *command, f"--model={missing}")
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert str(missing) in err


class Serving:
    """A quickstart that keeps serving, and its output lines."""

    def __init__(self, model: Path) -> None:
        self.port = free_port_pair()
        command = [*QUICKSTART, f"--port={self.port}", f"--model={model}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def wait_for(self, text: str) -> str:
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            found = [line for line in self.lines if text in line]
            if found:
                return found[0]
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.05)
        raise AssertionError(f"not within {DEADLINE_S} s: {text!r}\n{''.join(self.lines)}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()  # its children end with it
                self.process.wait(10)
        self._reader.join(10)


@pytest.fixture(scope="module")
def serving(checkpoint: Checkpoints) -> Iterator[Serving]:
    quickstart = Serving(checkpoint("llama"))
    try:
        quickstart.wait_for("try: curl")
        yield quickstart
    finally:
        quickstart.close()


def test_instances_are_shown(serving: Serving) -> None:
    _, code, out, err = run(*PD_CLUSTER, "instances", "--admin", f"http://127.0.0.1:{serving.port + 1}")
    assert (code, err) == (0, "")
    assert row(out, "prefill-0").endswith("decode-0 up (shm)")
    assert row(out, "decode-0").split()[1:3] == ["decode", "ready"]
    _, code, out, err = run(*PD_CLUSTER, "instances", "--admin", f"http://127.0.0.1:{serving.port}")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "--admin" in err


def test_bench_of_a_running_server_counts_its_kv_bytes(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    url = f"http://127.0.0.1:{serving.port}"
    shape = ["--num-requests=3", "--concurrency=2", "--input-len=32", "--output-len=8"]
    _, code, out, err = run(*PD_CLUSTER, "bench", "serve", f"--url={url}", *shape, f"--json={file}")
    assert (code, err) == (0, ""), out + err
    values = {result["name"]: result["value"] for result in json.loads(file.read_text())["results"]}
    assert values["errors"] == 0
    num_layers, num_kv_heads, head_dim = 3, 2, 16
    assert values["kv_moved"] == 3 * 32 * (2 * num_layers * num_kv_heads * head_dim * 4)  # float32, whole blocks
    _, code, _, err = run(*PD_CLUSTER, "bench", "serve", f"--url={url}", "--input-len=600")
    assert code == 1
    assert "--input-len 600" in err


def test_a_dead_worker_is_shown_and_a_signal_ends_all(serving: Serving) -> None:
    """Ends the quickstart, so this is the last test that uses `serving`."""
    instances = httpx.get(f"http://127.0.0.1:{serving.port + 1}/instances", trust_env=False).json()["instances"]
    (decode,) = [entry["pid"] for entry in instances if entry["instance_id"] == "decode-0"]
    assert decode in started_by(serving.process.pid)
    os.kill(decode, signal.SIGKILL)
    serving.wait_for(f"decode-0 (pid {decode}) died with exit code -9")
    serving.wait_for("decode-0 was restarted")
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(60) == 0
    assert_nothing_left(serving.process.pid, serving.port)


@pytest.mark.slow
def test_bench_serve_on_a_cluster_of_its_own(checkpoint: Checkpoints, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    shape = ["--num-requests=4", "--concurrency=2", "--input-len=20", "--output-len=8"]
    pid, code, out, err = run(*PD_CLUSTER, "bench", "serve", f"--model={checkpoint('llama')}", *shape, f"--json={file}")
    assert (code, err) == (0, ""), out + err
    written = json.loads(file.read_text())
    assert list(written) == ["command", "machine", "commit", "results"]
    names = ["ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p90", "tpot_p99", "itl_p99"]
    names += ["output_tokens", "requests", "kv_moved", "errors"]
    assert [result["name"] for result in written["results"]] == names
    for result in written["results"]:
        assert list(result) == ["name", "value", "unit", "better", "samples", "spread", "goal", "met"]
        assert result["value"] is not None
        assert result["better"] in ("higher", "lower")
        assert result["met"] is (True if result["name"] == "errors" else None)
        assert result["name"] == "errors" or result["value"] > 0
    assert "measuring: 4 of 4 requests" in out
    assert_nothing_left(pid)
