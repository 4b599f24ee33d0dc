"""A child process that measures on command, answers within a deadline, and is certainly ended.

Knows nothing of the measurements.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.child_process import ChildFailed, child_environment, last_lines
from benchmarks.kv.kv_messages import Answer, Command
from pd_cluster.engine.start.rank_main import die_with_parent

CONTEXT = multiprocessing.get_context("spawn")


class Child:
    """One child. `ask` combines `tell` and `hear`. For joint work, `tell` both children before either `hear`."""

    def __init__(self, module: str, folder: Path) -> None:
        self.module = module
        self._log = folder / f"{module}.log"
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(module, theirs, self._log), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, command: Command) -> None:
        """Sends a command. Raises ChildFailed."""
        try:
            self._pipe.send(command)
        except OSError:
            raise ChildFailed(self._how_it_ended("has ended")) from None

    def hear(self, deadline_s: float) -> Answer:
        """Returns the answer. Raises ChildFailed if the child ended, failed, or exceeded the deadline."""
        try:
            if not self._pipe.poll(deadline_s):
                raise ChildFailed(self._how_it_ended(f"did not answer within {deadline_s:g} s"))
            answer: Answer = self._pipe.recv()
        except (EOFError, OSError):
            raise ChildFailed(self._how_it_ended("has ended")) from None
        if answer.error:
            raise ChildFailed(self._how_it_ended(answer.error))
        return answer

    def ask(self, command: Command, deadline_s: float) -> Answer:
        self.tell(command)
        return self.hear(deadline_s)

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _how_it_ended(self, what: str) -> str:
        return f"{self.module}: {what}; its last lines:\n{last_lines(self._log)}"


def _serve(module: str, pipe: Connection, log: Path) -> None:
    """Runs a child, whose class has a method for each command, named by its tag. Its output goes to `log`."""
    die_with_parent()
    os.environ.update(child_environment(1))
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    child = importlib.import_module(f"benchmarks.peers.{module}").Peer()
    while True:
        command: Command = pipe.recv()
        try:
            answer: Answer = getattr(child, str(command.__struct_config__.tag))(command)
        except Exception as error:
            answer = Answer(error=f"{type(command).__name__}: {error or type(error).__name__}")
        pipe.send(answer)


@contextlib.contextmanager
def two_children(sender: str, receiver: str, folder: Path) -> Iterator[tuple[Child, Child]]:
    with contextlib.closing(Child(sender, folder)) as one, contextlib.closing(Child(receiver, folder)) as other:
        yield one, other
