"""A disk that is full: logs, the folder of `up`, the cache of compiled kernels and the output of a batch lie on it.

The disk is a small tmpfs that only this process and those that it starts can see; it is gone with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from benchmarks.faults.ground import Ground
from benchmarks.faults.scripts import DEATH_GOAL_S, kill_parent_of_one
from benchmarks.faults.terms import Fault, Means, Seen
from pd_cluster.cluster.processes.ports import free_port_pair
from pd_cluster.errors import PdClusterError
from pd_cluster.settings.engine import SHIPPED_MODEL
from pd_cluster.tables import counted

CLONE_NEWNS = 0x20000
SIZE_MIB = 64
CHUNK = bytes(1 << 20)
COMMAND_TIMEOUT_S = 180.0
POLL_S = 0.2
NO_SPACE = os.strerror(errno.ENOSPC)


class Disk(Ground):
    """A disk for TMPDIR and the cache folder of all processes on it."""

    def __init__(self) -> None:
        self.folder = Path()

    def problem(self) -> str:
        if os.geteuid() != 0:
            return "only root may mount a small disk for it"
        return "" if shutil.which("mount") else "mount is not installed"

    @contextlib.contextmanager
    def stand(self) -> Iterator[Mapping[str, str]]:
        """Mounts the disk. Raises PdClusterError if that fails."""
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise PdClusterError(f"disk-full: no mount namespace: {os.strerror(ctypes.get_errno())}")
        with tempfile.TemporaryDirectory(prefix="pd-cluster-disk-") as name:
            _mount("--make-rprivate", "/")
            _mount("-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=700", "tmpfs", name)
            self.folder = Path(name)
            try:
                yield {"TMPDIR": name, "XDG_CACHE_HOME": name}
            finally:
                subprocess.run(["umount", "-l", name], check=False, timeout=COMMAND_TIMEOUT_S)

    @property
    def _filler(self) -> Path:
        return self.folder / "filler"

    def fill(self) -> None:
        """Fills the disk to the last byte."""
        with self._filler.open("ab", buffering=0) as file:
            size = len(CHUNK)
            while size:
                try:
                    file.write(CHUNK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def free(self) -> None:
        self._filler.unlink()


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    if done.returncode:
        raise PdClusterError(f"disk-full: mount {' '.join(arguments)}: {done.stderr.strip()}")


async def fill_up(means: Means, disk: Disk) -> Seen:
    """Kills instances, which return on a full disk; a batch and another cluster run on it, too."""
    disk.fill()
    try:
        seen = await kill_parent_of_one(means, "decode-1")
        for kernels in (disk.folder / "pd-cluster").glob("kernels-*"):
            kernels.unlink()  # so that nothing can be compiled into the cache
        disk.fill()
        seen.detected_s.extend((await kill_parent_of_one(means, "prefill-1")).detected_s)
        problems = [await _batch(disk), await _up_with_full_log(disk, means)]
    finally:
        disk.free()
    await means.stage.whole()
    for problem in filter(None, problems):
        print(f"disk-full: {problem}", flush=True)
    seen.figures.append(counted("commands wrong", len(list(filter(None, problems))), "requests", 0))
    return seen


async def _batch(disk: Disk) -> str:
    """Checks that `run-batch` ends with one line that says why."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        lines = [
            {"custom_id": f"{at}", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 4}}
            for at in range(4)
        ]
        questions = Path(elsewhere, "in.jsonl")
        questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
        output = str(disk.folder / "out.jsonl")
        arguments = ("run-batch", "-i", str(questions), "-o", output, "--model", str(SHIPPED_MODEL))
        code, said = await _command(*arguments, TMPDIR=elsewhere)
    return _one_line("run-batch", code, said)


async def _command(*arguments: str, **variables: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pd_cluster", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **variables},
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), COMMAND_TIMEOUT_S)
    except TimeoutError:
        return 0, f"not done within {COMMAND_TIMEOUT_S:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, said.decode(errors="replace")


def _one_line(what: str, code: int, said: str) -> str:
    """Returns the fault in how it ended; "" if there is none."""
    told = [line for line in said.splitlines() if line.startswith("pd-cluster: ") and NO_SPACE in line]
    if code == 1 and told and "Traceback" not in said:
        return ""
    return f"{what}: exit code {code}, and not one line that says {NO_SPACE!r}: {said.strip()[-400:]}"


async def _up_with_full_log(disk: Disk, means: Means) -> str:
    """Checks that `up` serves although its output has no room, and ends on request."""
    port = free_port_pair()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere, (disk.folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pd_cluster", "up", "--port", str(port), "--served-model-name=faults"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": elsewhere},
        )
        try:
            return await asyncio.wait_for(_serves(process, f"http://127.0.0.1:{port}", means), COMMAND_TIMEOUT_S)
        except TimeoutError:
            return f"up with a full log did not serve and end within {COMMAND_TIMEOUT_S:g} s"
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), COMMAND_TIMEOUT_S)
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def _serves(process: asyncio.subprocess.Process, url: str, means: Means) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=COMMAND_TIMEOUT_S) as client:
        while process.returncode is None:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    answer = await client.post(f"{url}/v1/completions", json=means.probe)
                    return "" if answer.status_code == 200 else f"up with a full log answered {answer.status_code}"
            await asyncio.sleep(POLL_S)
    return f"up with a full log ended with exit code {process.returncode}"


DISK = Disk()
DISK_FAULTS: dict[str, Fault] = {
    "disk-full": Fault("a disk that is full", lambda means: fill_up(means, DISK), DEATH_GOAL_S, ground=DISK),
}
