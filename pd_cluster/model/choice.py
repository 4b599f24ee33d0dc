"""The next tokens, chosen on the device that has the logits, without the host: greedy ones, and plain draws.

A plain draw is shaped by a temperature and min_p only. Its arithmetic is that of `draw`, so that a sequence gets the
same tokens whichever of the two chooses. Knows nothing of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pd_cluster.device import Device
from pd_cluster.model.batch import on_device
from pd_cluster.model.draw import Knobs
from pd_cluster.model.passes import BLOCK_SIZE, best_there
from pd_cluster.model.sampler import uniforms
from pd_cluster.types import Request, SamplingParams

LARGEST = torch.finfo(torch.float32).max


def is_plain_draw(params: SamplingParams) -> bool:
    return not params.greedy and params.top_k <= 0 and params.top_p >= 1.0


def choose(logits: Tensor, requests: Sequence[Request], num_unknown: int, device: Device) -> Tensor:
    """Token ids [num_rows] int64, on the device, of rows of logits [num_rows, vocab_size], one for each request.

    `num_unknown`: output tokens of each request before this one that the host has not seen yet.
    """
    token_ids, best = best_there(logits)
    at = [i for i, request in enumerate(requests) if not request.sampling.greedy]
    if not at:
        return token_ids
    drawn = [requests[i] for i in at]
    params = [request.sampling for request in drawn]
    positions = [len(request.output_token_ids) + num_unknown for request in drawn]
    draws = uniforms([p.seed for p in params], [request.index for request in drawn], positions)
    knobs = Knobs.of(params, draws, logits.shape[1])
    numbers = on_device(
        {
            "at": np.array(at, dtype=np.int64),
            "inverse_temperature": knobs.inverse_temperature,
            "log_min_p": knobs.log_min_p,
            "uniform": knobs.uniform,
        },
        device,
    )
    rows = numbers.pop("at")
    return token_ids.index_copy(0, rows, draw_plain(logits[rows], best[rows], token_ids[rows], **numbers))


def draw_plain(
    logits: Tensor,  # [num_rows, vocab_size]
    best: Tensor,  # [num_rows] float32: the largest of each row
    best_ids: Tensor,  # [num_rows] int64
    inverse_temperature: Tensor,  # [num_rows] float64, as the others
    log_min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Token ids [num_rows] int64. A row in which nothing is left gets its `best_ids`."""
    table = logits.float().nan_to_num(nan=-math.inf, posinf=LARGEST, neginf=-math.inf)
    exact = best.double() + log_min_p / inverse_temperature
    floor = exact.float()
    up = torch.nextafter(floor, torch.full_like(floor, math.inf))
    floor = torch.where(floor.double() < exact, up, floor)
    scaled = table - best[:, None]
    scaled *= (inverse_temperature * math.log2(math.e)).float()[:, None]
    scaled.masked_fill_(table < floor[:, None], -math.inf)
    if missing := -logits.shape[1] % BLOCK_SIZE:
        scaled = torch.nn.functional.pad(scaled, (0, missing), value=-math.inf)
    weights = scaled.exp2_().view(len(logits), -1, BLOCK_SIZE)
    cumulative = weights.sum(-1).double().cumsum(1)  # [num_rows, num_blocks]
    total = cumulative[:, -1]
    target = uniform * total
    block = (cumulative <= target[:, None]).sum(1).clamp_(max=cumulative.shape[1] - 1)
    inside = weights[torch.arange(len(logits), device=logits.device), block].double().cumsum(1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    last = torch.nextafter(inside[:, -1], torch.zeros_like(total))
    target = torch.minimum(target - before, last)
    chosen = block * BLOCK_SIZE + (inside <= target[:, None]).sum(1)
    return torch.where(total > 0.0, chosen, best_ids)
