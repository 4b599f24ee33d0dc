"""Runs the documents' commands in order, as a reader would, against a cluster of the shipped model.

Commands that are not run here are listed in OTHERWISE with the test that runs them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pd_cluster.settings.engine_config import SHIPPED_MODEL
from tests.cluster.test_up import Up
from tests.support.cluster import free_port_pair
from tests.support.page_commands import ROOT, commands_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PAGES = (
    *("README.md", "docs/tour.md", "docs/clients.md", "docs/operations.md", "docs/performance.md"),
    *("docs/features.md", "docs/adapters.md", "docs/multimodal.md", "docs/zh/tour.md"),
)
OTHERWISE = {  # prefix of a command -> the test that runs it
    r"scripts/quickstart.sh|sh scripts/setup.sh": "tests/cluster/test_quickstart.py",
    r"scripts/test.sh": "tests/unit/test_changed_tests.py",
    r"\S*pd-cluster up ": "tests/cluster/test_up.py",
    r"\S*pd-cluster serve --role": "tests/cluster/test_join.py",
    r"pd-cluster serve .*--kv-events-config": "tests/cluster/test_kv_events.py",
    r"pd-cluster serve --kv-host-cache": "tests/cluster/test_kv_tiers.py",
    r"read -r PD_CLUSTER_SERVE_KV_SHARED_CACHE": "tests/model/test_shared_store.py",
    r"curl \S* \S*/v1/streams": "tests/cluster/test_resume.py",
    r"pd-ranktable (gen|merge|check)": "tests/unit/test_ranktable_cli.py",
    r"export |sh scripts/start_servers.sh": "tests/cluster/test_start_servers_sh.py",
    r"pd-cluster check --network": "tests/cluster/test_preflight.py",
    r"pd-cluster instances (add|role|remove) ": "tests/cluster/test_elastic.py",
    r"ANTHROPIC_BASE_URL=": "tests/api/test_clients_agents.py",
    r"curl \S*/v1/completions .*\"french\"|TOKEN=": "tests/cluster/test_lora_runtime.py",
    r"curl \S*/v1/(un)?load_lora_adapter": "tests/cluster/test_lora_runtime.py",
    r"curl \S*/v1/chat/completions .*cat.png": "tests/cluster/test_pictures.py",
}
ENDLESS = re.compile(r"pd-cluster (top|logs --follow)$")
WAIT_S = 120.0


class Reader:
    """A shell in an empty folder with a running cluster, whose ports replace those in the documents.

    Commands find the cluster and its token by themselves.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self._env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NO_PROXY": "*",
        }
        (folder / ".venv").symlink_to(Path(sys.executable).parents[1])

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        command = re.sub(r"//(127\.0\.0\.1|10\.0\.0\.18|localhost):9000", f"//127.0.0.1:{self._port}", command)
        command = command.replace(":9001", f":{self._port + 1}").replace("kill -9 PID", f"kill -9 {self.pid()}")
        if ENDLESS.search(re.sub(r"\s*#.*", "", command)):
            command = f"timeout --preserve-status -s INT 8 {command}"
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self._env,
            input="What is 3 + 4?\n",
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    def start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command.split(),
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def pid(self) -> int:
        found = httpx.get(f"http://127.0.0.1:{self._port + 1}/instances", trust_env=False).json()["instances"]
        return next(int(each["pid"] or 0) for each in found if each["instance_id"] == "decode-0")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    public = free_port_pair()
    up = Up(str(SHIPPED_MODEL), public, "--prefill=1", "--decode=2", "--", "--public-dashboard")
    try:
        up.await_line("^ready after")
        yield public
    finally:
        up.process.send_signal(signal.SIGINT)
        up.process.wait(60)
        up.end()


@pytest.fixture
def reader(port: int, tmp_path: Path) -> Reader:
    return Reader(tmp_path, port)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_runs(page: str, reader: Reader) -> None:
    for command in commands_of((ROOT / page).read_text("utf-8")):
        elsewhere = [test for start, test in OTHERWISE.items() if re.match(start, command, re.DOTALL)]
        if elsewhere:
            assert (ROOT / elsewhere[0]).is_file()
            continue
        done = reader.run(command)
        suffers = "pd-cluster status" in command and done.returncode == 1  # expected right after the kill
        assert done.returncode == 0 or suffers, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        assert done.stdout.strip() or done.stderr.strip() or "kill" in command, command


def test_the_tour_s_client_gets_its_answer(reader: Reader) -> None:
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/tour.md").read_text("utf-8"), re.DOTALL):
        done = reader.run(f"{sys.executable} - <<'END'\n{block}\nEND")
        assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_top_names_a_dead_worker(reader: Reader) -> None:
    """Prints the time that it took (`pytest -s`), but does not assert it, because it depends on the machine's load."""
    with reader.start("pd-cluster top --json --period 0.2") as top:
        assert top.stdout is not None
        top.stdout.readline()
        os.kill(reader.pid(), signal.SIGKILL)
        killed_s = time.monotonic()
        for line in top.stdout:
            if any("decode-0 is unreachable" in each["text"] for each in json.loads(line)["problems"]):
                break
        else:
            raise AssertionError("the process ended too early")
        print(f"figure: from the kill to its name in top {time.monotonic() - killed_s:.2f} s")
        top.send_signal(signal.SIGINT)
        top.communicate(timeout=WAIT_S)
        assert top.returncode == 0
