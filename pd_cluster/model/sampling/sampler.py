"""Chooses the next token of each row of logits, with its logprobs.

Randomness is a counter-based hash of (seed, sequence index, position), computed on the host. So a request draws the
same random numbers alone, in a batch, after a retry and on every device. Does not deal with the lifetime of requests.

    logits ─ argmax ─┬─ greedy rows without masks and penalties ──────────────────────────┬─ token ids ─ logprobs
                     └─ other rows ─ copy, masks and penalties ─ argmax or draw ──────────┘  of the raw logits
                                           └─ processors before the penalties, or before the draw

The masks of guides come with the rows; see grammar_masks.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pd_cluster.model.sampling.beam_candidates import candidates_of, ends_of, with_client_logprobs
from pd_cluster.model.sampling.grammar_masks import TokenMask
from pd_cluster.model.sampling.logit_adjustments import LogitEdit, adjustment_of, adjusts, apply, restrict
from pd_cluster.model.sampling.request_processors import NO_PROCESSORS, RequestProcessors
from pd_cluster.model.sampling.row_logprobs import logprobs_of
from pd_cluster.model.sampling.row_passes import Floats, Ints, copy_of_rows, peaks, rows_of
from pd_cluster.model.sampling.token_draw import DrawParameters, draw
from pd_cluster.types import Candidate, Logprobs, Request, Sampling

MASK = (1 << 64) - 1
NO_TOKEN = -1  # no token is allowed
MAX_LOGITS_AT_ONCE = 6 << 20  # 24 MiB of float32: glibc maps each temporary of 32 MiB or more anew, which is slow


def splitmix64(state: int) -> int:
    """Returns one output of SplitMix64 (Steele, Lea, Flood 2014) for this state."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, index: int, position: int) -> float:
    """Returns a number in [0, 1) with 53 random bits, which depends only on the arguments. Test vectors: tests/unit."""
    mixed = splitmix64(splitmix64(splitmix64(seed & MASK) ^ index) ^ position)
    return (mixed >> 11) * 2.0**-53


