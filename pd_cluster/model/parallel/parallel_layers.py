"""The parts of a rank's share that differ from a whole model: embeddings, norms over all heads, and sums.

They are installed in transformers' modules from outside; the fused model calls the same functions. Does not read files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pd_cluster.model.layers.whole_rows import WholeRows
from pd_cluster.model.parallel.parallel_plan import ParallelPlan
from pd_cluster.model.parallel.rank_group import Group

MIXERS = ("self_attn", "linear_attn", "mamba", "conv", "mixer")  # names of a layer's first half
SECOND_HALVES = ("mlp", "block_sparse_moe", "feed_forward", "shared_mlp")
KNOWN_AS = "_known_as"  # attribute of classes made by `rebuilt`: transformers' own class
NORM_IN_MLP = "post_mlp_layernorm"  # a norm at the end of A.X-K1's blocks of experts; the sum must precede it


class VocabParallelEmbedding(torch.nn.Module):
    """Looks up ids in this rank's rows, and returns zeros for others; the sum over ranks has all embeddings."""

    def __init__(self, inner: torch.nn.Module, first_id: int, num_ids: int, group: Group) -> None:
        super().__init__()
        self.inner = inner
        self._first_id, self._num_ids, self._group = first_id, num_ids, group

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        local = input_ids - self._first_id
        is_here = (local >= 0) & (local < self._num_ids)
        embedded: torch.Tensor = self.inner(local.where(is_here, 0))
        return self._group.sum(embedded.masked_fill_(~is_here[..., None], 0.0))


class SpanningNorm(torch.nn.Module):
    """A root-mean-square norm over the heads of all ranks (queries and keys in OLMo 2); `weight` is only this rank's
    part.
    """

    def __init__(self, inner: Any, num_features: int, num_replicas: int, group: Group) -> None:
        super().__init__()
        self.weight, self._eps = inner.weight, inner.variance_epsilon
        self._num_features, self._num_replicas, self._group = num_features, num_replicas, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = self._group.sum(x.float().square().sum(-1, keepdim=True)) / self._num_replicas
        normed = x.float() * torch.rsqrt(squares / self._num_features + self._eps)
        scaled: torch.Tensor = self.weight * normed
        return scaled.to(x.dtype)


class SpanningGatedNorm(torch.nn.Module):
    """Mamba-2's gated norm over groups of heads that several ranks share; `weight` is only this rank's part.

    The gate is applied before the norm or, in Falcon-H1, after it. `group_features`: the features of a whole group.
    """

    def __init__(self, inner: Any, group_features: int, num_groups: int, group: Group) -> None:
        super().__init__()
        self.weight, self._eps = inner.weight, inner.variance_epsilon
        self._gates_last = bool(getattr(inner, "norm_before_gate", False))
        self._group_features, self._num_groups, self._group = group_features, num_groups, group

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Takes and returns this rank's [..., num_features], which belong to a single group."""
        wide, gates = x.float(), torch.nn.functional.silu(gate.float())
        if not self._gates_last:
            wide = wide * gates
        own = self._group.rank * self._num_groups // self._group.size
        squares = wide.new_zeros(*wide.shape[:-1], self._num_groups)
        squares[..., own] = wide.square().sum(-1)
        mean = self._group.sum(squares)[..., own, None] / self._group_features
        normed = wide * torch.rsqrt(mean + self._eps) * self.weight.float()
        scaled: torch.Tensor = normed * gates if self._gates_last else normed
        return scaled.to(x.dtype)


