"""Determines which heads are sent from one pool to another, and in which precision. Knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pd_cluster.kv.kv_layout import CODE_BITS, COLD, DTYPE_NBYTES, KVLayout, lanes, vectors_nbytes
from pd_cluster.wire import KVPiece, Plane


@dataclass(frozen=True, slots=True)
class PoolRoute:
    """The route from one pool to another: the contents of payloads, and the loss of precision.

    `one_sided`: the receiver itself reads the sender's pool, so smaller payloads would have no advantage.
    """

    source: KVLayout
    target: KVLayout
    wants_int8: bool = False
    one_sided: bool = False

    @property
    def is_verbatim(self) -> bool:
        """Whether payloads have the blocks' bytes unchanged."""
        same = (self.source.block_size, self.source.dtype) == (self.target.block_size, self.target.dtype)
        return same and self.source.head_range == self.target.head_range and self.wire_dtype == self.source.dtype

    @property
    def heads(self) -> tuple[int, int]:
        """Returns the KV heads [start, stop), counted over the whole model, that both ranks have."""
        (first, last), (start, stop) = self.source.head_range, self.target.head_range
        return max(first, start), min(last, stop)

    @property
    def num_heads(self) -> int:
        start, stop = self.heads
        return stop - start

    def heads_of(self, plane: Plane) -> tuple[int, int]:
        """Returns the heads [start, stop) of a plane, counted over the whole model, that are sent on this route.

        If several ranks of the source could send a head to this rank of the target, the first of them sends it.
        """
        if plane.num_heads in (0, self.source.num_kv_heads):
            return self.heads
        (first, last), (start, stop) = self.source.head_range_of(plane), self.target.head_range_of(plane)
        first, last = max(first, start), min(last, stop)
        return (first, last) if self._sends_first(plane, first) else (first, first)

    def _sends_first(self, plane: Plane, head: int) -> bool:
        """Whether this rank is the source's first one that has this head of a plane and a lane to the target's rank."""
        source, target = self.source, self.target
        if source.tp_size <= plane.num_heads:
            return True
        senders = {lane.source_rank for lane in lanes(source, target) if lane.target_rank == target.tp_rank}
        return source.tp_rank == min(rank for rank in senders if source.of_rank(rank).head_range_of(plane)[0] == head)

    def heads_in(self, layout: KVLayout, planes: Iterable[Plane]) -> list[slice]:
        """Returns the positions of these planes' heads in a pool of this layout."""
        found = []
        for plane in planes:
            (start, stop), (first, _) = self.heads_of(plane), layout.head_range_of(plane)
            found.append(slice(start - first, stop - first))
        return found

    @property
    def wire_dtype(self) -> str:
        """Returns the dtype of a payload: the narrowest of the two pools' dtypes and, if configured, int8.

        States are never sent as codes, because all later tokens depend on them.
        """
        is_coded = self.wants_int8 and not self.one_sided and not self.source.holds.is_state
        dtypes = [self.source.dtype, self.target.dtype, *(["int8"] if is_coded else [])]
        return min(dtypes, key=lambda dtype: CODE_BITS.get(dtype, 8 * DTYPE_NBYTES[dtype]))  # of equal ones, the first

    @property
    def precision(self) -> str:
        """Returns "" if the target gets exactly the values that it would compute itself.

        Otherwise returns the losses: the dtype that limits the precision, and COLD if the target's draft head gets no
        KV of the prompt.
        """
        source, target, losses = self.source, self.target, list[str]()
        if self.wire_dtype not in (source.dtype, target.dtype):
            losses.append(self.wire_dtype)
        elif source.dtype != target.dtype:
            losses.append(source.dtype)
        if target.draft_head not in ("", source.draft_head):
            losses.append(COLD)
        return ", ".join(losses)

    def payload_nbytes(self, piece: KVPiece) -> int:
        if self.is_verbatim:
            return len(piece.block_ids) * self.source.layers_nbytes(piece.first_layer, piece.stop_layer)
        parts = self.source.parts_of(piece)
        return piece.num_tokens * sum(part.num_layers * self._token_nbytes(planes) for planes, part in parts)

    def _token_nbytes(self, planes: Sequence[Plane]) -> int:
        """Counts the bytes of a token in a layer with these planes."""
        if not any(plane.num_heads for plane in planes):
            return self.num_heads * vectors_nbytes(planes, self.wire_dtype)
        heads = [self.heads_of(plane) for plane in planes]
        nbytes = [vectors_nbytes((plane,), self.wire_dtype) for plane in planes]
        return sum((stop - start) * each for (start, stop), each in zip(heads, nbytes, strict=True))
