"""The shape of a KV cache block, and when two pools can exchange blocks.

Knows nothing of tensors: sizes are integers, dtypes are names.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from pd_cluster.errors import LinkError
from pd_cluster.wire import LayoutInfo

DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


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
    """Whether blocks of `source` can land in `target`; raises LinkError(retry=False) naming the field.

    Unequal TP, block size and dtype will go through one pack/unpack path; until that exists they are refused.
    """
    for name in ("num_layers", "num_kv_heads", "k_head_dim", "v_head_dim", "block_size", "dtype", "tp_size"):
        theirs, ours = getattr(source, name), getattr(target, name)
        if theirs != ours:
            raise LinkError(
                f"KV layout differs: {name} is {theirs} on the prefill instance and {ours} on the decode instance; "
                f"start both with the same model, --block-size, --dtype and --tensor-parallel-size"
            )
