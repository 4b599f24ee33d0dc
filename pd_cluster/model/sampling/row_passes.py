"""Passes over whole rows of logits: the best token, the k best, the total mass, the number of better tokens.

The time of this part of sampling grows with the vocabulary; the rest is small and runs on the host. On the CPU this
part uses numpy, whose vectorised partition and argmax are much faster than torch's; on other devices it uses torch. A
row's result does not depend on other rows. Does not use requests or sampling parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pd_cluster.devices.device import has_triton

Floats: TypeAlias = NDArray[np.floating[Any]]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

BLOCK_SIZE = 128  # tokens whose masses are added up in float32; a draw searches within one block
LARGEST = torch.finfo(torch.float32).max
LEADING_BLOCK_SIZE = 32  # tokens of a block; a search for the best tokens first compares the best of each block


def on_host(logits: Tensor) -> bool:
    """Whether numpy can read the logits without copying them."""
    return logits.is_cpu


def rows_of(logits: Tensor, at: Ints) -> Tensor:
    """Returns the rows `at`, without a copy if these are all rows in order."""
    if len(at) == len(logits) and (at == np.arange(len(at))).all():
        return logits
    return copy_of_rows(logits, at)


def copy_of_rows(logits: Tensor, at: Ints) -> Tensor:
    return logits.index_select(0, torch.from_numpy(at).to(logits.device))


def peaks(logits: Tensor, fallback: Callable[[int], int] = lambda row: 0) -> tuple[Ints, Floats]:
    """Returns each row's most likely token, the lowest id of equal ones, and its logit; both [num_rows].

    Repairs irregular logits in place: NaN becomes -inf, +inf the largest float32, and in a row without candidates only
    the `fallback` token is allowed. So every returned logit is finite.
    """
    token_ids, best = _argmax(logits)
    for row in np.flatnonzero(~np.isfinite(best)).tolist():
        logits[row].nan_to_num_(nan=-math.inf, posinf=LARGEST, neginf=-math.inf)
        if logits[row].max().item() == -math.inf:
            logits[row, fallback(row)] = 0.0
        token_ids[row : row + 1], best[row : row + 1] = _argmax(logits[row : row + 1])
    return token_ids, best


def best_on_device(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's most likely token, int64, and its logit, float32; [num_rows], on the device, without waiting.

    The rules are those of `peaks`: the lowest id of equal tokens, NaN counts as -inf, +inf as the largest float32, and
    a row without candidates gives token 0.
    """
    if logits.is_cuda and has_triton():
        from pd_cluster.model.kernels.cuda.sampling.argmax import argmax_rows  # Triton may be missing

        found = argmax_rows(logits)
        return found.token_ids, found.logits
    table = mended(logits)
    token_ids = table.argmax(-1)
    return token_ids, table.gather(1, token_ids[:, None])[:, 0]


def mended(logits: Tensor) -> Tensor:
    """Returns a float32 copy with -inf instead of NaN, and the largest float32 instead of +inf."""
    return logits.float().nan_to_num(nan=-math.inf, posinf=LARGEST, neginf=-math.inf)


def _argmax(logits: Tensor) -> tuple[Ints, Floats]:
    if not on_host(logits):
        if logits.is_cuda and has_triton():
            from pd_cluster.model.kernels.cuda.sampling.argmax import argmax_rows

            found = argmax_rows(logits)
            values = found.logits.masked_fill(found.irregular, math.nan)  # the caller itself repairs those rows
            return found.token_ids.cpu().numpy(), values.cpu().numpy()
        values, indices = logits.max(-1)
        return indices.cpu().numpy().copy(), values.cpu().numpy().copy()
    table = logits.numpy()
    token_ids = table.argmax(-1)
    return token_ids, table[np.arange(len(table)), token_ids]


