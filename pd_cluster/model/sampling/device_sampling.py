"""Chooses the next tokens, greedy or drawn, and computes their logprobs, on the logits' device, without the host.

The arithmetic is the same as in logit_adjustments.py, token_draw.py and row_logprobs.py, so a sequence gets the same
tokens on device and host. A Triton kernel finds the tokens that a row keeps; without Triton, sorting finds them. Does
not deal with steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pd_cluster.devices.device import Device, has_triton
from pd_cluster.model.inputs.forward_batch import on_device
from pd_cluster.model.kernels.fixed_point import fixed_masses, share_of
from pd_cluster.model.sampling.logit_adjustments import (
    LogitEdit,
    adjustment_of,
    adjusts,
    change,
    edit_ahead,
    edit_arrays,
    limit,
)
from pd_cluster.model.sampling.row_logprobs import PendingLogprobs, counts_of, logprob_values
from pd_cluster.model.sampling.row_passes import BLOCK_SIZE, best_on_device, mended, weights_of
from pd_cluster.model.sampling.sampler import uniforms
from pd_cluster.model.sampling.token_draw import DrawParameters
from pd_cluster.types import Request

MAX_AT_ONCE = 4 << 20  # values: sorting and summing need about forty bytes for each
MAX_FOR_KERNEL = 5 * MAX_AT_ONCE  # the kernel of triton_draw needs eight


def can_choose(requests: Sequence[Request], device: Device) -> bool:
    """Whether the device can choose without the host. Draws use doubles, which NPUs compute slowly or not at all."""
    return device.traits.has_doubles or all(request.sampling.greedy for request in requests)


def choose(
    logits: Tensor,
    requests: Sequence[Request],
    last_ids: Tensor | None,
    eos_token_ids: frozenset[int],
    device: Device,
    unknown: Sequence[bool] | None = None,
) -> Tensor:
    """Returns token ids [num_rows] int64, on the device, for rows of logits [num_rows, vocab_size], one per request.

    `last_ids` [num_rows] int64, on the device: the last token of each request's output, if the host does not have it
    yet; None if the host has all of them. `unknown`: which rows' tokens the host lacks; None: all rows are alike.
    """
    if last_ids is None or unknown is None:
        unknown = [last_ids is not None] * len(requests)
    positions = [len(r.output_token_ids) + n for r, n in zip(requests, unknown, strict=True)]
    token_ids, best = best_on_device(logits)
    adjusted = [i for i, r in enumerate(requests) if adjusts(r.sampling, positions[i])]
    apart = frozenset(adjusted)
    as_they_are = [i for i in range(len(requests)) if i not in apart] if apart else range(len(requests))
    token_ids = _drawn(logits, (token_ids, best), requests, positions, as_they_are, device)
    for is_unknown in (False, True):
        alike = [i for i in adjusted if unknown[i] == is_unknown]
        for at in few_at_once(alike, logits.shape[1]):
            own = [requests[i] for i in at]
            there = on_device(_changes(own, at, is_unknown, logits.shape[1], eos_token_ids), device)
            table, chosen, best = _adjusted(logits, token_ids, last_ids if is_unknown else None, there)
            chosen = _drawn(table, (chosen, best), own, [positions[i] for i in at], range(len(own)), device)
            token_ids = token_ids.index_copy(0, there["at"], chosen)
    return token_ids


def tell(logits: Tensor, token_ids: Tensor, requests: Sequence[Request], device: Device) -> PendingLogprobs | None:
    """Starts computing the logprobs of the tokens [num_rows] whose requests want them; None if there are none."""
    rows = [i for i, request in enumerate(requests) if request.sampling.logprobs is not None]
    if not rows:
        return None
    vocab_size = logits.shape[1]
    nums = counts_of([requests[i].sampling.logprobs or 0 for i in rows], vocab_size)
    given = {"rows": np.array(rows, dtype=np.int64), "nums": np.array(nums, dtype=np.int64)}
    named = [requests[i].sampling.logprob_token_ids for i in rows]
    if num_named := max(map(len, named)):
        given["named"] = np.array([[*ids, *[0] * (num_named - len(ids))] for ids in named], dtype=np.int64)
    there = on_device(given, device)
    parts = []
    for few in few_at_once(list(range(len(rows))), vocab_size):
        part = slice(few[0], few[-1] + 1)
        at = there["rows"][part]
        own, chosen = logits.index_select(0, at), token_ids.index_select(0, at)
        asked = there["named"][part] if num_named else None
        parts.append(logprob_values(own, chosen, there["nums"][part], max(nums), asked))
    return PendingLogprobs(rows, nums, vocab_size, torch.cat(parts), named)


def few_at_once(at: list[int], vocab_size: int, most_numbers: int = MAX_AT_ONCE) -> list[list[int]]:
    """Splits rows into groups small enough to be processed together."""
    most = max(1, most_numbers // vocab_size)
    return [at[start : start + most] for start in range(0, len(at), most)]


def _changes(
    requests: Sequence[Request], at: list[int], is_unknown: bool, vocab_size: int, eos_token_ids: frozenset[int]
) -> dict[str, NDArray[Any]]:
    """Returns the arrays of `edit_arrays` for the requests' edits, the rows' indexes, and a fallback id for each row.

    The fallback is the first of the allowed_token_ids, or -1 if there are none. `is_unknown`: the host does not have
    the last tokens.
    """
    edits = []
    for row, request in enumerate(requests):
        if is_unknown:
            edits.append(edit_ahead(row, request, vocab_size, eos_token_ids))
        else:
            adjustment = adjustment_of(request, vocab_size, eos_token_ids)
            edits.append(LogitEdit(row, adjustment, adjustment.banned(request, len(request.output_token_ids))))
    allowed = [edit.adjustment.allowed for edit in edits]
    spare = [int(ids[0]) if len(ids) else -1 for ids in allowed]
    return {
        "at": np.array(at, dtype=np.int64),
        "spare": np.array(spare, dtype=np.int64),
        **edit_arrays(edits, vocab_size),
    }


def _adjusted(
    logits: Tensor, token_ids: Tensor, last_ids: Tensor | None, there: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows with masks, biases and penalties applied, float32; each row's most likely token; and its logit.

    `token_ids`: the most likely tokens of all rows of logits. As on the host, a row without candidates gets the most
    likely of its allowed tokens, or of all tokens if there are none; a draw from such a row also returns that token.
    """
    at, spare = there["at"], there["spare"]
    table, fallback = mended(logits.index_select(0, at)), token_ids.index_select(0, at)
    limit(table, there)
    if "limited" in there:
        allowed, _ = best_on_device(table)
        allowed = torch.where(_at(table, allowed) > -math.inf, allowed, spare)
        fallback = torch.where(spare >= 0, allowed, fallback)
    change(table, there, None if last_ids is None else last_ids.index_select(0, at))
    found, best = best_on_device(table)
    is_left = _at(table, found) > -math.inf
    return table, torch.where(is_left, found, fallback), torch.where(is_left, best, 0.0)


