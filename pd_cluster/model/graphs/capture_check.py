"""Finds out whether graphs can capture a model's decode steps: whether operators wait for the device or use the host.

A graph repeats a fixed list of launches. transformers' modules may do more: read which rows an expert got, read a value
from a tensor, or make a tensor from a Python list. Every operator of two decode steps passes through a dispatch mode
that recognizes such operators by torch's own tags. Does not capture graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pd_cluster.devices.device import Device
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.types import Request, RequestSpec, Sampling

WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
COPIES = ("aten::_to_copy", "aten::copy_")
NUM_SEQS, CONTEXT_LENS = 2, (2, 3)  # two sequences in each of the two watched steps


class OperatorWatch(TorchDispatchMode):
    """Records the operators that are called in its context, and the first one that a graph cannot contain."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.obstacle = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name: str = func._schema.name
        self.names.append(name)
        if not self.obstacle:
            self.obstacle = _obstacle(func, name, args, found)
        return found


def obstacle(model: CausalLM, layout: KVLayout, device: Device) -> str:
    """Returns why graphs cannot capture the model's decode steps, or "". Computes two decode steps in a separate pool.

    Ranks that share a model call this at the same time. All compute both steps, even if the first shows an obstacle.
    """
    num_blocks = layout.num_blocks_for(max(CONTEXT_LENS))
    pool = KVPool(layout, NUM_SEQS * num_blocks, device)
    names, found = [], ""
    try:
        for context_len in CONTEXT_LENS:
            blocks = [list(range(i * num_blocks, (i + 1) * num_blocks)) for i in range(NUM_SEQS)]
            batch = build_batch([(_sequence(own, context_len), 1) for own in blocks], pool)
            watch = OperatorWatch()
            with torch.no_grad(), watch:  # inference mode would not show the parts of composite operators
                model(batch)
            found = found or watch.obstacle
            names.append(watch.names)
    finally:
        pool.close()
    return found or ("" if names[0] == names[1] else "its launches differ from step to step")


def _sequence(blocks: list[int], context_len: int) -> Request:
    request = Request(f"watched {blocks[0]}", RequestSpec([0] * context_len, Sampling()), tables=[blocks])
    request.num_computed_tokens = context_len - 1
    return request


def _obstacle(func: Any, name: str, args: Any, found: Any) -> str:
    """Returns why a graph cannot contain this call, or ""."""
    if name.startswith("aten::index"):  # without a mask the size of the result is known
        given = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
        is_mask = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in given)
        return f"{name} with a mask waits for the device" if is_mask else ""
    if WAITING_TAGS.intersection(func.tags):
        return f"{name} waits for the device"
    if name in COPIES:
        tensors = [each for each in (*args, found) if isinstance(each, torch.Tensor)]
        if len({each.device.type for each in tensors}) > 1:
            return f"{name} copies between host and device"
    return ""
