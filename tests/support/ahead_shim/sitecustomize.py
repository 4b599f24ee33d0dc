"""Makes CPU engines launch their steps ahead of the host, in every process that has this folder on its path.

For each step that was launched ahead with a prompt to hand over, appends a byte to the file named by `AHEAD_NOTES`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def change_runner(module: ModuleType) -> None:
    init = module.ModelRunner.__init__

    def changed(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.goes_ahead = True

    module.ModelRunner.__init__ = changed


def change_ahead(module: ModuleType) -> None:
    launch_next = module.LookAhead.launch_next

    def changed(self: Any, *given: Any) -> None:
        launch_next(self, *given)
        if self.launched is not None and any(request.leg == "prefill" for request, _ in self.launched.chunks):
            with open(os.environ["AHEAD_NOTES"], "ab") as notes:
                notes.write(b".")

    module.LookAhead.launch_next = changed


CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "pd_cluster.model.runner.model_runner": change_runner,
    "pd_cluster.engine.step.look_ahead": change_ahead,
}


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = CHANGES.get(name)
        spec = PathFinder.find_spec(name, path, target) if change is not None else None
        if spec is None or spec.loader is None or change is None:
            return None
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
