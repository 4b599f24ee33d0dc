"""Runs the deployment guide's commands on one machine: the rank-table command, start_servers.sh three times, curl."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from pd_cluster.cluster.processes.port_reservations import free_ports
from tests.support.cluster import START_TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
END_TIMEOUT_S = 40.0
POLL_S = 0.1
HOST = "127.0.0.1"


class Shape(NamedTuple):
    """Settings of the instances; small unless a test uses the guide's own numbers."""

    tensor_parallel_size: int = 1
    max_model_len: int = 256
    max_num_batched_tokens: int = 128


class Servers:
    """Instances started by scripts/start_servers.sh in `folder`. All have ended after the `with` block."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        devices: tuple[str, str] = ("0", "1"),
        shape: Shape | None = None,
        kind: str = "cpu",
    ) -> None:
        """`devices`: of the prefill and the decode instance; `kind`: value of the rank-table tool's --device."""
        self.folder = folder
        self.model = model
        self.devices = devices
        self.kind = kind
        self.shape = shape or Shape()
        self.ports = free_ports(5)
        self.prefill, self.decode, self.public, self.admin, _ = self.ports
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.make_tables()

    def make_tables(self) -> None:
        generate_tables(self.folder, self.devices, self.kind)

    def where(self, table: str) -> tuple[Path, Callable[[Sequence[str]], list[str]]]:
        """Returns the folder where this table's instance starts, and a function that adapts commands to it."""
        return self.folder, list

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def environment(self, table: str, **changes: str | None) -> dict[str, str]:
        """Returns the guide's variables, with relative paths as in the guide."""
        variables: dict[str, str | None] = {
            **{name: value for name, value in os.environ.items() if not re.match("PD_CLUSTER_(?!TEST_)", name)},
            "GLOBAL_RANK_TABLE_FILE_PATH": f"global_ranktable_{HOST}.json",
            "RANK_TABLE_FILE_PATH": f"local_rank_table_{HOST}_{table}.json",  # spelt as in the guide
            "NODE_PORTS": f"{self.prefill},{self.decode}",
            "USE_OPENAI": "1",
            **changes,
        }
        return {name: value for name, value in variables.items() if value is not None}

    def start(self, name: str, table: str, port: int, flags: Sequence[str] = (), **changes: str | None) -> None:
        folder, on_its_machine = self.where(table)
        command = [
            *("sh", str(ROOT / "scripts" / "start_servers.sh")),
            f"--model={self.model}",
            f"--tensor-parallel-size={self.shape.tensor_parallel_size}",
            f"--max-model-len={self.shape.max_model_len}",
            "--max-num-seqs=256",
            f"--max-num-batched-tokens={self.shape.max_num_batched_tokens}",
            f"--host={HOST}",
            f"--port={port}",
            *("--served-model-name", "tiny"),
            *flags,
        ]
        with self.log_file(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                on_its_machine(command),
                cwd=folder,
                env=self.environment(table, **changes),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def start_scheduler(self, flags: Sequence[str] = (), **changes: str | None) -> None:
        self.start("scheduler", "host", self.public, [f"--admin-port={self.admin}", *flags], **changes)

    def replace_scheduler(self, flags: Sequence[str] = (), **changes: str | None) -> None:
        """Ends the running scheduler and starts one with these flags and environment changes; workers keep running."""
        running = self.processes["scheduler"]
        if running.poll() is None:
            running.terminate()
            assert self.await_exit("scheduler") == 0, self.logs()
        self.start_scheduler(flags, **changes)

    def start_workers(self) -> None:
        for name, devices, port in zip(("prefill", "decode"), self.devices, (self.prefill, self.decode), strict=True):
            self.start(name, devices.replace(",", ""), port)

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_file(name).read_text(encoding="utf-8", errors="replace")

    def logs(self) -> str:
        return "\n".join(f"---- {name}\n{self.log(name)}" for name in self.processes)

    def await_health(self, port: int) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended with code {process.returncode}\n{self.logs()}"
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(f"http://{HOST}:{port}/health", timeout=5, trust_env=False)
                if answer.json()["status"] in ("ok", "ready"):
                    return
            time.sleep(POLL_S)
        pytest.fail(f"no 200 from port {port} within {START_TIMEOUT_S:g} s\n{self.logs()}")

    def await_exit(self, name: str, timeout_s: float = END_TIMEOUT_S) -> int:
        try:
            return self.processes[name].wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} did not end within {timeout_s:g} s\n{self.logs()}")

    def error_of(self, name: str) -> str:
        """Returns the one-line error of an instance that could not start."""
        assert self.await_exit(name) == 1, self.logs()
        lines = [
            line for line in self.log(name).splitlines() if not re.match(r"\d{4}-\d\d-\d\d .* (INFO|WARNING) ", line)
        ]
        assert len(lines) == 1, self.log(name)
        assert lines[0].startswith("pd-cluster: ")
        return lines[0].removeprefix("pd-cluster: ")


def generate_tables(folder: Path, devices: tuple[str, str], kind: str = "cpu") -> None:
    """Runs the guide's rank-table command, with the address and device kind that it detects itself on NPU machines."""
    command = [
        *(sys.executable, str(ROOT / "scripts" / "pd_ranktable_tools.py"), "--mode", "gen"),
        *("--prefill-server-list", devices[0], "--decode-server-list", devices[1], "--api-server", "--save-dir", "."),
        *("--server-ip", HOST, "--device", kind),
    ]
    subprocess.run(command, cwd=folder, check=True, timeout=60, stdout=subprocess.DEVNULL)


def curl(port: int, path: str, body: Mapping[str, object]) -> Any:
    """Runs the guide's `curl -X POST … -H … -d …`."""
    url = f"http://{HOST}:{port}{path}"
    header = "Content-Type: application/json"
    command = ["curl", "--silent", "--show-error", "--noproxy", "*", "--max-time", "60", "-X", "POST", url]
    result = subprocess.run(
        [*command, "-H", header, "-d", json.dumps(body)], capture_output=True, timeout=90, check=True
    )
    return json.loads(result.stdout)


def document_body(model: str) -> dict[str, object]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 100,
        "top_k": -1,
        "top_p": 1,
        "temperature": 0,
        "ignore_eos": False,
        "stream": False,
    }
