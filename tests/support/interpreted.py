"""Runs tests under Triton's interpreter in a child process, because triton decides at import whether to interpret.

Cases are test functions in files that pytest does not collect by default; `run_cases` runs them in the child.
The interpreter of Triton 3.6 truncates bfloat16 where a GPU rounds to nearest even, multiplies its bits as if they were
integers, and counts loops in a way that numpy 2.4 no longer allows: `mend` fixes all three. At each call of each
function it also searches the whole language for functions to replace, which takes a third of the time; `mend` does so
once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
CASE_TIMEOUT_S = 120.0  # a case may take a minute of CPU time
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SLOW_IF_INTERPRETED = [pytest.mark.slow] if os.environ.get("TRITON_INTERPRET") == "1" else []  # not slow on a GPU


def run_cases(files: Sequence[str], *arguments: str, timeout_s: float = 110) -> str:
    """Runs pytest on `files` of tests/support, interpreted.

    Returns its output; raises AssertionError if a case failed, or took over half of a long `timeout_s`.
    """
    paths = [str(ROOT / "tests" / "support" / file) for file in files]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *paths, *arguments]
    command += ["-o", f"timeout={max(CASE_TIMEOUT_S, timeout_s / 2)}"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    environment["PD_CLUSTER_CPU_KERNELS"] = "0"  # the CPU imitates a GPU, which has no CPU kernels
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def choose_device() -> None:
    """Chooses this process's device: the CPU if kernels are interpreted, a GPU without TRITON_INTERPRET."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        mend()
    else:
        torch.set_default_device("cuda")


@dataclass(frozen=True, slots=True)
class Noted:
    """Replaces a kernel: reports the constants of each launch, then launches the kernel."""

    kernel: Any
    note: Callable[[dict[str, Any]], object]

    def __getitem__(self, grid: object) -> Callable[..., object]:
        def launch(*args: object, **options: Any) -> object:
            self.note(options)
            return self.kernel[grid](*args, **options)

        return launch


@cache
def mend() -> None:
    """Fixes the interpreter for this process."""
    import triton.language as tl  # imported only by processes that run kernels
    from triton.runtime import interpreter

    original_convert = interpreter._convert_float
    original_dot = interpreter.InterpreterBuilder.create_dot
    original_patch = interpreter._patch_lang_tensor

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return to_bfloat16_bits(data)
        if source == tl.bfloat16 and target == tl.float32:
            return data.astype(np.uint32) << 16
        return original_convert(data, source, target, rounding_mode)

    def dot(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (
                interpreter.TensorHandle((each.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
                for each in (a, b)
            )
        return original_dot(self, a, b, d, *others)

    def patch(tensor: Any, scope: Any) -> None:
        original_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._convert_float = convert
    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = dot

    # Skips computing sums again in 64 bits, for an assertion that runs only with `debug`.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # Patches the modules that kernels import as the language, and those that the language's own functions use.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda kernel: interpreter._LangPatchScope()  # a scope that restores nothing


@contextmanager
def multiplied_in_order() -> Iterator[None]:
    """Computes each element of a product by adding one term after the other, wherever it is in its tile.

    A GPU's instruction sums all rows of a tile in the same order. numpy's BLAS uses different orders for different
    rows.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        left, right = (_as_float32(each) for each in (a, b))
        total = d.data.astype(np.float32)
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k, :]
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


def _as_float32(handle: Any) -> Any:
    import triton.language as tl

    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def to_bfloat16_bits(numbers: Any) -> Any:
    """Converts float32 to the bits of the nearest bfloat16, rounding ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32).reshape(numbers.shape)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def steps_apart(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns how many representable values apart the elements of two 16-bit tensors are."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape

    def ordered(numbers: torch.Tensor) -> torch.Tensor:
        bits = numbers.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(actual) - ordered(expected)).abs()


def assert_like(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equality: float32 to the seventh digit of the largest value; 16-bit values within one rounding step."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype == torch.float32:
        assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max()
        return
    steps = steps_apart(actual, expected)
    assert steps.max() <= 1 + (actual.dtype == torch.float16)
    assert (steps > 0).float().mean() < 0.005


def whole_numbers(*shape: int) -> torch.Tensor:
    """Returns whole numbers so small that sums of their squares are exact in any order."""
    return torch.randint(-6, 7, shape).float()


def strided(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy that is a strided view: the middle columns of a wider tensor."""
    wide = x.new_full((len(x), x.shape[1] + 32), float("nan"))
    wide[:, 16:-16] = x
    return wide[:, 16:-16]
