"""Masks, biases and penalties of one sequence, and their application to rows of logits.

Order and meaning as in vLLM: allowed_token_ids, bad_words, min_tokens, logit_bias, then the repetition, frequency and
presence penalties. Repetition looks at prompt and output (Keskar et al. 2019), frequency and presence at output only.
Token ids outside the vocabulary are passed over. Knows nothing of how a token is then chosen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pd_cluster.model.passes import Floats, Ints
from pd_cluster.types import Request, SamplingParams


def adjusts(params: SamplingParams, position: int) -> bool:
    """Whether logits of this output position are changed at all."""
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
    """What to change in the logits of one sequence's next token; follows the tokens of its request as they grow."""

    def __init__(self, params: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.allowed = self._ids(params.allowed_token_ids)
        self.ends = self._ids(eos_token_ids.union(params.stop_token_ids))
        self.always_banned = self._ids(words[0] for words in params.bad_words if len(words) == 1)
        self.bad_words: dict[int, list[tuple[list[int], int]]] = defaultdict(list)  # by the last token but one
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
        self._slots: dict[int, int] = {}  # token id -> its place in the arrays
        self._ids_seen = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._output: list[int] | None = None  # the request's own list
        self._num_counted = 0  # tokens of it
        self._last = -1  # the last of them

    @property
    def penalized(self) -> Ints:
        """Ids of the tokens that the penalties look at, [num_penalized]."""
        return self._ids_seen[: len(self._slots)]

    @property
    def counts(self) -> Floats:
        """How often each of `penalized` is in the output, [num_penalized]."""
        return self._counts[: len(self._slots)]

    def follow(self, request: Request) -> None:
        """Counts the tokens that were added; all of them again when the output is another one than before."""
        output = request.output_token_ids
        if not self.penalizes:
            return
        known = self._num_counted
        same = self._output is output and known <= len(output) and (known == 0 or output[known - 1] == self._last)
        if not same:
            self._forget()
            self._output, known = output, 0
            if self.params.repetition_penalty != 1.0:
                self._count(request.prompt_token_ids, 0.0)
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

    def banned(self, request: Request, position: int) -> Ints:
        """Ids that bad_words and min_tokens forbid now; may hold doubles."""
        parts = [self.always_banned] if position >= self.params.min_tokens else [self.always_banned, self.ends]
        if self.bad_words and request.num_tokens:
            end = request.num_tokens
            candidates = self.bad_words.get(request.token_ids(end - 1, end)[0], ())
            found = [last for head, last in candidates if request.token_ids(end - len(head), end) == head]
            parts.append(np.array(found, dtype=np.int64))
        return np.concatenate(parts)


def adjustment_of(request: Request, vocab_size: int, eos_token_ids: frozenset[int]) -> Adjustment:
    """The request's own, up to date with its tokens; kept in `sampler_state`, and made when that is absent."""
    state = request.sampler_state
    if not isinstance(state, Adjustment) or state.params is not request.sampling:
        state = request.sampler_state = Adjustment(request.sampling, vocab_size, eos_token_ids)
    state.follow(request)
    return state


class Edit(NamedTuple):
    """What to change in one row of logits."""

    row: int
    adjustment: Adjustment
    banned: Ints  # token ids; may hold doubles


# Of each byte of a mask, what to add to eight logits: 0 where the bit is set, -inf where not. [256, 8]
_ADDED = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf)
_ADDED_OF_BYTE = _ADDED.astype(np.float32)


def restrict(logits: Tensor, masks: Sequence[tuple[int, NDArray[np.uint32]]]) -> None:
    """Forbids, in rows of logits [num_rows, vocab_size], each token t whose bit t % 32 of words[t // 32] is not set.

    Tokens beyond the last word are forbidden. No logit may be NaN or +inf.
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


def apply(logits: Tensor, edits: Sequence[Edit]) -> None:
    """Changes logits [num_rows, vocab_size] in place, all rows in one go; at most one edit a row."""
    flat = logits.view(-1)

    def places(parts: Iterable[tuple[int, Ints]]) -> Tensor:
        """Where in the flattened logits the (row, token ids) are."""
        joined = np.concatenate([ids + row * logits.shape[1] for row, ids in parts])
        return torch.from_numpy(joined).to(logits.device)

    def numbers(parts: Iterable[Floats]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts)).astype(np.float32, copy=False)).to(logits.device)

    if limited := [e for e in edits if e.adjustment.params.allowed_token_ids]:
        at = places((e.row, e.adjustment.allowed) for e in limited)
        values = flat[at]
        logits[[e.row for e in limited]] = -math.inf
        flat[at] = values
    if masked := [e for e in edits if len(e.banned)]:
        flat[places((e.row, e.banned) for e in masked)] = -math.inf
    if biased := [e for e in edits if len(e.adjustment.bias)]:
        flat[places((e.row, e.adjustment.bias_ids) for e in biased)] += numbers(e.adjustment.bias for e in biased)
    if penalized := [e for e in edits if len(e.adjustment.penalized)]:
        at = places((e.row, e.adjustment.penalized) for e in penalized)
        counts = numbers(e.adjustment.counts for e in penalized)
        lengths = [len(e.adjustment.penalized) for e in penalized]
        params = [e.adjustment.params for e in penalized]

        def repeated(values: Iterable[float]) -> Tensor:
            return numbers([np.repeat(np.array(list(values), dtype=np.float32), lengths)])

        repetition = repeated(p.repetition_penalty for p in params)
        frequency = repeated(p.frequency_penalty for p in params)
        presence = repeated(p.presence_penalty for p in params)
        values = flat[at]
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat[at] = values - frequency * counts - presence * (counts > 0)
