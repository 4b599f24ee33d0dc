"""Ends a process in which an operator's logits processor does not return, because nothing can interrupt its code.

The processor's request first ends with an error; the other requests continue on other instances. Knows nothing of
processors' interfaces. hang_watchdog.py handles a processor that also keeps the interpreter's lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from pd_cluster import wire
from pd_cluster.engine.ranks.hang_watchdog import end_within
from pd_cluster.model.sampling.load_processors import ProcessorCalls
from pd_cluster.types import LegEnd

log = logging.getLogger(__name__)

LIMIT_S = 30.0  # for one row; normal calls take microseconds to milliseconds
CONFIRM_S = 5.0  # for the scheduler to confirm the request's end
END_S = 0.5  # for the report to the parent


class ConfirmedPost(Protocol):
    """The part of the mailbox that the watch needs. Any thread may call it."""

    def send(self, conn: str, body: wire.Body) -> None: ...
    def await_confirmed(self, timeout_s: float) -> bool: ...


def watch_processors(
    calls: ProcessorCalls, post: ConfirmedPost, tell_lost: Callable[[str], None], limit_s: float = LIMIT_S
) -> None:
    """Starts a thread that ends this process, with code 1, once a call has run for `limit_s`."""

    def watch() -> None:
        while (late := _late(calls, limit_s)) is None:
            time.sleep(limit_s / 10)
        why = f"logits processor {late}: has not returned for {limit_s:g} s"
        log.error("%s; this process ends, and its other requests continue elsewhere", why)
        if (request := calls.request) is not None and request.client:
            ended = LegEnd(request.request_id, request.attempt, why, is_fault=False)
            post.send(request.client, wire.Outputs(ended=[ended]))
            post.await_confirmed(CONFIRM_S)
        tell_lost(why)
        end_within(END_S)

    threading.Thread(target=watch, name="processors", daemon=True).start()


def _late(calls: ProcessorCalls, limit_s: float) -> str | None:
    """Returns the name of the processor whose call has run too long, or None."""
    running = calls.running
    return running[0] if running is not None and time.monotonic() - running[1] > limit_s else None
