"""A rank's experts in transformers' model: modules with only these experts, which take the router's expert indexes.

The router has all experts. The modules are replaced from outside the model, like the parts of a rank's share in
parallel/parallel_layers.py.
"""

from __future__ import annotations

from typing import Any

import torch

from pd_cluster.errors import ModelError, called
from pd_cluster.model.layers.expert_share import ExpertShare, RankExperts
from pd_cluster.model.layers.expert_weights import UnpackedExperts
from pd_cluster.model.layers.packed_modules import PackedExperts
from pd_cluster.model.parallel.rank_tensors import OwnFiles

NAME = "experts"  # name of the module in a sparse block


class ParallelExperts(torch.nn.Module):
    """One block's experts: `inner` has only this rank's; `forward` takes the indexes that the router chooses."""

    def __init__(self, inner: torch.nn.Module, share: ExpertShare, num_experts: int) -> None:
        super().__init__()
        self.inner = inner
        self._num_own = len(share.own(num_experts))
        self._own = RankExperts(share, num_experts)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._own.through(self._compute, x, chosen, weights)

    def take_part(self) -> None:
        self._own.take_part(self._compute)

    def _compute(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.inner, PackedExperts | UnpackedExperts):  # only these ignore indexes past the end
            is_here = chosen < self._num_own
            chosen, weights = chosen.where(is_here, 0), weights.where(is_here, 0.0)
        found: torch.Tensor = self.inner(x, chosen, weights)
        return found


class ExpertModules:
    """A rank's experts in transformers' model. `config`: transformers' config of the whole model."""

    def __init__(self, share: ExpertShare, num_experts: int, config: Any) -> None:
        """Chooses the rank's experts. Raises ModelError if the ranks would have different numbers of experts."""
        self.share, self.files = share, OwnFiles.of(share, num_experts)
        self._num_experts, self._config = num_experts, config

    def shrink(self, model: Any) -> None:
        """Rebuilds a model's experts, before weights are loaded, with only this rank's experts; each is whole.

        Raises ModelError if the experts have an unknown structure.
        """
        places = _places(model)
        if not places:
            raise self._unknown("has no module of experts")
        for parent, module in places:
            if getattr(module, "num_experts", None) != self._num_experts:
                raise self._unknown(
                    f"has {type(module).__name__}, whose number of experts is not the one in config.json"
                )
            setattr(parent, NAME, self._shrunk(module))

    def _shrunk(self, module: Any) -> torch.nn.Module:
        whole = type(module)(self._config)
        num_own = len(self.share.own(self._num_experts))
        for name, each in whole.named_parameters(recurse=False):
            if len(each) != self._num_experts:
                raise self._unknown(f"has {type(module).__name__} with {name} of {list(each.shape)}")
            setattr(whole, name, torch.nn.Parameter(each.new_empty(num_own, *each.shape[1:]), each.requires_grad))
        whole.num_experts = num_own
        if hasattr(module, "config"):
            whole.config = module.config  # it says how transformers computes the experts
        built: torch.nn.Module = whole
        return built

    def install(self, model: Any) -> None:
        """Makes the loaded experts compute only this rank's part of the router's choices."""
        for parent, module in _places(model):
            setattr(parent, NAME, ParallelExperts(module, self.share, self._num_experts))

    def _unknown(self, what: str) -> ModelError:
        flags = f"{called('enable_expert_parallel')}, {called('data_parallel_size')}"
        return ModelError(
            f"{flags}: {self._config.model_type} {what}, so its experts cannot be spread over ranks; remove the setting"
        )


def _places(model: Any) -> list[tuple[Any, Any]]:
    """Returns each block that has experts, with its experts."""
    return [(parent, getattr(parent, NAME)) for parent in model.modules() if NAME in parent._modules]