def _at(table: Tensor, token_ids: Tensor) -> Tensor:
    """Returns one element from each row, [num_rows]."""
    return table.gather(1, token_ids[:, None])[:, 0]


def _drawn(
    logits: Tensor,
    likely: tuple[Tensor, Tensor],
    requests: Sequence[Request],
    positions: Sequence[int],
    among: Collection[int],
    device: Device,
) -> Tensor:
    """Returns the most likely tokens, but drawn tokens for the rows in `among` that are not greedy.

    `likely`: each row's most likely token, and its logit. `positions` [num_rows]: the tokens' positions in the outputs.
    """
    token_ids, best = likely
    drawn = [i for i in among if not requests[i].sampling.greedy]
    plain = [i for i in drawn if _is_plain(requests[i])]
    shaped = [i for i in drawn if not _is_plain(requests[i])]
    vocab_size = logits.shape[1]
    by_kernel = logits.is_cuda and has_triton()
    for at in [plain, *few_at_once(shaped, vocab_size, MAX_FOR_KERNEL if by_kernel else MAX_AT_ONCE)]:
        if not at:
            continue
        rows, knobs = _knobs([requests[i] for i in at], at, [positions[i] for i in at], vocab_size, device)
        if at is plain:
            found = draw_plain(logits[rows], best[rows], token_ids[rows], knobs)
        elif by_kernel:
            from pd_cluster.model.kernels.cuda.sampling.triton_draw import draw_rows  # Triton may be missing

            found = draw_rows(logits, rows, best, token_ids, knobs).token_ids
        else:
            found = draw_shaped(logits[rows], best[rows], token_ids[rows], knobs)
        token_ids = token_ids.index_copy(0, rows, found)
    return token_ids


