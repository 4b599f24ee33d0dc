"""Keeps records of the clusters that `pd-cluster up` runs on this host, so that commands find them and their admin
tokens.

A record is a file of the user (0600, in a folder of mode 0700) that is valid while its process runs. A different start
time, boot or PID namespace means a different process. Records that other users own or can write are ignored.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

MAX_NBYTES = 65536  # the largest record


class RunningCluster(msgspec.Struct, frozen=True, kw_only=True):
    """`start_ticks`: when the process started, since `boot`; `pids`: the PID namespace of `pid`."""

    admin: str
    url: str  # "" if it listens on a Unix socket
    token_file: str
    model: str
    pid: int
    start_ticks: int
    boot: str
    pids: str
    since: float  # Unix time, in seconds

    @property
    def _is_near(self) -> bool:
        return (self.boot, self.pids) == _machine()

    @property
    def runs(self) -> bool:
        return self._is_near and _start_ticks(self.pid) == self.start_ticks

    @property
    def has_ended(self) -> bool:
        """Whether the cluster's process has certainly ended. A process on another host, or in another container, with
        the same home may still be running.
        """
        return self._is_near and not self.runs


def folder_of_records(env: Mapping[str, str]) -> Path:
    """Returns the runtime folder of the user's session, or a folder below the home if there is none."""
    if session := env.get("XDG_RUNTIME_DIR"):
        return Path(session) / "pd-cluster"
    return Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pd-cluster"


@contextlib.contextmanager
def recorded(env: Mapping[str, str], admin: str, url: str, token_file: str, model: str) -> Iterator[None]:
    """Keeps a record of this process's cluster while the context lasts; does nothing without a writable folder."""
    file: Path | None = None
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no home
        boot, pids = _machine()
        record = RunningCluster(
            admin=admin, url=url, token_file=token_file, model=model, pid=os.getpid(), since=time.time(),
            start_ticks=_start_ticks(os.getpid()), boot=boot, pids=pids,
        )  # fmt: skip
        running_clusters(env)  # removes records of ended clusters
        file = _write(folder_of_records(env), record)
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink()


def running_clusters(env: Mapping[str, str]) -> list[RunningCluster]:
    """Returns this user's clusters on this host, the oldest first. Removes the records of ended ones."""
    found = []
    with contextlib.suppress(OSError, RuntimeError):
        for file in folder_of_records(env).glob("*.json"):
            record = _read(file)
            if record is not None and record.runs:
                found.append(record)
            elif record is not None and record.has_ended:
                file.unlink(missing_ok=True)
    return sorted(found, key=lambda each: each.since)


def _write(folder: Path, record: RunningCluster) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / f"{record.pid}-{record.start_ticks}.json"
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as written:
        written.write(msgspec.json.encode(record))
    return part.rename(file)


def _read(file: Path) -> RunningCluster | None:
    """Reads a record; None if it is invalid, or accessible to other users."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            about = os.fstat(opened.fileno())
            is_own = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
            return msgspec.json.decode(opened.read(MAX_NBYTES), type=RunningCluster) if is_own else None
    except (OSError, msgspec.MsgspecError):
        return None


def _start_ticks(pid: int) -> int:
    """Returns when a process started, in clock ticks since boot (proc_pid_stat(5)); -1 without such a process."""
    try:
        about = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    state, *others = about.rpartition(")")[2].split()
    return -1 if state == "Z" else int(others[18])


def _machine() -> tuple[str, str]:
    """Returns the boot and the PID namespace. Raises OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
