"""Brings an architecture's rotary embedding into the form that kernels take: whole heads, whose halves are rotated.

Other forms differ in the order of a head's features only. Some rotate neighbours instead of halves, some rotate only
the first features. Reordering the rows of the query and key projections brings them into the form of `Rope`: scores
do not change, since queries and keys are reordered alike. Features that are not rotated get the angle zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.functional import pad

from pd_cluster.model.inputs.forward_batch import ForwardBatch
from pd_cluster.model.layers.ops import Rope
from pd_cluster.model.layers.rope.rope_scaling import LengthRotary

WHOLE_MODEL = ""  # a kind of layer: the architecture has one rotary embedding
NO_ROPE = "no rope"  # a kind of layer: its heads are not rotated
MODELS_ORDER, HALVES_ORDER = "model", "halves"  # of a head's features in queries and keys

# (module, its input [num_tokens, hidden_size], positions [1, num_tokens], kind) -> (cos, sin), [1, num_tokens, width]
Turn = Callable[[Any, torch.Tensor, torch.Tensor, str], tuple[torch.Tensor, torch.Tensor]]


def turn(module: Any, x: torch.Tensor, positions: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls a rotary embedding of transformers; `kind` names one of several, which the module takes as an argument."""
    found: tuple[torch.Tensor, torch.Tensor]
    found = module(x, positions) if kind == WHOLE_MODEL else module(x, positions, kind)
    return found


def turn_once(module: Any, x: torch.Tensor, positions: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Doubles tables that have each angle once (gpt-oss)."""
    cos, sin = turn(module, x, positions, kind)
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def turn_complex(module: Any, x: torch.Tensor, positions: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes tables apart that are one complex number for each angle (DeepSeek-V2)."""
    angles = module(x, positions)
    cos, sin = angles.real, angles.imag
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


class RopeTables:
    """Makes the tables of a step for each kind of layer. `order`: that of a head's features; None: the model's own.

    `key_order` names it: the KV pool has keys in this order, so both ends of a link need the same.
    """

    def __init__(
        self, module: Any, kinds: Iterable[str], heads: tuple[int, bool], like: torch.Tensor, turn: Turn = turn
    ) -> None:
        """`heads`: the features of a head, and whether neighbours are rotated; otherwise halves.

        `like`: a tensor of the dtype and on the device of the activations. `module` shows by its tables how many
        features it rotates.
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
    """Returns the order of a head's features, [head_dim], in which its halves are rotated; None: the model's own.

    `pairs_neighbours`: feature 2i is rotated with 2i + 1, otherwise i with i + rotary_dim / 2.
    """
    if rotary_dim == head_dim and not pairs_neighbours:
        return None
    features = torch.arange(head_dim)
    rotated, passed = features[:rotary_dim], features[rotary_dim:]
    left, right = (rotated[::2], rotated[1::2]) if pairs_neighbours else rotated.chunk(2)
    middle = len(passed) // 2
    return torch.cat((left, passed[:middle], right, passed[middle:]))


def qkv_order(order: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Returns the order of the rows of a joined QKV projection, whose queries and keys have heads in that order."""
    head_dim = len(order)
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim).view(-1, head_dim)
    rotated, values = rows[: num_heads + num_kv_heads], rows[num_heads + num_kv_heads :]
    return torch.cat((rotated[:, order].flatten(), values.flatten()))


def starts_order(order: torch.Tensor | None, num_heads: int, first: int, last: int) -> torch.Tensor | None:
    """Returns the order of the rows of heads whose `first` features alone are rotated, before their `last` ones."""
    if order is None:
        return None
    rows = torch.arange(num_heads * (first + last)).view(num_heads, first + last)
    return torch.cat((rows[:, :first][:, order], rows[:, first:]), dim=1).flatten()


def ends_order(order: torch.Tensor | None, num_heads: int, first: int, last: int) -> torch.Tensor | None:
    """Returns the order of the rows of heads whose `last` features alone are rotated, behind their `first` ones."""
    if order is None:
        return None
    rows = torch.arange(num_heads * (first + last)).view(num_heads, first + last)
    return torch.cat((rows[:, :first], rows[:, first:][:, order]), dim=1).flatten()
