"""The loop of every worker's process: handles mail, computes one step, sends mail. Start reading at `turn`.

Only the thread that calls `run` changes requests, blocks or images; the threads of the mailbox and of links only put
events into `inbox`. Does not know what a step computes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import Event, StartDrain, handle_all
from pd_cluster.engine.lifecycle.availability import Availability


class Job(Protocol):
    """The job that a loop drives: an engine (worker.py) or an encoder (extras/encoders)."""

    state: Availability

    @property
    def load(self) -> wire.Load:
        """The load that heartbeats send. The mailbox's thread reads it, so it is replaced and never changed."""

    @property
    def wait_s(self) -> float:
        """How long to wait for mail; 0 if there is something to compute."""

    @property
    def is_idle(self) -> bool:
        """Whether the worker can go to sleep: no running request uses memory that would be freed."""

    @property
    def is_over(self) -> bool:
        """Whether no other process needs this worker any more."""

    def intercept(self, conn: str, body: wire.Body) -> bool:
        """Handles a message that must not wait for a step, on the mailbox's thread. Returns False for others."""

    def handle(self, event: Event) -> None: ...
    def tick(self) -> None: ...
    def flush(self) -> None:
        """Sends collected outputs."""

    def step(self) -> None:
        """Computes one step, if there is anything to compute, and refreshes the load."""

    def publish(self) -> None:
        """Refreshes the load now."""

    def release_all(self) -> None:
        """Begins held legs, because no further mail will come."""

    def close(self) -> None: ...


class Loop:
    def __init__(self, inbox: queue.SimpleQueue[Event], job: Job) -> None:
        self.inbox, self.job = inbox, job

    def run(self, on_round: Callable[[], None] = lambda: None) -> None:
        """Runs until `StopEngine`, or after `StartDrain` until no work is left.

        Raises errors of the mailbox or of a step. `on_round` is called between steps, and several times a second if
        there are no steps.
        """
        try:
            while self.turn(on_round):
                pass
        finally:
            self.job.close()

    def turn(self, on_round: Callable[[], None] = lambda: None, wait_s: float | None = None) -> bool:
        """Handles mail, computes one step, and sends mail. Returns False once the job has ended.

        Raises errors of the mailbox or of the step. `wait_s`: the longest time to wait for mail; None: the job's
        `wait_s`.
        """
        job = self.job
        if not handle_all(self.inbox, self._handle, job.wait_s if wait_s is None else wait_s):
            return False
        on_round()
        job.tick()
        if job.is_idle:
            job.state.settle()
        job.flush()  # so that answers to the mail need not wait for the step
        job.step()
        if is_closed := job.state.is_closed:
            job.release_all()
        job.flush()
        return not (is_closed and job.is_over and self.inbox.empty())  # remaining mail is refused first

    def _handle(self, event: Event) -> None:
        if isinstance(event, StartDrain):
            self.job.state.drain.begin()
            self.job.publish()  # before the step, which may take a long time
        else:
            self.job.handle(event)
