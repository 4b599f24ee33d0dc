"""Imports only the part of transformers that rank processes on a CPU need; a user's own program gets all of it.

Three parts are left out, which together take half of the time of all imports:

- The packages `transformers` and `transformers.models` read a part of each of their thousands of files to map names to
modules. Rank processes import modules by path; the replacement packages load the map only on access to a name that is
not a module.
- transformers' own sharding (DTensor, FSDP) and losses, by reporting torch.distributed and scipy as not available:
`model/parallel` shards the ranks, and nothing is trained.
- torch's compiler, which transformers imports only to mark functions. Ranks compile nothing; the compiler is imported
when anything except the marks is accessed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from typing import Any

PACKAGES = ("transformers", "transformers.models")
LEFT_OUT = ("is_torch_distributed_available", "is_scipy_available")
COMPILER = "torch._dynamo"
MARKS = ("allow_in_graph", "assume_constant_result", "disable")  # decorators


def _unmarked(function: Any = None, *_: object, **__: object) -> Any:
    return function if callable(function) else _unmarked


class _ByName(types.ModuleType):
    """A package whose own `__init__` runs only when a name that is not one of its modules is accessed."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__" and self.__name__ == "transformers":
            return importlib.metadata.version("transformers")
        if name in MARKS and self.__name__ == COMPILER:
            return _unmarked
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            importlib.import_module(self.__name__)
        return getattr(sys.modules[self.__name__], name)


def make_light() -> None:
    """Installs the replacement packages; has no effect if transformers is already imported."""
    if any(name in sys.modules for name in (*PACKAGES, COMPILER)):
        return
    import torch  # noqa: F401

    for name in (*PACKAGES, COMPILER):
        spec = importlib.util.find_spec(name)
        if spec is None:
            return  # importing transformers will report the error
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _ByName
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)
    for name in ("transformers.utils", "transformers.utils.import_utils"):
        module = importlib.import_module(name)
        for available in LEFT_OUT:
            if hasattr(module, available):
                setattr(module, available, lambda: False)


def import_architecture(model_type: str) -> None:
    """Imports the modules of a model type. The loader reports modules that are missing or broken."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    name = model_type_to_module_name(model_type)
    with contextlib.suppress(ImportError):
        for part in ("configuration", "modeling"):
            importlib.import_module(f"transformers.models.{name}.{part}_{name}")
