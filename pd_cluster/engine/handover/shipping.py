"""Determines which pieces of a prompt's KV cache to send in one group of layers, and tracks which were sent.

Pure arithmetic: Exports decides when to send them, and sends them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd_cluster import wire
from pd_cluster.kv.group_rule import ALL, Rule
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.layer_groups import first_token_of

MIN_LAYERS_NBYTES = 1 << 20  # finished layers wait until there are this many bytes to send


class ShipLimits(NamedTuple):
    """Limits of a group's pieces. The peer and the transport of the group's lanes set them."""

    peer_block_size: int  # tokens
    max_payload_nbytes: int
    num_layers: int  # layers to send: all, or all except those of a draft head


class ShipGroup(NamedTuple):
    """A group of layers at this end. `block_size`: in tokens. `layer_nbytes`: a block's bytes in the largest layer.

    `places`: the indices of the group's layers among all attention layers of the model, ascending; () if the group has
    all of them.
    """

    block_size: int
    layer_nbytes: int
    holds: Rule = ALL
    places: tuple[int, ...] = ()

    def num_done(self, num_layers: int) -> int:
        """Returns how many of the group's layers are among the model's first `num_layers` attention layers."""
        return bisect_left(self.places, num_layers) if self.places else num_layers


@dataclass(frozen=True, slots=True)
class ShipSizes:
    """Sizes that determine each group's pieces. `min_nbytes`: the smallest piece that is sent during a step."""

    groups: tuple[ShipGroup, ...]
    min_nbytes: int = MIN_LAYERS_NBYTES

    @classmethod
    def of(cls, layouts: Sequence[KVLayout]) -> ShipSizes:
        attending = sorted(layer for each in layouts if not each.holds.is_state for layer in each.layers)
        place_of = {layer: place for place, layer in enumerate(attending)}
        groups = []
        for each in layouts:
            places = tuple(place_of[layer] for layer in each.layers if layer in place_of)
            is_split = not each.holds.is_state and len(places) < len(attending)
            groups.append(ShipGroup(each.block_size, each.most_layer_nbytes, each.holds, places if is_split else ()))
        return cls(tuple(groups))


@dataclass(slots=True)
class ShipProgress:
    """Tracks which part of one group's KV, for a prompt of `num_tokens`, is queued for sending.

    Tokens before `next_token` are queued in all layers to send; the running step's later tokens are queued in the first
    `num_layers`. A state counts as one token.
    """

    group: ShipGroup
    num_tokens: int
    next_token: int = 0
    num_layers: int = 0
    num_chunks: int = 0

    @property
    def num_own_tokens(self) -> int:
        """The number of tokens to send for the whole prompt in this group."""
        return 1 if self.group.holds.is_state else self.num_tokens

    def accepts(self, first_token: int, limits: ShipLimits) -> bool:
        """Whether the peer may request the tokens from this one on.

        This token must start a block of the peer's, and be no earlier than the first token that the group's rule keeps.
        """
        if self.group.holds.is_state:
            return first_token == 0
        least = first_token_of(self.group.holds, self.num_tokens, limits.peer_block_size)
        return least <= first_token <= self.num_tokens and first_token % limits.peer_block_size == 0

    def finished_layers(
        self, num_layers: int, num_computed: int, limits: ShipLimits, table: Sequence[int], min_nbytes: int
    ) -> Iterator[wire.KVPiece]:
        """Yields pieces of layers that a running step has finished, if they are large enough.

        `num_layers`: how many of the model's attention layers have finished. `num_computed`: how many of the prompt's
        tokens will be computed when the step has ended.
        """
        if self.group.holds.is_state:  # a state is sent at the end, because each chunk changes it
            return
        stop, first, done = self._complete(num_computed), self.num_layers, self.group.num_done(num_layers)
        if stop <= self.next_token or done <= first:
            return
        done, is_last = min(done, limits.num_layers), done >= limits.num_layers
        num_blocks = len(self._blocks(table, self.next_token, stop))
        if is_last or (done - first) * num_blocks * self.group.layer_nbytes >= min_nbytes:
            yield from self._pieces(stop, first, done, limits, table)

    def computed(self, num_computed: int, limits: ShipLimits, table: Sequence[int]) -> Iterator[wire.KVPiece]:
        """Yields pieces of all tokens in blocks that are complete. Called between steps."""
        if self.group.holds.is_state:
            if num_computed >= self.num_tokens:
                yield from self._state_pieces(limits, table)
        elif (stop := self._complete(num_computed)) > self.next_token:
            yield from self._pieces(stop, self.num_layers, limits.num_layers, limits, table)

    def _pieces(
        self, stop: int, first_layer: int, stop_layer: int, limits: ShipLimits, table: Sequence[int]
    ) -> Iterator[wire.KVPiece]:
        """Yields tokens from `next_token` to `stop` in these layers, in pieces of whole blocks that fit a payload."""
        size, num_layers = self.group.block_size, stop_layer - first_layer
        num_blocks = max(1, limits.max_payload_nbytes // (num_layers * self.group.layer_nbytes))
        start = self.next_token
        while start < stop:
            end = min(stop, (start // size + num_blocks) * size)
            yield wire.KVPiece(start, end - start, first_layer, num_layers, self._blocks(table, start, end))
            start = end
        if stop_layer == limits.num_layers:
            self.next_token, self.num_layers = stop, 0
        else:
            self.num_layers = stop_layer

    def _state_pieces(self, limits: ShipLimits, table: Sequence[int]) -> Iterator[wire.KVPiece]:
        """Yields the state in pieces of as many layers as fit a payload."""
        at_once = max(1, limits.max_payload_nbytes // self.group.layer_nbytes)
        for first in range(0, limits.num_layers, at_once):
            yield wire.KVPiece(0, 1, first, min(at_once, limits.num_layers - first), list(table[:1]))
        self.next_token = 1

    def _complete(self, num_computed: int) -> int:
        """Returns how many of the prompt's first tokens are in blocks that will not be written again."""
        size = self.group.block_size
        return self.num_tokens if num_computed >= self.num_tokens else num_computed // size * size

    def _blocks(self, table: Sequence[int], start: int, stop: int) -> list[int]:
        size = self.group.block_size
        return list(table[start // size : -(-stop // size)])
