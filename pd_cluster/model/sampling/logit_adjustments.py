"""Masks, biases and penalties of one sequence, and their application to rows of logits.

Order and meaning follow vLLM: allowed_token_ids, bad_words, min_tokens, logit_bias, then the repetition, frequency and
presence penalties. The repetition penalty considers prompt and output (Keskar et al. 2019), the other two only the
output. Token ids outside the vocabulary are ignored. Does not choose tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pd_cluster.model.sampling.row_passes import Floats, Ints
from pd_cluster.types import Request, Sampling


def adjusts(params: Sampling, position: int) -> bool:
    """Whether anything changes the logits at this output position."""
    return bool(
        position < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids
    )


class Adjustment:
    """The changes to the logits of one sequence's next token; updated as the request gets tokens."""

    def __init__(self, params: Sampling, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.allowed = self._ids(params.allowed_token_ids)
        self.ends = self._ids(eos_token_ids.union(params.stop_token_ids))
        self.always_banned = self._ids(words[0] for words in params.bad_words if len(words) == 1)
        # A sequence's last token but one -> its tokens without the last, and the last.
        self.bad_words: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for words in params.bad_words:
            if len(words) > 1 and 0 <= words[-1] < vocab_size:
                self.bad_words[words[-2]].append((list(words[:-1]), words[-1]))
        bias = {token_id: value for token_id, value in params.logit_bias if 0 <= token_id < vocab_size}
        self.bias_ids = self._ids(bias)
        self.bias = np.nan_to_num([bias[i] for i in self.bias_ids.tolist()], posinf=1e38, neginf=-np.inf)
        self.penalizes = bool(params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty)
        self._forget()

    def _ids(self, token_ids: Iterable[int]) -> Ints:
        return np.array(sorted({i for i in token_ids if 0 <= i < self.vocab_size}), dtype=np.int64)

    def _forget(self) -> None:
        self._slots: dict[int, int] = {}  # token id -> its index in the arrays
        self._ids_seen = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._output: list[int] | None = None  # the request's own list
        self._num_counted = 0  # tokens counted so far
        self._last = -1  # the last token counted

    @property
    def penalized(self) -> Ints:
        """Ids of the tokens that the penalties affect, [num_penalized]."""
        return self._ids_seen[: len(self._slots)]

    @property
    def counts(self) -> Floats:
        """The number of occurrences of each of `penalized` in the output, [num_penalized]."""
        return self._counts[: len(self._slots)]

    def follow(self, request: Request) -> None:
        """Counts the new tokens, or all of them if the output was replaced."""
        output = request.output_token_ids
        if not self.penalizes:
            return
        known = self._num_counted
        same = self._output is output and known <= len(output) and (known == 0 or output[known - 1] == self._last)
        if not same:
            self._forget()
            self._output, known = output, 0
            if self.params.repetition_penalty != 1.0:
                self._count(request.prompt_token_ids[request.num_virtual_tokens :], 0.0)
        if known < len(output):
            self._count(output[known:], 1.0)
            self._num_counted, self._last = len(output), output[-1]

    def _count(self, token_ids: list[int], weight: float) -> None:
        for token_id in token_ids:
            slot = self._slots.get(token_id)
            if slot is None:
                if not 0 <= token_id < self.vocab_size:
                    continue
                slot = self._slots[token_id] = len(self._slots)
                if slot == len(self._ids_seen):
                    self._ids_seen = np.concatenate([self._ids_seen, np.zeros_like(self._ids_seen)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._ids_seen[slot] = token_id
            self._counts[slot] += weight

    def banned(self, request: Request, position: int, may_end: bool = True) -> Ints:
        """Returns the ids that bad_words and min_tokens forbid now; may contain duplicates.

        `may_end`: an end token would end the output here; otherwise it would be part of a guide's text.
        """
        parts = [self.banned_anyway(position, may_end)]
        if self.bad_words and request.num_tokens:
            end = request.num_tokens
            candidates, first = self.bad_words.get(request.token_ids(end - 1, end)[0], ()), request.num_virtual_tokens
            found = [
                last
                for head, last in candidates
                if end - len(head) >= first and request.token_ids(end - len(head), end) == head
            ]
            parts.append(np.array(found, dtype=np.int64))
        return np.concatenate(parts)

    def banned_anyway(self, position: int, may_end: bool = True) -> Ints:
        """Returns the banned ids that do not depend on the preceding tokens."""
        if position >= self.params.min_tokens or not may_end:
            return self.always_banned
        return np.concatenate([self.always_banned, self.ends])

    def banned_after(self, request: Request) -> Ints:
        """Returns pairs [num_found, 2] for bad_words: a possible next token, and an id that is banned after it."""
        end = request.num_tokens
        found = [
            (token_id, last)
            for token_id, candidates in self.bad_words.items()
            for head, last in candidates
            if end + 1 - len(head) >= request.num_virtual_tokens
            and request.token_ids(end + 1 - len(head), end) == head[:-1]
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 2)


# Each request's masks and counts. An entry can be dropped at any time, because it is rebuilt from the token ids.
adjustments: WeakKeyDictionary[Request, Adjustment] = WeakKeyDictionary()


def adjustment_of(request: Request, vocab_size: int, eos_token_ids: frozenset[int]) -> Adjustment:
    """Returns the request's adjustment, updated with its tokens, and creates it if there is none."""
    state = adjustments.get(request)
    if state is None or state.params is not request.sampling:
        state = adjustments[request] = Adjustment(request.sampling, vocab_size, eos_token_ids)
    state.follow(request)
    return state


class LogitEdit(NamedTuple):
    """The changes to one row of logits."""

    row: int
    adjustment: Adjustment
    banned: Ints  # token ids; may contain duplicates
    banned_after: Ints | None = None  # [n, 2], if the last token is unknown: a possible last token, an id that it bans


def edit_ahead(row: int, request: Request, vocab_size: int, eos_token_ids: frozenset[int]) -> LogitEdit:
    """Prepares the edit for the token after the next one, while only the device has the next one."""
    adjustment = adjustment_of(request, vocab_size, eos_token_ids)
    banned = adjustment.banned_anyway(len(request.output_token_ids) + 1)
    return LogitEdit(row, adjustment, banned, adjustment.banned_after(request))


# For each byte of a mask, the values to add to eight logits: 0 for a set bit, otherwise -inf. [256, 8]
_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_ADDED_OF_BYTE = _ADDED.astype(np.float32)


def restrict(logits: Tensor, masks: Sequence[tuple[int, NDArray[np.uint32]]]) -> None:
    """Bans each token t whose bit t % 32 of words[t // 32] is not set, in rows of logits [num_rows, vocab_size].

    Also bans tokens after the last word. No logit may be NaN or +inf.
    """
    known = [(row, words) for row, words in masks if len(words)]
    for row, words in masks:
        logits[row, 32 * len(words) :] = -math.inf
    if not known:
        return
    codes = np.stack([words for _, words in known]).view(np.uint8)  # [num_known, num_bytes]
    added = _ADDED_OF_BYTE.take(codes, axis=0).reshape(len(known), -1)[:, : logits.shape[1]]
    for (row, _), line in zip(known, torch.from_numpy(added).to(logits.device), strict=True):
        logits[row, : len(line)].add_(line)


def apply(logits: Tensor, edits: Sequence[LogitEdit], before_penalties: Callable[[], None] | None = None) -> None:
    """Changes logits [num_rows, vocab_size] in place, all rows at once, with at most one edit per row."""
    numbers = edit_arrays(edits, logits.shape[1])
    there = {name: torch.from_numpy(array).to(logits.device) for name, array in numbers.items()}
    limit(logits, there)
    change(logits, there, before_penalties=before_penalties)


def edit_arrays(edits: Sequence[LogitEdit], vocab_size: int) -> dict[str, NDArray[Any]]:
    """Returns the arrays that `limit` and `change` need, without empty ones. Positions index the flattened logits."""
    found: dict[str, NDArray[Any]] = {}

    def places(parts: Iterable[tuple[int, Ints]]) -> Ints:
        return np.concatenate([ids + row * vocab_size for row, ids in parts])

    def numbers(parts: Iterable[Floats]) -> Floats:
        return np.concatenate(list(parts)).astype(np.float32, copy=False)

    if limited := [e for e in edits if e.adjustment.params.allowed_token_ids]:
        found["limited"] = np.array([e.row for e in limited], dtype=np.int64)
        found["allowed"] = places((e.row, e.adjustment.allowed) for e in limited)
    if masked := [e for e in edits if len(e.banned)]:
        found["banned"] = places((e.row, e.banned) for e in masked)
    if worded := [(e.row, e.banned_after) for e in edits if e.banned_after is not None and len(e.banned_after)]:
        found["worded"] = places((row, pairs[:, 1]) for row, pairs in worded)
        found["after"] = places((row, pairs[:, 0]) for row, pairs in worded)
        found["worded_rows"] = np.repeat([row for row, _ in worded], [len(pairs) for _, pairs in worded])
    if biased := [e for e in edits if len(e.adjustment.bias)]:
        found["biased"] = places((e.row, e.adjustment.bias_ids) for e in biased)
        found["bias"] = numbers(e.adjustment.bias for e in biased)
    if penalized := [e for e in edits if e.adjustment.penalizes]:
        params = [e.adjustment.params for e in penalized]
        found["penalizing"] = np.array([e.row for e in penalized], dtype=np.int64)
        found["repetition"] = np.array([p.repetition_penalty for p in params], dtype=np.float32)
        found["frequency"] = np.array([p.frequency_penalty for p in params], dtype=np.float32)
        found["presence"] = np.array([p.presence_penalty for p in params], dtype=np.float32)
        found["penalized"] = places((e.row, e.adjustment.penalized) for e in penalized)
        found["counts"] = numbers(e.adjustment.counts for e in penalized)
        found["owners"] = np.repeat(np.arange(len(penalized)), [len(e.adjustment.penalized) for e in penalized])
    return found


def limit(logits: Tensor, there: Mapping[str, Tensor]) -> None:
    """Bans all tokens except the allowed_token_ids, in place, in rows of logits [num_rows, vocab_size] that have some.

    `there`: the arrays of `edit_arrays`, on the logits' device.
    """
    if "limited" in there:
        flat, at = logits.view(-1), there["allowed"]
        values = flat[at]
        logits[there["limited"]] = -math.inf
        flat[at] = values


def change(
    logits: Tensor,
    there: Mapping[str, Tensor],
    last_ids: Tensor | None = None,
    before_penalties: Callable[[], None] | None = None,
) -> None:
    """Applies all other edits in place.

    `last_ids` [num_rows] int64: each row's last token, if the edits were made before the host had it.
    """
    flat = logits.view(-1)
    last = None  # positions of the last tokens
    if last_ids is not None:
        last = last_ids + torch.arange(0, logits.numel(), logits.shape[1], device=logits.device)
    if "banned" in there:
        flat[there["banned"]] = -math.inf
    if last is not None and "worded" in there:
        holds = last[there["worded_rows"]] == there["after"]
        flat.index_add_(0, there["worded"], torch.where(holds, -math.inf, 0.0))  # adding, because an id may occur twice
    if "biased" in there:
        flat[there["biased"]] += there["bias"]
    if before_penalties is not None:
        before_penalties()
    if "penalized" in there:
        _penalize(flat, there, None if last is None else last[there["penalizing"]])


def _penalize(flat: Tensor, there: Mapping[str, Tensor], last: Tensor | None) -> None:
    """Applies the penalties. `last` [num_penalizing]: positions of tokens to count once more than `counts` says."""
    at, counts, owners = there["penalized"], there["counts"], there["owners"]
    strengths = [there[name] for name in ("repetition", "frequency", "presence")]
    values = _penalized(flat[at], counts, *(strength[owners] for strength in strengths))
    if last is None:
        flat[at] = values
        return
    known = torch.where(at == last[owners], counts, 0.0)
    num_before = torch.zeros_like(strengths[0]).index_add_(0, owners, known)
    last_values = _penalized(flat[last], num_before + 1.0, *strengths)
    flat[at] = values
    flat[last] = last_values


def _penalized(values: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Returns the penalized logits of tokens that occur `counts` times in the output; all have the same shape."""
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - frequency * counts - presence * (counts > 0)
