"""Measures how long event loops are blocked, in every process with this folder on its path and `LOOP_NOTES` set.

Appends a line for each delay above 10 ms: when it ended, and its length in seconds of the process's CPU time, so that
other processes on the machine do not count.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

PERIOD_S = 0.001
LEAST_S = 0.01


def watch(loop: Any) -> None:
    at_s, cpu_s = time.monotonic(), time.process_time()

    def tick() -> None:
        nonlocal at_s, cpu_s
        now_s, used_s = time.monotonic(), time.process_time()
        held_s = min(now_s - at_s - PERIOD_S, used_s - cpu_s)
        if held_s > LEAST_S:
            with open(os.environ["LOOP_NOTES"], "a") as notes:
                notes.write(f"{os.getpid()} {now_s:.3f} {held_s:.4f}\n")
        at_s, cpu_s = time.monotonic(), time.process_time()
        loop.call_later(PERIOD_S, tick)

    loop.call_soon(tick)


def change(module: ModuleType) -> None:
    make = module.new_event_loop

    def changed() -> Any:
        loop = make()
        watch(loop)
        return loop

    module.new_event_loop = changed


class _Finder(MetaPathFinder):
    """Patches uvloop once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "uvloop" or (spec := PathFinder.find_spec(name, path, target)) is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


if "LOOP_NOTES" in os.environ:
    sys.meta_path.insert(0, _Finder())
