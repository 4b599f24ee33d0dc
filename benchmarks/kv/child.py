"""A child that measures on command: its process, questions with a deadline, and its certain end.

Knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.child import ChildFailed, child_environment, end_group, last_lines
from benchmarks.kv.spec import Answer, Command


class Child:
    """One child. `ask` is `tell` and `hear`; for joint work, `tell` both children before one `hear`."""

    def __init__(self, module: str, folder: Path) -> None:
        self.module = module
        self._log = folder / f"{module}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"benchmarks.peers.{module}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(1),
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"answers of {module}", daemon=True).start()

    def tell(self, command: Command) -> None:
        """Sends a command. Raises ChildFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildFailed(self._how_it_ended("has ended")) from None

    def hear(self, deadline_s: float) -> Answer:
        """Returns the answer. Raises ChildFailed if the child ended, failed, or took longer than that."""
        try:
            line = self._lines.get(timeout=deadline_s)
        except queue.Empty:
            raise ChildFailed(self._how_it_ended(f"did not answer within {deadline_s:g} s")) from None
        if not line:
            raise ChildFailed(self._how_it_ended("has ended"))
        answer = msgspec.json.decode(line, type=Answer)
        if answer.error:
            raise ChildFailed(self._how_it_ended(answer.error))
        return answer

    def ask(self, command: Command, deadline_s: float) -> Answer:
        self.tell(command)
        return self.hear(deadline_s)

    def end(self) -> None:
        end_group(self._process)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def _how_it_ended(self, what: str) -> str:
        return f"{self.module}: {what}; its last lines:\n{last_lines(self._log)}"


@contextlib.contextmanager
def two_children(sender: str, receiver: str, folder: Path) -> Iterator[tuple[Child, Child]]:
    with contextlib.ExitStack() as stack:
        children = []
        for module in (sender, receiver):
            child = Child(module, folder)
            stack.callback(child.end)
            children.append(child)
        yield children[0], children[1]
