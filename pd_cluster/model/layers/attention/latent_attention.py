"""Latent attention (MLA) over the paged pool, in absorbed form: the keys and values of heads are never computed.

A head's key is W_k times a latent, followed by the rotated part that all heads share; its value is W_v times the
latent. Instead, the query times W_k is compared with the latents directly, and W_v is applied to their weighted sum.
This is done for each sequence, with scores and sums in float32. In models that keep transformers' modules,
`LatentCache` replaces their cache and writes the latents, and `attend_latents` replaces their attention.
"""

from __future__ import annotations

import torch

from pd_cluster.kv.kv_vectors import decode, encode, write_kv
from pd_cluster.model.inputs.forward_batch import ForwardBatch

MOST_SCORES = 1 << 24  # computed at once: 64 MiB of float32


class UpProjection(torch.nn.Module):
    """The weights of `kv_b_proj`, split into keys [num_heads, width, C] and values [num_heads, C, value_width].

    As a module it computes the plain projection of latents. transformers' modules use that in the proof at load, when
    they have no cache.
    """

    def __init__(self, weight: torch.Tensor, widths: tuple[int, int]) -> None:
        """`weight` [num_heads * sum(widths), C]: for each head the rows for keys, then the rows for values."""
        super().__init__()
        apart = weight.detach().view(-1, sum(widths), weight.shape[1])
        self.keys = apart[:, : widths[0]].contiguous()
        self.values = apart[:, widths[0] :].transpose(1, 2).contiguous()
        self.is_absorbed = False  # True while `attend_latents` does the work

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        if self.is_absorbed:
            num_heads, width = self.keys.shape[0], self.keys.shape[1] + self.values.shape[2]
            return latents.new_zeros(*latents.shape[:-1], num_heads * width)
        weight = torch.cat((self.keys, self.values.transpose(1, 2)), dim=1)
        return torch.nn.functional.linear(latents, weight.flatten(0, 1))


class LatentCache:
    """Replaces transformers' cache in a step; has the methods that transformers' modules and masks call."""

    is_compileable = False

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self,
        latent: torch.Tensor,  # [1, 1, num_tokens, C]
        rope: torch.Tensor,  # [1, 1, num_tokens, Dr]
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a step's latents to the pool. Returns only the first one, because the module expands all latents that
        it receives.
        """
        write_latents(layer_idx, latent[0].transpose(0, 1), rope[0].transpose(0, 1), self._batch)
        return latent[:, :, :1], rope[:, :, :1]


def write_latents(layer_idx: int, latent: torch.Tensor, rope: torch.Tensor, batch: ForwardBatch) -> None:
    """Writes the latents [num_tokens, 1, C] and rotated parts [num_tokens, 1, Dr] of a step's tokens to the pool."""
    dtype = batch.pool.layout.dtype
    write_kv(encode(latent, dtype), encode(rope, dtype), *batch.pool.layer(layer_idx), batch.slot_mapping)
    batch.layer_written(layer_idx, None)


def attend_latents(
    layer_idx: int,
    to_keys: torch.Tensor,  # [num_heads, Dn, C]
    to_values: torch.Tensor,  # [num_heads, C, Dv]
    queries: torch.Tensor,  # [num_heads, num_tokens, Dn + Dr]
    batch: ForwardBatch,
    scaling: float,
) -> torch.Tensor:
    """Attends to the latents of each sequence in the pool: to all, or to the ones that `batch.chosen` selects.

    Returns [num_tokens, num_heads, Dv].
    """
    layout = batch.pool.layout
    planes = batch.pool.layer(layer_idx)
    num_heads, num_tokens, _ = queries.shape
    output = queries.new_zeros(num_tokens, num_heads, to_values.shape[2])
    query_starts, table_starts = batch.query_starts.tolist(), batch.table_starts.tolist()
    to_keys, to_values = to_keys.float(), to_values.float()
    for i, context_len in enumerate(batch.context_lens.tolist()):
        first, stop = query_starts[i : i + 2]
        if context_len == 0:  # padding
            continue
        table = batch.block_table[table_starts[i] : table_starts[i + 1]]
        latents, ropes = (  # each [context_len, …]
            decode(plane.index_select(0, table).flatten(0, 1)[:context_len, 0], layout.dtype).float()
            for plane in planes
        )
        most_rows = max(1, MOST_SCORES // (num_heads * context_len))
        behind = context_len - stop  # row r of the step sees behind + r + 1 keys
        dense = stop if batch.chosen is None else min(stop, max(first, batch.chosen.shape[1] - behind))
        for row in range(first, dense, most_rows):
            rows = slice(row, min(row + most_rows, dense))
            num_seen = behind + rows.stop  # the number of keys visible to the last of these rows
            absorbed = _absorbed(queries[:, rows].float(), to_keys)
            weighted = weigh_latents(*absorbed, latents[:num_seen], ropes[:num_seen], scaling)
            output[rows] = torch.bmm(weighted, to_values).transpose(0, 1).to(output.dtype)
        for row in range(dense, stop):
            assert batch.chosen is not None
            seen = batch.chosen[row].long()
            absorbed = _absorbed(queries[:, row : row + 1].float(), to_keys)
            weighted = weigh_latents(*absorbed, latents[seen], ropes[seen], scaling)
            output[row] = torch.bmm(weighted, to_values)[:, 0].to(output.dtype)
    return output


def workspace_nbytes(max_model_len: int, width: int) -> int:
    """Returns the bytes of a step over a long context: for scores, and for `width` values per token, held twice."""
    return 3 * 4 * MOST_SCORES + max_model_len * width * 8


def _absorbed(queries: torch.Tensor, to_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps [num_heads, num_rows, Dn + Dr] to latent queries [num_heads, num_rows, C] and the rotated part."""
    width = to_keys.shape[1]
    return torch.bmm(queries[:, :, :width], to_keys), queries[:, :, width:]


def weigh_latents(
    absorbed: torch.Tensor,  # [num_heads, num_rows, C]: queries at the last positions of the keys
    rotated: torch.Tensor,  # [num_heads, num_rows, Dr]
    latents: torch.Tensor,  # [num_keys, C]
    ropes: torch.Tensor,  # [num_keys, Dr]
    scaling: float,
) -> torch.Tensor:
    """Returns the weighted sums of latents, [num_heads, num_rows, C]; everything is float32."""
    num_heads, num_rows, _ = absorbed.shape
    num_keys = len(latents)
    scores = absorbed.flatten(0, 1) @ latents.T  # [num_heads * num_rows, num_keys]
    scores = torch.addmm(scores, rotated.flatten(0, 1), ropes.T).mul_(scaling).view(num_heads, num_rows, num_keys)
    if num_rows > 1:
        at = torch.arange(num_keys, device=scores.device)
        scores.masked_fill_(at > at[num_keys - num_rows :, None], float("-inf"))
    return (scores.softmax(-1).flatten(0, 1) @ latents).view(num_heads, num_rows, -1)
