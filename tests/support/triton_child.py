"""A child process in which Triton interprets kernels on CPU, or compiles them for absent GPUs.

Triton decides at import, so the process of other tests must not import it. Calls and answers are lines of JSON: a call
names a function in a module of tests.support; an answer is its result or exception.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100.0


class NoAnswer(AssertionError):
    """The child has ended or does not respond."""


class TritonChild:
    """`call` runs a function in the child and returns its result; an exception there fails the test."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def call(self, module: str, function: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps([module, function, arguments]).encode() + b"\n"
        self._process.stdin.write(line)
        self._process.stdin.flush()
        answer = self._process.stdout.readline() if wait([self._process.stdout], TIMEOUT_S) else b""
        if not answer:
            self._process.kill()
            raise NoAnswer(f"the child that runs Triton has not answered {line!r}")
        result, error = json.loads(answer)
        assert error is None, error
        return result


@contextmanager
def triton_child(interpret: bool, cache: Path) -> Iterator[TritonChild]:
    """Yields a child. `cache` is the folder for compiled kernels; the caller deletes it."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1" if interpret else "0",
        "TRITON_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.triton_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=ROOT,
    )
    with process:
        try:
            yield TritonChild(process)
        finally:
            process.kill()


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirects all other output to stderr
    for line in sys.stdin:
        module, function, arguments = json.loads(line)
        result, error = None, None
        try:
            result = getattr(importlib.import_module(f"tests.support.{module}"), function)(**arguments)
        except Exception:
            error = traceback.format_exc()
        answers.write(json.dumps([result, error]) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
