"""The next tokens, chosen on the device that has the logits, without the host: greedy ones and drawn ones.

The arithmetic is that of `draw`, so that a sequence gets the same tokens whichever of the two chooses. What is kept of
a row is found by sorting it, which needs no decision of the host. Knows nothing of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pd_cluster.device import Device
from pd_cluster.model.batch import on_device
from pd_cluster.model.draw import FEW, MARGIN, Knobs
from pd_cluster.model.passes import BLOCK_SIZE, best_there
from pd_cluster.model.sampler import uniforms
from pd_cluster.types import Request

LARGEST = torch.finfo(torch.float32).max
MAX_SORTED = 4 << 20  # numbers at once: sorting and summing takes some forty bytes for each


def can_choose(requests: Sequence[Request], device: Device) -> bool:
    """Whether the host is not needed. Draws take numbers in double, which NPUs compute slowly if at all."""
    return device.kind != "npu" or all(request.sampling.greedy for request in requests)


def choose(logits: Tensor, requests: Sequence[Request], num_unknown: int, device: Device) -> Tensor:
    """Token ids [num_rows] int64, on the device, of rows of logits [num_rows, vocab_size], one for each request.

    `num_unknown`: output tokens of each request before this one that the host has not seen yet.
    """
    token_ids, best = best_there(logits)
    drawn = [i for i, request in enumerate(requests) if not request.sampling.greedy]
    plain = [i for i in drawn if _is_plain(requests[i])]
    shaped = [i for i in drawn if not _is_plain(requests[i])]
    most = max(1, MAX_SORTED // logits.shape[1])
    parts = [plain, *(shaped[start : start + most] for start in range(0, len(shaped), most))]
    for at in parts:
        if at:
            rows, knobs = _knobs([requests[i] for i in at], at, num_unknown, logits.shape[1], device)
            draw = draw_plain if at is plain else draw_shaped
            token_ids = token_ids.index_copy(0, rows, draw(logits[rows], best[rows], token_ids[rows], knobs))
    return token_ids


def _is_plain(request: Request) -> bool:
    """Only a temperature and min_p shape its draws."""
    return request.sampling.top_k <= 0 and request.sampling.top_p >= 1.0


def _knobs(
    requests: list[Request], at: list[int], num_unknown: int, vocab_size: int, device: Device
) -> tuple[Tensor, dict[str, Tensor]]:
    """The rows, and each field of `Knobs` for them, on the device."""
    params = [request.sampling for request in requests]
    positions = [len(request.output_token_ids) + num_unknown for request in requests]
    draws = uniforms([p.seed for p in params], [request.index for request in requests], positions)
    knobs = Knobs.of(params, draws, vocab_size)
    names = ("inverse_temperature", "top_k", "top_p", "log_min_p", "uniform")
    there = on_device({"at": np.array(at, dtype=np.int64), **{name: getattr(knobs, name) for name in names}}, device)
    return there.pop("at"), there


def draw_plain(logits: Tensor, best: Tensor, best_ids: Tensor, knobs: dict[str, Tensor]) -> Tensor:
    """Token ids [num_rows] int64 for logits [num_rows, vocab_size] whose largest ones are `best` [num_rows] float32.

    A row in which nothing is left gets its `best_ids`.
    """
    chosen, total = _draw_above(_mended(logits), best, _floor(best, knobs), knobs)
    return torch.where(total > 0.0, chosen, best_ids)


def draw_shaped(logits: Tensor, best: Tensor, best_ids: Tensor, knobs: dict[str, Tensor]) -> Tensor:
    """The same where top_k or top_p limit what is kept."""
    table, floor = _mended(logits), _floor(best, knobs)
    vocab_size = table.shape[1]
    top_k, top_p = knobs["top_k"], knobs["top_p"]
    ranked, order = table.sort(dim=1, descending=True, stable=True)  # of equal ones the lowest id first
    unlimited = top_k == vocab_size
    limit = torch.minimum((ranked >= floor[:, None]).sum(1), top_k).clamp_(min=1)
    cumulative = _weights(ranked, best, knobs).cumsum(1)
    _, mass = _draw_above(table, best, floor, knobs)
    total = torch.where(unlimited & (mass > 0.0), mass, cumulative.gather(1, limit[:, None] - 1)[:, 0])
    nucleus = 1 + (cumulative < (top_p * total)[:, None]).sum(1)
    num_kept = torch.where(top_p >= 1.0, limit, torch.minimum(limit, nucleus))
    in_rank = torch.arange(vocab_size, device=table.device) < num_kept[:, None]
    kept = torch.zeros_like(in_rank).scatter_(1, order, in_rank)
    threshold = ranked.gather(1, num_kept[:, None] - 1)[:, 0]

    exact = torch.where(kept, _weights(table, best, knobs), 0.0).cumsum(1)
    from_few = (exact <= (knobs["uniform"] * exact[:, -1])[:, None]).sum(1).clamp_(max=vocab_size - 1)
    from_many, _ = _draw_above(table.masked_fill(~kept, -math.inf), best, threshold, knobs)
    num_seen = min(FEW + MARGIN, vocab_size)
    is_few = unlimited | (top_k <= FEW)
    if num_seen < vocab_size:
        is_few &= (num_kept < num_seen) & (threshold > ranked[:, num_seen - 1])
    return torch.where(exact[:, -1] > 0.0, torch.where(is_few, from_few, from_many), best_ids)


def _mended(logits: Tensor) -> Tensor:
    return logits.float().nan_to_num(nan=-math.inf, posinf=LARGEST, neginf=-math.inf)


def _weights(table: Tensor, best: Tensor, knobs: dict[str, Tensor]) -> Tensor:
    """exp((logit - best) / temperature) in double."""
    return ((table.double() - best.double()[:, None]) * knobs["inverse_temperature"][:, None]).exp()


def _floor(best: Tensor, knobs: dict[str, Tensor]) -> Tensor:
    """The least float32 logit that min_p leaves, [num_rows]."""
    exact = best.double() + knobs["log_min_p"] / knobs["inverse_temperature"]
    rounded = exact.float()
    up = torch.nextafter(rounded, torch.full_like(rounded, math.inf))
    return torch.where(rounded.double() < exact, up, rounded)


def _draw_above(table: Tensor, best: Tensor, floor: Tensor, knobs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids, of all tokens with at least the logit `floor`, and the mass of those; both [num_rows]."""
    scaled = table - best[:, None]
    scaled *= (knobs["inverse_temperature"] * math.log2(math.e)).float()[:, None]
    scaled.masked_fill_(table < floor[:, None], -math.inf)
    if missing := -table.shape[1] % BLOCK_SIZE:
        scaled = torch.nn.functional.pad(scaled, (0, missing), value=-math.inf)
    weights = scaled.exp2_().view(len(table), -1, BLOCK_SIZE)
    cumulative = weights.sum(-1).double().cumsum(1)  # [num_rows, num_blocks]
    total = cumulative[:, -1]
    target = knobs["uniform"] * total
    block = (cumulative <= target[:, None]).sum(1).clamp_(max=cumulative.shape[1] - 1)
    inside = weights[torch.arange(len(table), device=table.device), block].double().cumsum(1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    target = torch.minimum(target - before, torch.nextafter(inside[:, -1], torch.zeros_like(total)))
    return block * BLOCK_SIZE + (inside <= target[:, None]).sum(1), total
