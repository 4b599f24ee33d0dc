"""Kernels with deliberate faults, which tests must notice. Runs in a TritonChild."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from pd_cluster.model.cuda import attention, attention_decode, attention_kernels, attention_write

KERNELS = ("prefill_kernel", "decode_kernel", "write_kernel")


def mutant_differs_by(old: str, new: str, **arguments: Any) -> float:
    """Returns `parity` with `old` replaced by `new` throughout the kernels; infinite if the kernel fails."""
    from tests.support.triton_attention import parity  # interprets, while faults can be compiled as well

    with faulty(old, new):
        try:
            return parity(**arguments)
        except ArithmeticError:
            return math.inf


def mutant_replays_differ_by(old: str, new: str, steps: list[list[int]], split_keys: int) -> float:
    """Returns the worst step of `replays` with the fault; infinite if one is not a number."""
    from tests.support.triton_attention import replays

    with faulty(old, new):
        return max(step["difference"] for step in replays(steps, split_keys))


@contextmanager
def faulty(old: str, new: str) -> Iterator[None]:
    """Replaces text in the kernels meanwhile."""
    kept = {name: getattr(attention, name) for name in KERNELS}
    with tempfile.TemporaryDirectory() as folder:
        for module in _mutated(old, new, Path(folder)):
            for name in KERNELS:
                if hasattr(module, name):
                    setattr(attention, name, getattr(module, name))
        try:
            yield
        finally:
            for name, kernel in kept.items():
                setattr(attention, name, kernel)


def _mutated(old: str, new: str, folder: Path) -> list[ModuleType]:
    """Returns copies of the modules; the second imports from the first."""
    modules, num_replaced = [], 0
    for original in (attention_kernels, attention_decode, attention_write):
        text = Path(str(original.__file__)).read_text("utf-8")
        num_replaced += text.count(old)
        name = original.__name__.rpartition(".")[2]
        file = folder / f"{name}.py"
        file.write_text(text.replace(old, new), "utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if original is attention_decode:
            module.__dict__.update({shared: getattr(modules[0], shared) for shared in ("sweep", "add_sink")})
        modules.append(module)
    assert num_replaced, f"not in the kernels: {old}"
    return modules
