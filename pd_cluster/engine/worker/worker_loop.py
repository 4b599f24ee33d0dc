"""The loop of every worker's process: mail in, one step, mail out. Start reading at `turn`.

Only the thread that calls `run` changes requests, blocks or images; the mailbox and the links' threads only
put events into `inbox`. Knows nothing of what a step computes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import Event, StartDrain, handle_all
from pd_cluster.engine.lifecycle.availability import Availability


class Job(Protocol):
    """An engine (worker.py) or an encoder (encode/encode_worker.py), driven by a loop."""

    state: Availability

    @property
    def load(self) -> wire.Load:
        """The load that heartbeats tell; read by the mailbox's thread: replaced, never changed."""

    @property
    def wait_s(self) -> float:
        """How long mail may be waited for; 0 while there is something to compute."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in use that sleep would take away."""

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for anything from here."""

    def intercept(self, conn: str, body: wire.Body) -> bool:
        """Takes a message that must not wait for a step, on the mailbox's thread; returns whether it did."""

    def handle(self, event: Event) -> None: ...
    def tick(self) -> None: ...
    def flush(self) -> None:
        """Sends what has been collected."""

    def step(self) -> None:
        """Computes one step, if there is anything to compute, and refreshes the load."""

    def publish(self) -> None:
        """Refreshes the load now."""

    def release_all(self) -> None:
        """Begins what is held: nothing more comes."""

    def close(self) -> None: ...


class Loop:
    def __init__(self, inbox: queue.SimpleQueue[Event], job: Job) -> None:
        self.inbox, self.job = inbox, job

    def run(self, came_round: Callable[[], None] = lambda: None) -> None:
        """Runs until `StopEngine`, or, after `StartDrain`, until nothing is left. Raises the error of mailbox or step.

        `came_round` is called between steps, and several times a second while there are none.
        """
        try:
            while self.turn(came_round):
                pass
        finally:
            self.job.close()

    def turn(self, came_round: Callable[[], None] = lambda: None, wait_s: float | None = None) -> bool:
        """Mail in, one step, mail out; False once the job has ended. Raises the error of mailbox or step.

        `wait_s`: how long mail is waited for, at most; None: no longer than there is nothing to compute.
        """
        job = self.job
        if not handle_all(self.inbox, self._handle, job.wait_s if wait_s is None else wait_s):
            return False
        came_round()
        job.tick()
        if job.is_idle:
            job.state.settle()
        job.flush()  # what the mail brought need not wait for the step
        job.step()
        if is_closed := job.state.is_closed:
            job.release_all()
        job.flush()
        return not (is_closed and job.is_over and self.inbox.empty())  # otherwise what is there is refused first

    def _handle(self, event: Event) -> None:
        if isinstance(event, StartDrain):
            self.job.state.drain.begin()
            self.job.publish()  # before the step, which may take long
        else:
            self.job.handle(event)
