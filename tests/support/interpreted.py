"""Triton's interpreter in a child process: whether kernels are interpreted is decided when triton is imported.

Cases are test functions in files whose names pytest does not collect by itself; `run_cases` runs them in the child.
The interpreter of Triton 3.6 cuts bfloat16 off where a GPU rounds to nearest even, multiplies its bits as if they were
integers, and counts loops in a way that numpy 2.4 no longer allows: `mend` mends all three. It also looks through the
whole language at each call of each function for what to put its own in place of, and takes a third of the time for it:
here that is done once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def run_cases(files: Sequence[str], *arguments: str, timeout_s: float = 110) -> str:
    """pytest on `files` of tests/support, interpreted. Returns what it printed; AssertionError when a case failed."""
    paths = [str(ROOT / "tests" / "support" / file) for file in files]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *paths, *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def choose_device() -> None:
    """For the rest of this process: CPU, interpreted; a GPU where somebody runs the cases without TRITON_INTERPRET."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        mend()
    else:
        torch.set_default_device("cuda")


def mend() -> None:
    """For the rest of this process."""
    import triton.language as tl  # only where kernels are about to run
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

    # Sums are made again in 64 bits for an assertion that is not made without `debug`.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    # Of the modules that kernels see as their language, and of those that the language's own functions do.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda kernel: interpreter._LangPatchScope()  # which restores nothing


def to_bfloat16_bits(numbers: Any) -> Any:
    """float32 to the bits of the nearest bfloat16, even ones at a tie."""
    bits = np.ascontiguousarray(numbers).view(np.uint32).reshape(numbers.shape)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def steps_apart(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How many representable numbers lie between; the dtypes are of 16 bits."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape

    def ordered(numbers: torch.Tensor) -> torch.Tensor:
        bits = numbers.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordered(actual) - ordered(expected)).abs()


def assert_like(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """float32: to the seventh digit of the largest. 16 bits: one step where the sums before differ in the last bit."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype == torch.float32:
        assert (actual - expected).abs().max() <= 1e-6 * expected.abs().max()
        return
    steps = steps_apart(actual, expected)
    assert steps.max() <= 1 + (actual.dtype == torch.float16)
    assert (steps > 0).float().mean() < 0.005


def whole_numbers(*shape: int) -> torch.Tensor:
    """So small that their squares add up without rounding, in whatever order."""
    return torch.randint(-6, 7, shape).float()


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as the middle columns of a wider tensor."""
    wide = x.new_full((len(x), x.shape[1] + 32), float("nan"))
    wide[:, 16:-16] = x
    return wide[:, 16:-16]