def leading(logits: Tensor, k: int) -> tuple[Floats, Ints]:
    """Returns logits and ids of the k best tokens of each row, both [num_rows, k], unordered.

    If several tokens tie for place k, any of them may be included, so compare values; see `_top` in row_logprobs.py.
    """
    num_rows, vocab_size = logits.shape
    if not on_host(logits):
        best = logits.topk(k, sorted=False)
        return best.values.cpu().numpy(), best.indices.cpu().numpy()
    table = logits.numpy()
    if k == vocab_size:
        return table, np.broadcast_to(np.arange(k), table.shape)
    num_blocks = vocab_size // LEADING_BLOCK_SIZE
    if vocab_size % LEADING_BLOCK_SIZE or num_blocks < 2 * k:
        return _partition(table, k)
    # The k blocks with the best maxima contain k tokens that are at least as good as any token of another block.
    blocks = logits.view(num_rows, num_blocks, LEADING_BLOCK_SIZE)
    _, chosen = _partition(blocks.amax(-1).numpy(), k)  # [num_rows, k]
    found = blocks.numpy()[np.arange(num_rows)[:, None], chosen].reshape(num_rows, -1)
    values, at = _partition(found, k)
    block, offset = np.divmod(at, LEADING_BLOCK_SIZE)
    return values, np.take_along_axis(chosen, block, 1) * LEADING_BLOCK_SIZE + offset


def _partition(table: Floats, k: int) -> tuple[Floats, Ints]:
    """Returns values and columns of the k largest of each row, unordered."""
    columns = table.argpartition(table.shape[1] - k, axis=1)[:, -k:]
    return np.take_along_axis(table, columns, 1), columns


def at_least(logits: Tensor, row: int, value: float) -> tuple[Floats, Ints]:
    """Returns logits and ids, ascending, of all tokens of one row whose logit is at least `value`; both [num_found]."""
    line = logits[row].cpu().numpy()
    token_ids = np.flatnonzero(line >= value)
    return line[token_ids], token_ids


def num_better(logits: Tensor, values: Floats) -> list[int]:
    """Returns how many tokens of each row have a logit strictly above the row's value."""
    if not on_host(logits):
        above = logits > torch.from_numpy(values).to(logits.device)[:, None]
        return [int(count) for count in above.sum(-1).tolist()]
    return [int(np.count_nonzero(line > value)) for line, value in zip(logits.numpy(), values, strict=True)]


def log_totals(logits: Tensor, best: Floats) -> Floats:
    """Returns the log of the sum of exp(logit) of each row; `best`: the rows' maxima; [num_rows] float64."""
    _, sums = masses(logits, best, np.ones(len(best)), np.full(len(best), -np.inf))
    totals: Floats = best + np.log(sums.sum(1))
    return totals


def masses(logits: Tensor, best: Floats, inverse_temperature: Floats, floor: Floats) -> tuple[Tensor, Floats]:
    """Returns exp((logit - best) / temperature), float32, by blocks [num_rows, num_blocks, BLOCK_SIZE], and block sums.

    Tokens below `floor` get the weight zero. Uses base 2, because torch's exp is slow for denormal results.
    """

    def column(numbers: Floats) -> Tensor:
        return torch.as_tensor(numbers[:, None], dtype=torch.float32, device=logits.device)

    is_limited = bool(np.isfinite(floor).any())
    factor = column(inverse_temperature * math.log2(math.e))
    weights = weights_of(logits, column(best), factor, column(floor) if is_limited else None)
    return weights, weights.sum(-1).cpu().numpy().astype(np.float64)


def weights_of(logits: Tensor, best: Tensor, factor: Tensor | float, floor: Tensor | None = None) -> Tensor:
    """Returns 2 ** ((logit - best) * factor), by blocks [num_rows, num_blocks, BLOCK_SIZE], on the logits' device.

    `best`, `factor` and `floor` are float32, [num_rows, 1]. Tokens below `floor` get the weight zero.
    """
    scaled = logits - best
    scaled *= factor
    if floor is not None:
        scaled.masked_fill_(logits < floor, -math.inf)
    if missing := -logits.shape[1] % BLOCK_SIZE:
        scaled = torch.nn.functional.pad(scaled, (0, missing), value=-math.inf)
    return scaled.exp2_().view(len(logits), -1, BLOCK_SIZE)
