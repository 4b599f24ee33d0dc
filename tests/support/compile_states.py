"""Launches of recurrent layers in Triton, on tensors of the meta device: see compile_cuda_ops.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import torch

from pd_cluster.devices.device import CPU
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.state_rows import Segment, StateRows
from pd_cluster.model.kernels.cuda.states.triton_states import TritonStates
from pd_cluster.native.recurrence_values import GatedNorm
from tests.support.recurrences import RecurrentCase, conv_case, delta_case, mamba_case

NUM_ROWS = 8


def launch(make: Callable[[int], RecurrentCase], dtype: torch.dtype = torch.bfloat16, is_bare: bool = False) -> None:
    """Launches a chunk and a single token; `is_bare`: the layer has no norm."""
    with torch.device("meta"):
        case = make(NUM_ROWS)
        inputs = type(case.inputs)(*(None if each is None else each.to(dtype) for each in case.inputs))
        planes = [torch.empty(100, 30, numel)[:, 3] for numel in case.plane_numels]
        recurrence = case.recurrence
        if recurrence is not None and is_bare:
            recurrence = replace(recurrence, norm=GatedNorm())
        layer = TritonStates(case.convolution, recurrence)
        pool = cast(KVPool, SimpleNamespace(device=CPU))
        layer(inputs, planes, StateRows.of(pool, [Segment(0, NUM_ROWS - 1, 1), Segment(NUM_ROWS - 1, NUM_ROWS, 2)]))


FEW: dict[str, Callable[[], None]] = {
    "states of qwen3_next": lambda: launch(lambda n: delta_case(32, 16, (128, 128), n)),
    "states of granite": lambda: launch(lambda n: mamba_case(128, 1, (64, 128), n), is_bare=True),
}
OTHERS: dict[str, Callable[[], None]] = {
    "states of kimi_linear": lambda: launch(lambda n: delta_case(32, 32, (128, 128), n, by_channel=True)),
    "states of olmo_hybrid": lambda: launch(lambda n: delta_case(30, 30, (96, 192), n), torch.float32),
    "states of long keys": lambda: launch(lambda n: delta_case(8, 4, (256, 64), n, by_channel=True)),
    "states of falcon_h1": lambda: launch(lambda n: mamba_case(24, 1, (64, 256), n), torch.float16),
    "states of nemotron_h": lambda: launch(lambda n: mamba_case(128, 8, (64, 128), n), torch.float32),
    "states of lfm2": lambda: launch(lambda n: conv_case(2048, n)),
}
