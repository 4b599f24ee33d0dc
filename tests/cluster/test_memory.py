"""`up` in a cgroup with little memory: its use of memory, and its reaction when the kernel kills its workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from pd_cluster.settings.engine_config import SHIPPED_MODEL
from tests.cluster.test_up import WAIT_S, Up
from tests.support.cluster import free_port_pair

LIMIT = 1300 << 20
GROUPS = Path("/sys/fs/cgroup")
FILL = """
import os, sys
with open(sys.argv[1], "wb") as file:
    for _ in range(int(sys.argv[2]) >> 20):
        file.write(os.urandom(1 << 20))
    os.fsync(file.fileno())
"""
TAKE = """
import os, sys
taken = []
while os.path.exists(f"/proc/{sys.argv[1]}"):
    taken.append(b"x" * (4 << 20))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """Yields a memory cgroup below this process's own, of this machine's cgroup version."""
    rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = [("memory/", "memory.limit_in_bytes", path) for _, names, path in rows if "memory" in names.split(",")]
    at, limit, path = [*paths, *(("", "memory.max", path) for _, names, path in rows if not names)][0]
    folder = GROUPS / f"{at}{path.strip('/')}" / f"pd-cluster-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"{folder} takes no limit of memory: {error}")
    yield folder
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)


def run_in(group: Path, code: str, *arguments: str) -> None:
    command = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    subprocess.run(["sh", "-c", command, "sh", sys.executable, "-c", code, *arguments], check=False, timeout=WAIT_S)


@contextmanager
def up_in(group: Path, port: int, *flags: str) -> Iterator[Up]:
    """Runs `up` in the cgroup from its start, because a child begins in its parent's group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        running = Up(str(SHIPPED_MODEL), port, *flags)
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield running
    finally:
        running.end()


@pytest.mark.slow
def test_with_a_full_page_cache_it_starts_and_answers(group: Path, tmp_path: Path) -> None:
    run_in(group, FILL, str(tmp_path / "file"), str(2 * LIMIT))
    port = free_port_pair()
    with up_in(group, port, "--", "--gpu-memory-utilization=0.4") as up:
        up.await_line(r"^ready after")
        body = {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "temperature": 0, "max_tokens": 8}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == "7"
        assert not any("killed" in line for line in up.lines)


@pytest.mark.slow
def test_a_worker_that_is_killed_for_memory_three_times_is_not_started_again(group: Path) -> None:
    """The other workers continue. The test makes the kernel choose this worker's rank when memory is exhausted."""
    port = free_port_pair()
    with up_in(group, port) as up:
        up.await_line(r"^ready after")
        for num_kills in (1, 2, 3):
            rank_pid = pid_of_decode(port)
            Path(f"/proc/{rank_pid}/oom_score_adj").write_text("1000")
            run_in(group, TAKE, str(rank_pid))
            up.await_line(r"^decode-0 \(pid \d+\) died .* killed a process for lack of memory")
            if num_kills < 3:
                up.await_line(r"^decode-0 was restarted")
        up.await_line(r"^decode-0 is not restarted: .*3 times in a row")
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "hello"}, timeout=60)
        assert answer.status_code == 200


def pid_of_decode(port: int) -> int:
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        with suppress(httpx.HTTPError):
            found = httpx.get(f"http://127.0.0.1:{port + 1}/instances", timeout=10).json()["instances"]
            (entry,) = [each for each in found if each["instance_id"] == "decode-0"]
            if entry["state"] == "ready":
                return int(entry["pid"])
        time.sleep(0.1)
    raise AssertionError("decode-0 is not ready")
