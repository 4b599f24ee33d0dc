"""A worker that looks for a scheduler, with recorded connections in place of sockets."""

from __future__ import annotations

from pd_cluster import wire
from pd_cluster.cluster.members.worker_joining import (
    FIRST_BACKOFF_S,
    WorkerJoining,
)
from pd_cluster.settings.timeouts import Timeouts
from tests.support.mail import RecordedMail

REACH_S = 10.0
JOIN = wire.Join(role="decode", host="192.0.2.7", port=8000, device_ids=["0"], model_identity="model")
TIMES = Timeouts(join_timeout_s=60.0)
KEY = b"k" * 32


class Seeker:
    def __init__(self, addresses: tuple[tuple[str, int], ...] = (("h", 1),), keys: tuple[bytes, ...] = (KEY,)) -> None:
        self.now_s = 0.0
        self.lines = RecordedMail(is_numbered=True)
        self.joining = WorkerJoining(addresses, keys, JOIN, self.lines, TIMES, lambda: self.now_s)

    @property
    def tried(self) -> list[tuple[str, int, bytes]]:
        """Returns host, port and key of every connection that the worker opened."""
        assert {each[:2] for each in self.lines.opened} <= {("join", 0)}
        return [each[2:] for each in self.lines.opened]

    def connect(self) -> str:
        """Waits for the worker's backoff, and returns the connection that it then opens."""
        while not self.joining.is_due:
            self.now_s += FIRST_BACKOFF_S / 4
        self.joining.connect(self.joining.address[0])
        return self.joining.conn

    def register(self) -> str:
        conn = self.connect()
        self.joining.on_opened(conn)
        self.joining.on_answer(conn, "")
        return conn
