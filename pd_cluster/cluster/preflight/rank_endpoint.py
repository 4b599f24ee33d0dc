"""Runs a process on a device of the rank table, as one end of a link to be probed. Knows nothing of pairs."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import msgspec

from pd_cluster.cluster.members.rank_table_place import resolve_host
from pd_cluster.devices import hccl_environment
from pd_cluster.engine.link_probe.probe_messages import BeginProbes, Command, ProbeAnswer
from pd_cluster.errors import ConfigError, LinkError
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.types import Role
from ranktable_tools import Server

PAIR_S = 180.0  # longer than the ends' own deadlines
END_S = 5.0
NUM_LOG_LINES = 3


@dataclass(frozen=True, slots=True)
class ListedInstance:
    name: str
    role: Role
    server: Server


@contextlib.contextmanager
def running(end: RankEndpoint) -> Iterator[RankEndpoint]:
    try:
        yield end
    finally:
        end.close()


class RankEndpoint:
    """The process of one end of a link to be probed. Each method raises LinkError with the process's own reason.

    `lines` are the process's answers, in order; an empty one means that it has ended.
    """

    def __init__(
        self, instance: ListedInstance, rank: int, device: str, kv_transport: str, seed: int | None = None
    ) -> None:
        self.server = instance.server
        self.seed = secrets.randbits(40) if seed is None else seed
        self._why = ""
        try:
            host = resolve_host(self.server.server_ip)
        except ConfigError as error:
            host, self._why = "", str(error)
        self.begin = BeginProbes(
            name=instance.name,
            role=instance.role,
            rank=rank,
            device=device,
            device_ids=[each.device_id for each in self.server.device],
            host=host,
            kv_transport=kv_transport,
            seed=self.seed,
        )
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pd_cluster.engine.link_probe.probe_end"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=_environment(self.server, host, device),
        )
        self.lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"answers of {instance.name}", daemon=True).start()

    def tell(self, command: Command) -> None:
        if self._why:
            raise LinkError(self._why)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(msgspec.json.encode(command) + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise LinkError(self._last_log_line("the process has ended")) from None

    def receive(self, timeout_s: float) -> ProbeAnswer:
        if self._why:
            raise LinkError(self._why)
        try:
            line = self.lines.get(timeout=timeout_s)
        except queue.Empty:
            self._why = f"no answer within {timeout_s:g} s"
            raise LinkError(self._last_log_line(self._why)) from None
        if not line:
            self._why = self._last_log_line("the process has ended")
            raise LinkError(self._why)
        answer = msgspec.json.decode(line, type=ProbeAnswer)
        if answer.error:
            raise LinkError(answer.error)
        return answer

    def ask(self, command: Command, timeout_s: float) -> ProbeAnswer:
        self.tell(command)
        return self.receive(timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(END_S)

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # ends the process
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(b"")

    def _last_log_line(self, what: str) -> str:
        self._log.seek(0)
        lines: Sequence[str] = self._log.read().decode(errors="replace").split("\n")
        said = " / ".join(line.strip()[:200] for line in [line for line in lines if line.strip()][-NUM_LOG_LINES:])
        return f"{what}: {said}" if said else what


def _environment(server: Server, host: str, device: str) -> dict[str, str]:
    """Returns a rank process's environment, with the HCCL variables that a worker sets."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if hccl_environment.is_wanted(device, server):
        environment |= hccl_environment.environment(
            hccl_environment.settings(server, host, Timeouts(), PortRange(), os.environ)
        )
    return {name: value for name, value in environment.items() if value}