def _is_plain(request: Request) -> bool:
    """Whether only temperature and min_p shape the request's draws."""
    return request.sampling.top_k <= 0 and request.sampling.top_p >= 1.0


def _knobs(
    requests: list[Request], at: list[int], positions: list[int], vocab_size: int, device: Device
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the rows' indexes, and for these rows each field of `DrawParameters`, on the device."""
    params = [request.sampling for request in requests]
    draws = uniforms([p.seed for p in params], [request.index for request in requests], positions)
    knobs = DrawParameters.of(params, draws, vocab_size)
    names = ("inverse_temperature", "top_k", "top_p", "log_min_p", "uniform")
    there = on_device({"at": np.array(at, dtype=np.int64), **{name: getattr(knobs, name) for name in names}}, device)
    return there.pop("at"), there


def draw_plain(logits: Tensor, best: Tensor, best_ids: Tensor, knobs: dict[str, Tensor]) -> Tensor:
    """Returns token ids [num_rows] int64 for logits [num_rows, vocab_size] with maxima `best` [num_rows] float32.

    A row without candidates gets its `best_ids`.
    """
    chosen, total = _draw_above(mended(logits), best, _floor(best, knobs), knobs)
    return torch.where(total > 0.0, chosen, best_ids)


def draw_shaped(logits: Tensor, best: Tensor, best_ids: Tensor, knobs: dict[str, Tensor]) -> Tensor:
    """Draws like `draw_plain`, but with top_k or top_p."""
    table, floor = mended(logits), _floor(best, knobs)
    top_p, factor = knobs["top_p"], knobs["inverse_temperature"]
    ranked, order = table.sort(dim=1, descending=True, stable=True)  # of equal logits the lowest id first
    limit = torch.minimum((ranked >= floor[:, None]).sum(1), knobs["top_k"]).clamp_(min=1)
    cumulative = fixed_masses(ranked, best, factor).cumsum(1)
    target = share_of(top_p, cumulative.gather(1, limit[:, None] - 1)[:, 0])
    nucleus = 1 + (cumulative < target[:, None]).sum(1)
    num_kept = torch.where(top_p >= 1.0, limit, torch.minimum(limit, nucleus))
    in_rank = torch.arange(table.shape[1], device=table.device) < num_kept[:, None]
    kept = torch.zeros_like(in_rank).scatter_(1, order, in_rank)
    cumulative = torch.where(kept, fixed_masses(table, best, factor), 0).cumsum(1)
    total = cumulative[:, -1]
    target = torch.minimum(share_of(knobs["uniform"], total), total - 1)
    chosen = (cumulative <= target[:, None]).sum(1).clamp_(max=table.shape[1] - 1)
    return torch.where(total > 0, chosen, best_ids)


def _floor(best: Tensor, knobs: dict[str, Tensor]) -> Tensor:
    """Returns the smallest float32 logit that min_p keeps, [num_rows]."""
    exact = best.double() + knobs["log_min_p"] / knobs["inverse_temperature"]
    rounded = exact.float()
    up = torch.nextafter(rounded, torch.full_like(rounded, math.inf))
    return torch.where(rounded.double() < exact, up, rounded)


def _draw_above(table: Tensor, best: Tensor, floor: Tensor, knobs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Draws from all tokens whose logit is at least `floor`.

    Returns token ids and the total mass of the tokens drawn from, both [num_rows].
    """
    factor = (knobs["inverse_temperature"] * math.log2(math.e)).float()
    weights = weights_of(table, best[:, None], factor[:, None], floor[:, None])
    cumulative = weights.sum(-1).double().cumsum(1)  # [num_rows, num_blocks]
    total = cumulative[:, -1]
    target = knobs["uniform"] * total
    block = (cumulative <= target[:, None]).sum(1).clamp_(max=cumulative.shape[1] - 1)
    inside = weights[torch.arange(len(table), device=table.device), block].double().cumsum(1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    target = torch.minimum(target - before, torch.nextafter(inside[:, -1], torch.zeros_like(total)))
    return block * BLOCK_SIZE + (inside <= target[:, None]).sum(1), total