class RankShare:
    """One rank's share of a transformers model: installs the parts that a share needs, and removes them again."""

    def __init__(self, plan: ParallelPlan, group: Group) -> None:
        self.plan, self.group = plan, group
        self._hooks: list[Any] = []

    def embedding(self, inner: torch.nn.Module) -> VocabParallelEmbedding:
        step = self.plan.local_vocab_size
        return VocabParallelEmbedding(inner, self.group.rank * step, step, self.group)

    def whole_rows(self, num_outputs: int) -> WholeRows:
        """Returns this rank's share of a layer that takes whole rows."""
        return WholeRows(self.group, self.plan.own_outputs(num_outputs, self.group.rank), num_outputs)

    def install(self, model: Any) -> None:
        """Makes a model that was loaded with this rank's weights compute its share, and add up the ranks' results."""
        model.set_input_embeddings(self.embedding(model.get_input_embeddings()))
        for layer in model.base_model.layers:
            for name in (*MIXERS, *SECOND_HALVES):
                if (half := getattr(layer, name, None)) is None:
                    continue
                self._span_norms(half)
                if (norm := getattr(half, NORM_IN_MLP, None)) is None:
                    self._hooks.append(half.register_forward_hook(self._add_up))
                else:
                    self._hooks.append(norm.register_forward_pre_hook(self._add_up_before))

    def remove(self, model: Any) -> None:
        """Removes the parts again, for a caller that adds up by itself; norms that span several ranks stay."""
        model.set_input_embeddings(model.get_input_embeddings().inner)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _add_up(self, module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return self.group.sum(output[0]), *output[1:]
        return self.group.sum(output)

    def _add_up_before(self, module: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (self.group.sum(arguments[0]),)

    def _span_norms(self, half: Any) -> None:
        plan, states = self.plan, self.plan.states
        for name, num_heads in (("q_norm", plan.num_heads), ("k_norm", plan.num_kv_heads)):
            if plan.norms_span_heads and hasattr(half, name):
                num_replicas = max(1, plan.size // num_heads)
                norm = SpanningNorm(getattr(half, name), num_heads * plan.head_dim, num_replicas, self.group)
                setattr(half, name, norm)
        if states is not None and 0 < states.num_norm_groups < plan.size and hasattr(half, "A_log"):
            features = states.num_norm_features // states.num_norm_groups
            half.norm = SpanningGatedNorm(half.norm, features, states.num_norm_groups, self.group)


def narrowed(architecture: type[Any], plan: ParallelPlan) -> type[Any]:
    """Returns transformers' class, but with short convolutions of a rank's size, which the original derives from
    hidden_size.

    Returns other classes unchanged.
    """
    if plan.states is None or plan.states.module != "conv":
        return architecture

    def narrow(model: Any) -> None:
        hidden_size = model.config.hidden_size
        for layer in model.model.layers:
            if (module := getattr(layer, "conv", None)) is not None:
                _narrow(module, hidden_size, hidden_size // plan.size)

    return rebuilt(architecture, narrow)


def rebuilt(architecture: type[Any], change: Callable[[Any], None]) -> type[Any]:
    """Returns a subclass of transformers' class that changes each model between building its modules and loading
    weights.
    """

    def build(self: Any, config: Any, *rest: Any, **more: Any) -> None:
        architecture.__init__(self, config, *rest, **more)
        change(self)
        self.__class__ = known  # so that other code recognizes the class

    known = getattr(architecture, KNOWN_AS, architecture)

    own = {"__init__": build, "__module__": architecture.__module__, "__qualname__": architecture.__qualname__}
    own[KNOWN_AS] = known
    return type(architecture.__name__, (architecture,), own)


def _narrow(module: Any, hidden_size: int, num_channels: int) -> None:
    """Rebuilds the three parts of a short convolution from transformers with fewer channels."""
    has_bias, kernel = bool(module.bias), module.conv.kernel_size[0]
    module.in_proj = torch.nn.Linear(hidden_size, 3 * num_channels, bias=has_bias)
    module.out_proj = torch.nn.Linear(num_channels, hidden_size, bias=has_bias)
    module.conv = torch.nn.Conv1d(
        num_channels, num_channels, kernel, groups=num_channels, bias=has_bias, padding=kernel - 1
    )
