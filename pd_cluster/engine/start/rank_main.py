"""A rank process: `python -m pd_cluster.engine.start.rank_main FD`. Loads the model, then works until it is stopped.

FD is one end of a socket pair; the worker's parent has the other end. The parent sends the configuration, then `drain`
and `stop`; the rank sends a line when the engine is ready or has failed. End of file, or the parent's death, ends this
process. Rank 0 runs the worker; the other ranks compute their share of its steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec

from pd_cluster.engine.start.preloader import has_no_driver
from pd_cluster.errors import InstanceLost, PdClusterError
from pd_cluster.process_messages import RankReport
from pd_cluster.settings.process_configs import WorkerConfig

if TYPE_CHECKING:
    from pd_cluster.engine.handover.engine_events import Event

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
EXIT_OTHER_RANK_LOST = 3


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)


def leave_signals_to_parent() -> None:
    """Ignores signals. They reach whole process groups, and the parent must first let running requests end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def main(fd: int) -> int:
    """Runs a rank that was started by command line."""
    die_with_parent()
    return run(fd)


def run(fd: int) -> int:
    """Runs a rank whose parent has the other end of `fd`. Returns the exit code."""
    leave_signals_to_parent()
    channel = socket.socket(fileno=fd)
    lines = channel.makefile("rb")
    if not (line := lines.readline()):  # the parent has ended
        return 1
    config = msgspec.json.decode(line, type=WorkerConfig)
    config.logs.begin()
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    threading.Thread(target=_watch_parent, args=(lines, inbox), name="parent", daemon=True).start()
    try:
        if config.ranks.rank:
            _follow(config)
        else:
            _serve(config, channel, inbox)
    except InstanceLost as error:  # the parent finds out why the other rank was lost
        _tell_lost(channel, str(error))
        return EXIT_OTHER_RANK_LOST
    except PdClusterError as error:
        _tell(channel, RankReport(state="failed", error=error.text))
        return 1
    return 0


def import_engine(light: bool) -> None:
    """Imports the engine; with `light`, without modules that ranks on a CPU never use."""
    if light:
        from pd_cluster.model.loading.light_transformers import make_light

        make_light()
    import pd_cluster.engine.assembly.build_worker  # noqa: F401


def prepare(config: WorkerConfig) -> None:
    """Imports the engine without garbage collection, whose repeated scans would take a quarter of the start-up time."""
    gc.disable()
    import_engine(light=has_no_driver(config.engine.device))
    gc.freeze()
    gc.enable()
    import torch

    torch.set_num_threads(config.num_threads)
    torch.set_grad_enabled(False)


def _follow(config: WorkerConfig) -> None:
    prepare(config)
    from pd_cluster.engine.assembly.build_ranks import build_follower

    follower = build_follower(config)
    follower.start()
    follower.run()


def _serve(config: WorkerConfig, channel: socket.socket, inbox: queue.SimpleQueue[Event]) -> None:
    started_s = time.monotonic()
    prepare(config)
    from pd_cluster.engine.assembly.build_worker import build_worker
    from pd_cluster.engine.ranks.hang_watchdog import ends_when_hung

    loop, mailbox, report = build_worker(config, inbox, partial(_tell, channel))
    took_s, what = time.monotonic() - started_s, _cache_of(report)
    log.info("ready after %.1f s: %s, control port %d", took_s, what, report.control_port)
    _tell(channel, report)
    loop.run(ends_when_hung(config.timeouts.step_timeout_s))
    mailbox.await_confirmed(config.timeouts.dead_after_s)  # otherwise a finished request would be retried
    mailbox.close()


def _cache_of(report: RankReport) -> str:
    """Describes the KV pool."""
    if (layout := report.layout) is None:
        return "images only"
    what = f"{report.num_blocks} blocks of {layout.block_size} tokens"
    if layout.num_draft_layers:
        what += f" in {layout.num_layers} layers, of which {layout.num_draft_layers} of a draft head"
    return what


def _tell(channel: socket.socket, report: RankReport) -> None:
    channel.sendall(msgspec.json.encode(report) + b"\n")


def _tell_lost(channel: socket.socket, error: str) -> None:
    _tell(channel, RankReport(state="failed", lost=error))


def _watch_parent(lines: socket.SocketIO, inbox: queue.SimpleQueue[Event]) -> None:
    """Reads commands.

    `drain` first lets running requests end; `stop` ends the loop after the current step. End of file means that the
    parent is dead and this process must end at once.
    """
    from pd_cluster.engine.handover.engine_events import StartDrain, StopEngine

    while (line := lines.readline().strip()) != b"stop":
        if line != b"drain":
            os._exit(1)
        inbox.put(StartDrain())
    inbox.put(StopEngine())
    lines.readline()
    os._exit(0)


def end(code: int) -> NoReturn:
    """Exits without finalizing the interpreter, because torch's process groups would crash."""
    with contextlib.suppress(OSError, ValueError):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main(int(sys.argv[1])))
