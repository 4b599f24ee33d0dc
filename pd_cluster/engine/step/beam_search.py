"""Decides which hypotheses a beam search keeps, and when it is over. Pure arithmetic.

The search finds the same hypotheses, in the same order, as transformers' `generate(num_beams=...)`. Knows nothing of
models, blocks or the states of requests; beam_groups.py shares KV between the beams of a search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pd_cluster.types import Candidate, FinishReason, Request, Sampling, TokenOutput


class Link(NamedTuple):
    """A token and, through `before`, all earlier tokens of the beam."""

    before: Link | None
    candidate: Candidate


class Beam(NamedTuple):
    """A beam of the current step. `score`: the sum of its tokens' log-probabilities."""

    score: float
    last: Link | None


class Hypothesis(NamedTuple):
    """A finished beam. `score`: the sum of log-probabilities, divided by length ** length_penalty."""

    score: float
    last: Link


class Growth(NamedTuple):
    """A beam of the next step: beam `parent` with one more token."""

    parent: int
    token_id: int


class _Grown(NamedTuple):
    """A beam with a candidate. The tuples sort in order of preference."""

    cost: float
    parent: int
    token_id: int
    candidate: Candidate


class BeamSearch:
    """One search, advanced token by token; `finished` has the best hypotheses so far, up to `beam_width`."""

    def __init__(self, params: Sampling) -> None:
        self._params = params
        self.num_tokens = 0
        self.beams = [Beam(0.0, None)]
        self.finished: list[Hypothesis] = []
        self.is_over = False

    def advance(self, rows: Sequence[Sequence[Candidate]]) -> list[Growth]:
        """Advances by one token.

        `rows[i]`: the best continuations of beam i. Returns the beams that continue, best first. A row must have the
        `beam_width` best candidates and also the `beam_width` best ones that do not end their sequence, or all if fewer
        exist. If sums are equal, the better beam's candidate comes first, then the lower token id.
        """
        width = self._params.beam_width
        self.num_tokens += 1
        is_last = self.num_tokens >= self._params.max_tokens
        grown = sorted(
            _Grown(-(beam.score + candidate.logprob), at, candidate.token_id, candidate)
            for at, (beam, row) in enumerate(zip(self.beams, rows, strict=True))
            for candidate in row
        )
        self._finish([each for each in grown[:width] if is_last or each.candidate.ends])
        going_on = [] if is_last else [each for each in grown if not each.candidate.ends][:width]
        self.beams = [Beam(-each.cost, Link(self.beams[each.parent].last, each.candidate)) for each in going_on]
        self.is_over = not going_on or self._is_settled()
        return [Growth(each.parent, each.token_id) for each in going_on]

    def hypotheses(self, num: int) -> list[list[Candidate]]:
        """Returns the tokens of the `num` best hypotheses, best first. If there are fewer, the last one is repeated."""
        found = [_tokens(hypothesis) for hypothesis in self.finished[:num]]
        return found + found[-1:] * (num - len(found))

    def _finish(self, ended: list[_Grown]) -> None:
        """Records hypotheses that end with this token.

        The caller passes only those among the `beam_width` best candidates.
        """
        for each in ended:
            link = Link(self.beams[each.parent].last, each.candidate)
            self.finished.append(Hypothesis(self._normalized(-each.cost, self.num_tokens), link))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the older of equals is kept
        del self.finished[self._params.beam_width :]

    def _is_settled(self) -> bool:
        """Whether the current hypotheses are final: by `early_stopping`, or because no beam can still beat them."""
        if len(self.finished) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        grows_with_length = self._params.early_stopping == "never" and self._params.length_penalty > 0
        length = self._params.max_tokens if grows_with_length else self.num_tokens
        return self._normalized(self.beams[0].score, length) <= self.finished[-1].score

    def _normalized(self, score: float, num_tokens: int) -> float:
        return float(score / num_tokens**self._params.length_penalty)


def _tokens(hypothesis: Hypothesis) -> list[Candidate]:
    tokens: list[Candidate] = []
    link: Link | None = hypothesis.last
    while link is not None:
        tokens.append(link.candidate)
        link = link.before
    return tokens[::-1]


# ---- a search as outputs


def answer(request: Request, search: BeamSearch) -> list[TokenOutput]:
    """Returns every token of the `n` best hypotheses of a search that is over."""
    outputs = []
    for index, tokens in enumerate(search.hypotheses(request.sampling.n)):
        for position, token in enumerate(tokens):
            is_last = position + 1 == len(tokens)
            reason: FinishReason = "stop" if token.ends else "length"
            outputs.append(
                TokenOutput(
                    request.request_id,
                    request.attempt,
                    index,
                    position,
                    token.token_id,
                    reason if is_last else None,
                    token.told,
                )
            )
    return outputs


def first_tokens_of(request: Request, row: Sequence[Candidate]) -> list[TokenOutput]:
    """Returns the candidates for the first token as outputs to hand over."""
    return [
        TokenOutput(
            request.request_id,
            request.attempt,
            index,
            0,
            candidate.token_id,
            "stop" if candidate.ends else None,
            candidate.told,
            candidate.logprob,
        )
        for index, candidate in enumerate(row)
    ]


def candidates_of(first_tokens: Sequence[TokenOutput]) -> list[Candidate]:
    return [Candidate(t.token_id, t.score or 0.0, t.finish_reason is not None, t.logprobs) for t in first_tokens]


def are_first_tokens(request: Request, tokens: Sequence[TokenOutput], vocab_size: int) -> bool:
    """Whether these are valid candidates for this request's first token; docs/protocol/handover.md has the rules."""
    if not 1 <= len(tokens) <= 2 * request.sampling.beam_width:
        return False
    if any(t.score is None or not math.isfinite(t.score) or t.finish_reason not in (None, "stop") for t in tokens):
        return False
    found = [(t.request_id, t.attempt, t.index, t.position) for t in tokens]
    order = [(-(t.score or 0.0), t.token_id) for t in tokens]
    if found != [(request.request_id, request.attempt, index, 0) for index in range(len(tokens))]:
        return False
    if order != sorted(order) or len({t.token_id for t in tokens}) < len(tokens):
        return False
    if not all(0 <= t.token_id < vocab_size for t in tokens):
        return False
    search = BeamSearch(request.sampling)
    search.advance([candidates_of(tokens)])
    return not search.is_over
