"""Builds a model's modules without the numbers that its files bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class UninitializedModules(TorchFunctionMode):
    """Spares what torch computes in Python on the meta device, where tensors have no memory.

    transformers builds modules there: draws initial weights, and computes frequencies of rotary embeddings from
    `torch.arange`. torch imports sympy for it, which takes longer than loading a small model. Here, nothing is drawn,
    and ranges are numbers in memory. An architecture that combines them with a tensor of the meta device fails, as
    longrope does. transformers computes all of these tensors again after it has moved them from that device.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == torch.nn.init.__name__:
            tensor: torch.Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        if function is torch.arange and str(kwargs.get("device")) == "meta":
            kwargs = {**kwargs, "device": "cpu"}
        if function is torch.cat and args and len({each.is_meta for each in args[0]}) > 1:  # proportional frequencies
            args = ([each.to("meta") for each in args[0]], *args[1:])
        return function(*args, **kwargs)
