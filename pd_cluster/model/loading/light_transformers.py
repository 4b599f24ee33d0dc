"""Imports only the part of transformers that rank processes on a CPU need; a user's own program keeps the whole.

Three things are left out, which together take half of the time of all imports:

- The packages `transformers` and `transformers.models` read a part of each of their thousands of files, to learn which
  module has which name. Rank processes import modules by their paths; their substitute packages load the list
  on access to a name that is not a module.
- Its own ways to share a model (DTensor, FSDP) and its losses, as with a torch that was built without
  torch.distributed and where there is no scipy: ranks are sharded by `model/parallel`, and train nothing.
- torch's compiler, which transformers imports to mark functions for it. Ranks compile nothing; on access to
  more than the marks, it is imported.
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
    """A package that runs its own `__init__` on access to a name that is not one of its modules."""

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
    """Installs the light packages, before transformers is imported; afterwards it has no effect."""
    if any(name in sys.modules for name in (*PACKAGES, COMPILER)):
        return
    import torch  # noqa: F401

    for name in (*PACKAGES, COMPILER):
        spec = importlib.util.find_spec(name)
        if spec is None:
            return  # the import will report it
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
    """Imports the modules of its models. The loader reports modules that are missing or broken."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    name = model_type_to_module_name(model_type)
    with contextlib.suppress(ImportError):
        for part in ("configuration", "modeling"):
            importlib.import_module(f"transformers.models.{name}.{part}_{name}")
