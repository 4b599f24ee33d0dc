"""Makes transformers' recurrent modules call transformers' own torch functions, whichever packages are installed.

transformers prefers functions of fla, mamba_ssm and causal_conv1d wherever it can import them, although they fail on
CPUs and for tensors without data. They would also change results while the name of the numerics stays the same
(pd_cluster/numerics.py).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from pd_cluster.model.layers.states.state_planes import state_modules

CHOSEN = "implementation"  # a variable in the closures of transformers' wrappers of such functions


def use_torch_functions(model: torch.nn.Module) -> None:
    """Replaces functions that the model's recurrent modules call, in the Python files that define their classes."""
    for name in {type(module).__module__ for module in state_modules(model).values()}:
        space = vars(sys.modules[name])
        for key, value in list(space.items()):
            if inspect.isfunction(value) and CHOSEN in value.__code__.co_freevars and hasattr(value, "__wrapped__"):
                space[key] = _with_own_arguments(value.__wrapped__)


def _with_own_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function wrapped to ignore arguments that only other packages' functions accept."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name in names})

    return call
