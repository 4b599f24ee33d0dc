"""The shape of a KV cache block, and when two pools can exchange blocks.

Knows nothing of tensors: sizes are integers, dtypes are names.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from pd_cluster.config import MAX_BLOCK_SIZE
from pd_cluster.errors import LinkError
from pd_cluster.wire import KVPiece, LayoutInfo

DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
SCALE_NBYTES = 4  # one float32 a vector of int8


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One rank's share of a block: [num_layers, 2, block_size, local_kv_heads, head_dim], contiguous.

    num_kv_heads counts the whole model. Heads are split evenly over tp_size ranks; with more ranks than heads
    each head is replicated on tp_size / num_kv_heads ranks.
    """

    num_layers: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    block_size: int  # tokens
    dtype: str
    tp_size: int = 1
    tp_rank: int = 0

    @property
    def head_range(self) -> tuple[int, int]:
        """Global KV heads [start, stop) on this rank."""
        if self.tp_size <= self.num_kv_heads:
            per_rank = self.num_kv_heads // self.tp_size
            return self.tp_rank * per_rank, (self.tp_rank + 1) * per_rank
        head = self.tp_rank * self.num_kv_heads // self.tp_size
        return head, head + 1

    @property
    def local_kv_heads(self) -> int:
        start, stop = self.head_range
        return stop - start

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token, all layers, on this rank."""
        return self.num_layers * self.local_kv_heads * (self.k_head_dim + self.v_head_dim) * DTYPE_NBYTES[self.dtype]

    @property
    def block_nbytes(self) -> int:
        return self.token_nbytes * self.block_size

    @property
    def hash(self) -> str:
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def to_info(self) -> LayoutInfo:
        return LayoutInfo(**asdict(self))

    @classmethod
    def from_info(cls, info: LayoutInfo) -> KVLayout:
        return cls(**{name: getattr(info, name) for name in info.__struct_fields__})


def check_pair(source: KVLayout, target: KVLayout) -> None:
    """Whether KV cache of `source` can land in `target`; raises LinkError(retry=False) naming the field.

    Block size and dtype may differ (see pack.py). Unequal tensor parallel sizes are refused in this version.
    """
    for name in ("num_layers", "num_kv_heads", "k_head_dim", "v_head_dim", "tp_size"):
        theirs, ours = getattr(source, name), getattr(target, name)
        if theirs != ours:
            raise LinkError(
                f"KV layout differs: {name} is {theirs} on the prefill instance and {ours} on the decode instance; "
                f"start both with the same model and --tensor-parallel-size"
            )
    for layout in (source, target):
        is_rank = 0 <= layout.tp_rank < layout.tp_size
        if layout.dtype not in DTYPE_NBYTES or not 1 <= layout.block_size <= MAX_BLOCK_SIZE or not is_rank:
            raise LinkError(
                f"KV layout makes no sense: blocks of {layout.block_size} tokens of {layout.dtype!r}, rank "
                f"{layout.tp_rank} of {layout.tp_size}"
            )


@dataclass(frozen=True, slots=True)
class Route:
    """From one pool into another: what a payload is made of, and what that costs in precision.

    `one_sided`: the receiver reads the sender's pool itself, so nothing is gained by a smaller payload.
    """

    source: KVLayout
    target: KVLayout
    wants_int8: bool = False
    one_sided: bool = False

    @property
    def is_verbatim(self) -> bool:
        """Payloads are the blocks' own bytes."""
        same = (self.source.block_size, self.source.dtype) == (self.target.block_size, self.target.dtype)
        return same and not self.is_int8

    @property
    def is_int8(self) -> bool:
        return self.wants_int8 and not self.one_sided

    @property
    def wire_dtype(self) -> str:
        """Of a payload's numbers: int8, or the narrower of the two pools' dtypes."""
        if self.is_int8:
            return "int8"
        source, target = self.source.dtype, self.target.dtype
        return target if DTYPE_NBYTES[target] < DTYPE_NBYTES[source] else source

    @property
    def precision(self) -> str:
        """ "" when the target holds just what it would have computed itself; else what else it was on its way."""
        if self.is_int8:
            return "int8"
        return "" if self.source.dtype == self.target.dtype else self.source.dtype

    def payload_nbytes(self, piece: KVPiece) -> int:
        if self.is_verbatim:
            return len(piece.block_ids) * self.source.block_nbytes * piece.num_layers // self.source.num_layers
        num_vectors = piece.num_layers * 2 * piece.num_tokens * self.source.local_kv_heads
        if self.is_int8:
            return num_vectors * (self.source.k_head_dim + SCALE_NBYTES)
        return num_vectors * self.source.k_head_dim * DTYPE_NBYTES[self.wire_dtype]