def uniforms(seeds: Sequence[int], indexes: Sequence[int], positions: Sequence[int]) -> Floats:
    """Returns `uniform` for each row, [num_rows]."""
    mixed = _splitmix64s(np.array([seed & MASK for seed in seeds], dtype=np.uint64))
    mixed = _splitmix64s(mixed ^ np.array(indexes, dtype=np.uint64))
    mixed = _splitmix64s(mixed ^ np.array(positions, dtype=np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64s(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = states + np.uint64(0x9E3779B97F4A7C15)  # wraps around
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class SamplingRow(NamedTuple):
    """One token to choose. A fork has its own `index` even while it still shares the request's tokens."""

    request: Request
    index: int  # type: ignore[assignment]  # hides tuple.index, which rows do not need
    position: int  # among the output tokens of the sequence
    mask: TokenMask | None = None  # from the guide

    @property
    def is_forced(self) -> bool:
        """Whether the guide leaves only one continuation, so that no other constraint applies."""
        return self.mask is not None and self.mask.is_forced

    @property
    def is_adjusted(self) -> bool:
        """Whether the request's own masks and penalties apply."""
        return not self.is_forced and adjusts(self.request.sampling, self.position)

    @property
    def may_end(self) -> bool:
        """Whether an end or stop token would end the sequence here; in a guide it may be part of the text."""
        return self.mask is None or self.mask.accepts


class Sampled(NamedTuple):
    token_id: int  # or NO_TOKEN
    logprobs: Logprobs | None
    problem: str = ""  # why a processor left no token


# Row without a token -> the problem of a processor, or "".
Stuck = dict[int, str]


class Sampler:
    """Chooses tokens. Its only state is in logit_adjustments.py and in `processors`, and can be dropped at any time."""

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], processors: RequestProcessors = NO_PROCESSORS
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.processors = processors

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow], at: Sequence[int] | None = None) -> list[Sampled]:
        """Returns one token for each of `rows`, from logits [num_rows, vocab_size] float32, which may be overwritten.

        `at`: for each of `rows` its row of logits, if several use the same one.

        Never raises for any logits or parameters. If the masks ban every token, the result is the most likely of the
        allowed_token_ids, or of all tokens if there are none. For a guided row without allowed tokens the result is an
        end token if the output matches its guide, and otherwise NO_TOKEN. A row whose processor fails also gets
        NO_TOKEN.
        """
        num_rows = len(rows) if at is None else len(logits)
        assert logits.shape == (num_rows, self.vocab_size), f"{tuple(logits.shape)} for {num_rows} rows"
        sampled: list[Sampled] = []
        with torch.inference_mode():  # tensors made in inference mode can be changed only in that mode
            for part in self._parts(len(rows)):
                own = logits[part] if at is None else logits[list(at[part])]
                sampled += self._sample(own, rows[part])
        return sampled

    def token_ids(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
        """Returns the tokens that `sample` chooses, without logprobs. Where `sample` returns NO_TOKEN, the value has no
        meaning.
        """
        found: list[int] = []
        with torch.inference_mode():
            for part in self._parts(len(rows)):
                found += self._choose(logits[part], rows[part])[0].tolist()
        return found

    def prompt_logprobs(
        self, logits: Tensor, targets: list[int], num_top: int, named: Sequence[tuple[int, ...]] = ()
    ) -> list[Logprobs]:
        """Returns logprobs of the target token of each row of logits [num_rows, vocab_size] float32.

        `named`: for each row, tokens whose logprobs follow those of the most likely tokens.
        """
        told: list[Logprobs] = []
        with torch.inference_mode():
            for part in self._parts(len(targets)):
                _, best = peaks(logits[part])
                token_ids = np.array(targets[part], dtype=np.int64)
                told += logprobs_of(logits[part], best, token_ids, [num_top] * len(token_ids), named[part])
        return told

    def candidates(
        self, logits: Tensor, rows: Sequence[SamplingRow], at: Sequence[int]
    ) -> list[list[Candidate] | Sampled]:
        """Returns continuations of beams: each of `rows` uses row `at` of logits [num_rows, vocab_size] float32.

        The best come first. A beam whose processor fails gets NO_TOKEN instead.
        """
        found: list[list[Candidate] | Sampled] = []
        with torch.inference_mode():
            for part in self._parts(len(rows)):
                found += self._candidates(logits[list(at[part])], rows[part])
        return found

    def _candidates(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[list[Candidate] | Sampled]:
        params = [row.request.sampling for row in rows]
        _, best = peaks(logits)
        work = logits.clone()
        failed = self.adjust(work, rows)
        _, best_left = peaks(work, lambda i: self._likeliest_allowed(logits[i], rows[i]))
        ends = [ends_of(p, self.eos_token_ids, self.vocab_size) for p in params]
        found = candidates_of(work, best_left, ends, [p.beam_width for p in params])
        if told := [i for i, p in enumerate(params) if p.logprobs is not None]:
            index = np.array(told)
            asked = with_client_logprobs(
                rows_of(logits, index), best[index], [found[i] for i in told], [params[i].logprobs or 0 for i in told]
            )
            for i, row in zip(told, asked, strict=True):
                found[i] = row
        return [Sampled(NO_TOKEN, None, failed[i]) if i in failed else row for i, row in enumerate(found)]

    def _parts(self, num_rows: int) -> list[slice]:
        """Splits rows into slices small enough for one pass."""
        step = max(1, MAX_LOGITS_AT_ONCE // self.vocab_size)
        return [slice(start, start + step) for start in range(0, num_rows, step)]

    def _sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        token_ids, best, stuck = self._choose(logits, rows)
        told = self._logprobs(logits, best, token_ids, [row.request.sampling for row in rows])
        found = [Sampled(token_id, told.get(i)) for i, token_id in enumerate(token_ids.tolist())]
        for i, problem in stuck.items():
            found[i] = Sampled(NO_TOKEN, None, problem)
        return found

    def _choose(self, logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Ints, Floats, Stuck]:
        """Returns the tokens, each row's largest logit, and the rows that have no allowed token."""
        params = [row.request.sampling for row in rows]
        token_ids, best = peaks(logits)
        drawn = [i for i, p in enumerate(params) if not p.greedy]
        adjusted = [i for i, row in enumerate(rows) if row.mask is not None or row.is_adjusted or self._processes(row)]
        stuck: Stuck = {}
        if drawn or adjusted:
            # Drawn rows come first and form a view of the copy, so a batch of only drawn rows needs no second copy.
            at = np.array(drawn + [i for i in adjusted if params[i].greedy])
            others = [rows[i] for i in at.tolist()]
            if adjusted:
                work = copy_of_rows(logits, at)
                stuck = {int(at[i]): problem for i, problem in self.adjust(work, others).items()}
                chosen, best_left = peaks(work, lambda i: self._fallback(logits[at[i]], others[i], stuck, int(at[i])))
            else:
                work, chosen, best_left = rows_of(logits, at), token_ids[at], best[at]
            if num_drawn := len(drawn):
                knobs = self._knobs(others[:num_drawn])
                if self.processors:
                    failed = self._shape_draws(work, others[:num_drawn], best_left, knobs)
                    stuck |= {int(at[i]): problem for i, problem in failed.items()}
                chosen[:num_drawn] = draw(work[:num_drawn], best_left[:num_drawn], knobs)
            token_ids[at] = chosen
        return token_ids, best, stuck

    def _processes(self, row: SamplingRow) -> bool:
        return bool(self.processors) and not row.is_forced and self.processors.concern(row.request)

    def _process(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Stuck:
        """Applies the processors that may change the most likely token, in place; then applies guides again."""
        failed: Stuck = {}
        for i, row in enumerate(rows):
            if self._processes(row):
                if problem := self.processors.apply(logits[i], row.request, row.index, is_draw=False):
                    failed[i] = problem
                if row.mask is not None:
                    restrict(logits, [(i, row.mask.words)])
        return failed

    def _shape_draws(self, logits: Tensor, rows: Sequence[SamplingRow], best: Floats, knobs: DrawParameters) -> Stuck:
        """Applies the other processors in place, after temperature and min_p, which are then set to have no effect.

        Also updates the rows' `best` logits.
        """
        failed: Stuck = {}
        for i, row in enumerate(rows):
            if not self._processes(row) or not self.processors.shape_draws(row.request):
                continue
            floor = knobs.rows(np.array([i])).floor(best[i : i + 1]).item()
            logits[i].masked_fill_(logits[i] < floor, -math.inf).div_(row.request.sampling.temperature)
            if problem := self.processors.apply(logits[i], row.request, row.index, is_draw=True):
                failed[i] = problem
            knobs.inverse_temperature[i], knobs.log_min_p[i] = 1.0, -math.inf
            best[i : i + 1] = peaks(logits[i : i + 1])[1]
        return failed

    def adjust(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Stuck:
        """Applies masks, biases, processors and penalties in place; returns the rows whose processors have failed."""
        restrict(logits, [(i, row.mask.words) for i, row in enumerate(rows) if row.mask is not None])
        failed: Stuck = {}
        edits = []
        for i, row in enumerate(rows):
            if row.is_adjusted:
                adjustment = adjustment_of(row.request, self.vocab_size, self.eos_token_ids)
                edits.append(LogitEdit(i, adjustment, adjustment.banned(row.request, row.position, row.may_end)))
        apply(logits, edits, (lambda: failed.update(self._process(logits, rows))) if self.processors else None)
        return failed

    def _fallback(self, line: Tensor, row: SamplingRow, stuck: Stuck, at: int) -> int:
        """Returns the choice for a row in which all tokens are banned; `line` [vocab_size]: the model's own logits.

        An output that matches its guide ends. Any other guided row has no choice: `at` is added to `stuck`, and the
        result is ignored.
        """
        if row.mask is None:
            return self._likeliest_allowed(line, row)
        if row.mask.accepts:
            ends = [token_id for token_id in sorted(self.eos_token_ids) if 0 <= token_id < self.vocab_size]
            return int(ends[int(line[ends].argmax())])
        stuck.setdefault(at, "")
        return 0

    def _likeliest_allowed(self, line: Tensor, row: SamplingRow) -> int:
        allowed = adjustment_of(row.request, self.vocab_size, self.eos_token_ids).allowed.tolist()
        return int(allowed[int(line[allowed].argmax())] if allowed else line.argmax())

    def _knobs(self, rows: Sequence[SamplingRow]) -> DrawParameters:
        params = [row.request.sampling for row in rows]
        draws = uniforms([p.seed for p in params], [row.index for row in rows], [row.position for row in rows])
        return DrawParameters.of(params, draws, self.vocab_size)

    def _logprobs(
        self, logits: Tensor, best: Floats, token_ids: Ints, params: Sequence[Sampling]
    ) -> dict[int, Logprobs]:
        """Returns the logprobs of the rows that request them, by row index."""
        num_top = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
        if not num_top:
            return {}
        at = np.array(list(num_top))
        named = [params[i].logprob_token_ids for i in num_top]
        told = logprobs_of(rows_of(logits, at), best[at], token_ids[at], list(num_top.values()), named)
        return dict(zip(num_top, told, strict=True))
