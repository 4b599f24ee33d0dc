"""Decides whether flash-linear-attention's chunk kernels compute prompts in a model's recurrent layers.

They do if the package fla is installed, the weights have 16 bits (fla would multiply float32 with 10 bits of mantissa)
and a trial succeeds: before the first layer of each shape, fla's and Triton's kernels compute the same random rows.
The library's name is part of the model's `Numerics`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

import numpy as np
import torch
from triton.errors import TritonError

from pd_cluster.devices.device import CPU, Device
from pd_cluster.model.inputs.state_rows import Segment
from pd_cluster.model.kernels.cuda.states.chunk_passes import ChunkPass, divided
from pd_cluster.model.kernels.cuda.states.triton_states import ChunkKernel, StateSlots, TritonStates, columns_of
from pd_cluster.native.recurrence_values import Convolution, GatedDelta, Mamba2, StateInputs

log = logging.getLogger(__name__)

PACKAGE = "fla"
DEVICE = "cuda"  # the type of torch device that runs fla's kernels
DTYPES = (torch.float16, torch.bfloat16)
# The largest accepted difference of outputs and states, relative to their norms. Correct chunks differ by less than
# 0.01 in 16 bits.
TOLERANCE = 0.04
# Two sequences of more than a chunk of rows. The state of the first is copied after its first five rows.
TRIAL = (Segment(0, 5, 0, 2), Segment(5, 71, 0), Segment(71, 137, 1))
FAILURES = (TritonError, ImportError, RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError)


class ChunkChoice:
    """The choice for the layers of one model. `name`: the library and its version; "" until a layer uses it."""

    def __init__(self) -> None:
        self.name = ""
        self._found: dict[tuple[object, ...], bool] = {}

    def kernel_for(self, convolution: Convolution, recurrence: GatedDelta | Mamba2) -> ChunkKernel | None:
        """Returns the layer's chunk kernel; None: all sequences are advanced token by token."""
        weight = convolution.weight
        if weight.device.type != DEVICE or weight.dtype not in DTYPES or not importlib.util.find_spec(PACKAGE):
            return None
        shape = (type(recurrence), weight.shape, convolution.parts, weight.device)
        if shape not in self._found:
            self._found[shape] = self._passes_trial(convolution, recurrence)
        return _library().FlaChunks(recurrence) if self._found[shape] else None

    def _passes_trial(self, convolution: Convolution, recurrence: GatedDelta | Mamba2) -> bool:
        try:
            library = _library()
            error = trial_error(convolution, recurrence, library.FlaChunks(recurrence))
            why = "" if error <= TOLERANCE else f"its results differ by {error:.1e} of their norm"
        except FAILURES as failure:
            why = f"{type(failure).__name__}: {failure}".partition("\n")[0]
        if why:
            log.warning("recurrent layers: Triton kernels compute prompts, not flash-linear-attention: %s", why)
            return False
        if not self.name:
            self.name = f"fla {library.VERSION}"
            log.info("recurrent layers: %s computes prompts in chunks, Triton kernels compute single tokens", self.name)
        return True


def _library() -> Any:
    return importlib.import_module("pd_cluster.model.kernels.cuda.states.fla_chunks")


def trial_error(convolution: Convolution, recurrence: GatedDelta | Mamba2, chunks: ChunkKernel) -> float:
    """Returns the largest difference of `chunks` from the Triton kernels, relative to the norm of outputs or states."""
    weight = convolution.weight
    table = np.array(TRIAL, dtype=np.int32)
    device = Device("cuda", weight.device.index or 0) if weight.is_cuda else CPU
    generator = torch.Generator(weight.device).manual_seed(53)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=weight.device)

    num_rows, num_blocks = TRIAL[-1].stop, 1 + max(max(each.block, each.keep) for each in TRIAL)
    is_delta = isinstance(recurrence, GatedDelta)
    num_decays = recurrence.decay_bias.numel() if isinstance(recurrence, GatedDelta) else recurrence.num_heads
    convolved = random(num_rows, len(weight)).to(weight.dtype)
    decays, betas = random(num_rows, num_decays), random(num_rows, recurrence.num_heads)
    inputs = StateInputs(convolved, decays.to(weight.dtype), betas.to(weight.dtype) if is_delta else None)
    layer = TritonStates(convolution, recurrence)
    before = random(num_blocks, layer.num_features * columns_of(recurrence))
    results = list[tuple[torch.Tensor, torch.Tensor]]()
    for in_chunks in (True, False):
        state, out = before.clone(), random(num_rows, layer.num_features)
        if in_chunks:
            _, passes = divided(table)
            chunks(inputs, convolved.float(), state, [ChunkPass.of(runs, device) for runs in passes], out)
        else:
            layer.scan(inputs, convolved.float(), state, StateSlots.of(table, device), out)
        results.append((out, state))
    pairs = zip(*results, strict=True)
    return max(float((found - expected).norm() / expected.norm()) for found, expected in pairs)
