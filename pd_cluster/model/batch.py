"""One step's input to the model, as tensors. Knows nothing of why these tokens were chosen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pd_cluster.kv.pool import KVPool
from pd_cluster.types import Request


@dataclass(slots=True)
class ForwardBatch:
    """All sequences of a step, flattened: sequence i owns rows [query_starts[i], query_starts[i+1])."""

    input_ids: torch.Tensor  # [1, num_tokens] int64
    positions: torch.Tensor  # [1, num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64: block * block_size + offset
    query_lens: list[int]
    context_lens: list[int]  # tokens in the pool once this step has written, per sequence
    block_tables: list[torch.Tensor]  # per sequence [num_blocks] int64
    sample_rows: torch.Tensor  # [num_samples] int64: rows whose logits are wanted
    pool: KVPool
    masks: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    num_layer_writes: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)


def build_batch(chunks: list[tuple[Request, int]], pool: KVPool) -> ForwardBatch:
    """Tokens [num_computed, num_computed + n) of every (request, n); a request that catches up is sampled."""
    block_size = pool.layout.block_size
    input_ids: list[int] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    tables: list[torch.Tensor] = []
    sample_rows: list[int] = []
    for request, num_tokens in chunks:
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        table = np.asarray(request.block_table[: -(-stop // block_size)])
        position = np.arange(start, stop)
        input_ids += request.token_ids(start, stop)
        positions.append(position)
        slots.append(table[position // block_size] * block_size + position % block_size)
        tables.append(torch.from_numpy(table))
        if num_tokens == request.num_behind:
            sample_rows.append(len(input_ids) - 1)
    return ForwardBatch(
        input_ids=torch.tensor([input_ids]),
        positions=torch.from_numpy(np.concatenate(positions))[None],
        slot_mapping=torch.from_numpy(np.concatenate(slots)),
        query_lens=[n for _, n in chunks],
        context_lens=[r.num_computed_tokens + n for r, n in chunks],
        block_tables=tables,
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        pool=pool,
    )
