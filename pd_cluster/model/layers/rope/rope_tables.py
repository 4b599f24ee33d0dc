"""Converts an architecture's rotary embedding to the form that kernels expect: all features of a head are rotated, each
with the feature half a head away.

Other forms differ only in the order of a head's features: some rotate neighbours, some rotate only the first features.
Reordering the rows of the query and key projections converts them. Scores do not change, because queries and keys are
reordered alike. Features that are not rotated get the angle zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.functional import pad

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.ops import Rope
from pd_cluster.model.layers.rope.rope_scaling import LengthRotary

WHOLE_MODEL = ""  # a kind of layer: all layers use the one rotary embedding
NO_ROPE = "no rope"  # a kind of layer: heads are not rotated
MODELS_ORDER, HALVES_ORDER = "model", "halves"  # orders of a head's features in queries and keys

# (module, its input [num_tokens, hidden_size], positions [1, num_tokens], kind) -> (cos, sin), [1, num_tokens, width]
Turn = Callable[[Any, torch.Tensor, torch.Tensor, str], tuple[torch.Tensor, torch.Tensor]]


def turn(module: Any, x: torch.Tensor, positions: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls a rotary embedding of transformers; `kind` selects one of several, if the module has such an argument."""
    found: tuple[torch.Tensor, torch.Tensor]
    found = module(x, positions) if kind == WHOLE_MODEL else module(x, positions, kind)
    return found


def doubled_tables(
    module: Any, x: torch.Tensor, positions: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls a rotary embedding that returns each angle once (gpt-oss), and repeats the angles."""
    cos, sin = turn(module, x, positions, kind)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def complex_tables(
    module: Any, x: torch.Tensor, positions: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls a rotary embedding that returns one complex number per angle (DeepSeek-V2), and splits them."""
    angles = module(x, positions)
    cos, sin = angles.real, angles.imag
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


class RopeTables:
    """Makes the tables of a step for each kind of layer. `order`: the order of a head's features; None: the model's
    own.

    `key_order` names this order. Keys in the KV pool have this order, so both ends of a link need the same one.
    """

    def __init__(
        self, module: Any, kinds: Iterable[str], heads: tuple[int, bool], like: torch.Tensor, turn: Turn = turn
    ) -> None:
        """`heads`: the number of features of a head, and whether neighbours are rotated instead of halves.

        `like`: a tensor with the dtype and device of the activations. The tables of `module` are as wide as the part of
        the features that is rotated.
        """
        self._module, self._kinds, self._turn = module, sorted(set(kinds)), turn
        self._head_dim, pairs_neighbours = heads
        start = torch.zeros(1, 1, dtype=torch.int64, device=like.device)
        with torch.no_grad():
            widths = {turn(module, like, start, kind)[0].shape[-1] for kind in self._kinds if kind != NO_ROPE}
        assert len(widths) <= 1, "layers that rotate different numbers of features"
        self._rotary_dim: int = widths.pop() if widths else self._head_dim
        self.order = half_order(self._head_dim, self._rotary_dim, pairs_neighbours)
        self.key_order = MODELS_ORDER if self.order is None else HALVES_ORDER

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> dict[str, Rope]:
        """Returns the tables of a batch by kind of layer; x [num_tokens, hidden_size]."""
        if isinstance(self._module, LengthRotary):
            self._module.batch = batch
        return {kind: self._table(x, batch.rope_positions, kind) for kind in self._kinds}

    def _table(self, x: torch.Tensor, positions: torch.Tensor, kind: str) -> Rope:
        if kind == NO_ROPE:
            shape = (len(x), self._head_dim)
            return Rope(x.new_ones(shape), x.new_zeros(shape))
        cos, sin = (table[0] for table in self._turn(self._module, x, positions, kind))
        if self._rotary_dim == self._head_dim:
            return Rope(cos, sin)
        half = self._rotary_dim // 2
        rest = (0, self._head_dim // 2 - half)
        cos, sin = pad(cos[:, :half], rest, value=1.0), pad(sin[:, :half], rest)
        return Rope(torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))


def half_order(head_dim: int, rotary_dim: int, pairs_neighbours: bool) -> torch.Tensor | None:
    """Returns the order of features, [head_dim], in which halves are rotated; None: the model's own order.

    `pairs_neighbours`: the model rotates feature 2i with 2i + 1; otherwise i with i + rotary_dim / 2.
    """
    if rotary_dim == head_dim and not pairs_neighbours:
        return None
    features = torch.arange(head_dim)
    rotated, passed = features[:rotary_dim], features[rotary_dim:]
    left, right = (rotated[::2], rotated[1::2]) if pairs_neighbours else rotated.chunk(2)
    middle = len(passed) // 2
    return torch.cat((left, passed[:middle], right, passed[middle:]))


def qkv_order(order: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Returns the order of rows of a joined QKV projection that reorders the features of all query and key heads."""
    head_dim = len(order)
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim).view(-1, head_dim)
    rotated, values = rows[: num_heads + num_kv_heads], rows[num_heads + num_kv_heads :]
    return torch.cat((rotated[:, order].flatten(), values.flatten()))


def starts_order(order: torch.Tensor | None, num_heads: int, first: int, last: int) -> torch.Tensor | None:
    """Returns the order of rows for heads of `first` rotated features, followed by `last` features without rotation."""
    if order is None:
        return None
    rows = torch.arange(num_heads * (first + last)).view(num_heads, first + last)
    return torch.cat((rows[:, :first][:, order], rows[:, first:]), dim=1).flatten()


def ends_order(order: torch.Tensor | None, num_heads: int, first: int, last: int) -> torch.Tensor | None:
    """Returns the order of rows for heads of `first` features without rotation, followed by `last` rotated features."""
    if order is None:
        return None
    rows = torch.arange(num_heads * (first + last)).view(num_heads, first + last)
    return torch.cat((rows[:, :first], rows[:, first:][:, order]), dim=1).flatten()
