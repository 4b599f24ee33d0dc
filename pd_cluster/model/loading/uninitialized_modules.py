"""Builds a model's modules without the values that the files supply later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class UninitializedModules(TorchFunctionMode):
    """Avoids computations of torch that run in Python on the meta device, where tensors have no memory.

    transformers builds modules on that device: it draws initial weights, and computes rotary frequencies from
    `torch.arange`. For these operations torch imports sympy, which takes longer than loading a small model. In this
    mode nothing is drawn, and ranges are real tensors. Architectures that combine a range with a tensor on the meta
    device, such as longrope, cannot be built in this mode. transformers recomputes all these tensors after it has moved
    them from the meta device.
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
        if function is torch.cat and args and len({each.is_meta for each in args[0]}) > 1:  # for rope_type proportional
            args = ([each.to("meta") for each in args[0]], *args[1:])
        return function(*args, **kwargs)
