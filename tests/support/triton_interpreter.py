"""What the interpreter of Triton 3.6 lacks, mended: `mend()` before the first kernel runs in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter
from triton.language import bfloat16, float32


def mend() -> None:
    _scalars_of_new_numpy()
    _bfloat16_dot()


def _scalars_of_new_numpy() -> None:
    """Scalars are arrays of one element; numpy 2.4 makes no index of those."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def _bfloat16_dot() -> None:
    """A bfloat16 is the bits of a uint16 there, and a dot multiplies those as whole numbers."""
    create_dot = interpreter.InterpreterBuilder.create_dot

    def to_float(handle: Any) -> Any:
        if handle.dtype.scalar != bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, to_float(a), to_float(b), *others)

    interpreter.InterpreterBuilder.create_dot = dot
