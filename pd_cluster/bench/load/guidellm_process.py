"""Finds guidellm, checks a scenario, and runs it in a process with its own interpreter.

guidellm has other dependencies, so it may be in another virtual environment. Knows nothing of workloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pd_cluster.errors import ConfigError, GenerationError

VERSION = "0.8.1"
PLUGIN = Path(__file__).with_name("guidellm_plugin.py")
INSTALL = f"python3 -m venv guidellm-venv && guidellm-venv/bin/pip install guidellm=={VERSION}"
MIN_AT_ONCE, MAX_AT_ONCE = 64, 2048  # concurrent requests; guidellm makes a task for each before it begins
START_DELAY_S = 3.0  # the time between the start of its processes and the first request
CHECK_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
NUM_LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Guidellm:
    """An installed guidellm. `python`: its interpreter."""

    python: str

    @classmethod
    def find(cls, given: str) -> Guidellm:
        """Finds guidellm: the given command, or one next to this interpreter, or one on PATH.

        Raises ConfigError with install instructions.
        """
        beside = str(Path(sys.executable).with_name("guidellm"))
        command = shutil.which(given or beside) or ("" if given else shutil.which("guidellm"))
        if not command:
            where = f"--guidellm {given}: no such command" if given else "guidellm is not installed here"
            raise ConfigError(f"{where}; it sends the load. {_install_hint()}")
        python = Path(command).resolve().with_name("python")
        if not os.access(python, os.X_OK):
            raise ConfigError(f"--guidellm {command}: no interpreter at {python}. {_install_hint()}")
        found = cls(str(python))
        found._check_version()
        return found

    def check(self, scenario: Path) -> None:
        """Raises ConfigError for a scenario that guidellm refuses."""
        done = self._called(str(PLUGIN), "check", str(scenario))
        if done.returncode:
            raise ConfigError(f"guidellm: {_last_line(done.stderr)}")

    async def run(self, scenario: Path, num_processes: int, num_requests: int) -> RunningGuidellm:
        """Starts the load; its output goes to a file next to the scenario."""
        log = scenario.with_name("guidellm.log")
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                self.python,
                str(PLUGIN),
                "run",
                str(scenario),
                cwd=scenario.parent,  # guidellm reads a file .env from the current folder
                env=_environment(
                    scenario.parent,
                    {
                        "GUIDELLM__MAX_WORKER_PROCESSES": str(num_processes),
                        "GUIDELLM__MAX_CONCURRENCY": str(max(MIN_AT_ONCE, min(num_requests, MAX_AT_ONCE))),
                        "GUIDELLM__SCHEDULER_START_DELAY_NON_DISTRIBUTED": str(START_DELAY_S),
                    },
                ),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return RunningGuidellm(process, log)

    def _check_version(self) -> None:
        code = "import importlib.metadata as m; print(m.version('guidellm'))"
        done = self._called("-c", code)
        if done.returncode:
            raise ConfigError(f"{self.python} has no guidellm: {_last_line(done.stderr)}. {_install_hint()}")
        if (version := done.stdout.strip()) != VERSION:
            raise ConfigError(f"{self.python} has guidellm {version}; {VERSION} is needed. {_install_hint()}")

    def _called(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self.python, *arguments],
                env=_environment(None, {}),
                capture_output=True,
                text=True,
                timeout=CHECK_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(f"{self.python} does not run: {error}") from None


@dataclass(frozen=True, slots=True)
class RunningGuidellm:
    process: asyncio.subprocess.Process
    log: Path

    async def wait(self) -> None:
        """Waits until guidellm ends, and ends it if the caller is cancelled. Raises GenerationError if it failed."""
        try:
            code = await self.process.wait()
        finally:
            await self._end()
        if code:
            lines = self.log.read_text("utf-8", errors="replace").splitlines()[-NUM_LOG_LINES:]
            raise GenerationError("\n".join([f"guidellm ended with exit code {code}:", *lines]))

    async def _end(self) -> None:
        """Ends all processes of guidellm's session."""
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if self.process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, ending)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.process.wait(), END_TIMEOUT_S)


def cpu_seconds(session: int) -> dict[int, float]:
    """Returns process -> CPU time in seconds, for a session; empty without /proc."""
    found = {}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            found[int(folder.name)] = tick_s * (int(fields[11]) + int(fields[12]))
    return found


def _environment(folder: Path | None, more: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without our interpreter's variables, and with a cache of data sets in the folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GUIDELLM"))}
    found = {**kept, "PYTHONSAFEPATH": "1", **more}  # so that guidellm imports nothing from the plug-in's folder
    if folder is not None:
        found["HF_DATASETS_CACHE"] = str(folder / "datasets")
    return found


def _install_hint() -> str:
    return f"Install it with: {INSTALL}; then give --guidellm guidellm-venv/bin/guidellm"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1]
