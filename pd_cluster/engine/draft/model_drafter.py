"""Drafts with a smaller model of the same vocabulary, for all sequences of a step at once.

The draft model's KV is in twins of the sequences' blocks (kv/twin_blocks.py). If a sequence has no KV there, for
example after a handover, later steps compute it in slices, and drafts begin once it is complete. Each draft is drawn
with the sampling parameters and random number of the token that it guesses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pd_cluster.engine.draft.chain_drafter import Chain, ChainDrafter, DraftChoice
from pd_cluster.kv.twin_blocks import TwinBlocks
from pd_cluster.model.inputs.step_input import RowCollector, StepInput
from pd_cluster.types import Request

MAX_CATCH_UP_ROWS = 32  # a drafting step computes up to this many missing tokens of a sequence, one row each
MIN_SLICE, MAX_SLICE = 16, 512  # missing tokens that one step computes, in all sequences together
FIRST_SLICE = 64  # tokens of a slice while the time per token is unknown
SPARE_SHARE = 0.5  # share of the spare time that a slice may take
WEIGHT = 0.2  # the weight of the newest slice in the time per token


class DraftingRunner(Protocol):
    """The part of a runner that this drafter needs."""

    def compute_draft(self, step: StepInput) -> torch.Tensor:
        """Computes rows of the draft model; returns logits of the requested rows, [num_samples, vocab_size] float32."""


class ModelDrafter(ChainDrafter):
    name = "draft_model"

    def __init__(
        self,
        runner: DraftingRunner,
        choice: DraftChoice,
        twins: TwinBlocks,
        grow: Callable[[Request, int], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(choice, grow, clock)
        self._runner, self._twins = runner, twins
        self._is_warm = False  # the first drafts are not measured: a process's first steps are slow
        self._token_s = 0.0  # time per token of a slice; 0: unknown

    def look(self, requests: Sequence[Request], most: int, spare_s: float) -> None:
        late: list[tuple[Request, int]] = []
        ready: list[_TwinChain] = []
        for request in requests:
            if (depth := self._choice.most(request, most)) <= 0:
                continue
            num_valid = self._twins.num_valid(request)
            if request.num_tokens - num_valid > MAX_CATCH_UP_ROWS:
                late.append((request, num_valid))
            elif (depth := self._grow(request, depth)) > 0:
                ready.append(_TwinChain(request, depth, num_valid=num_valid))
        if ready:
            self._draft(ready)
        self.found(ready)
        if late:
            self._catch_up(late, spare_s)

    def _draft(self, chains: Sequence[_TwinChain]) -> None:
        """Computes the tokens whose KV each sequence lacks, then one draft after another."""
        started_s, num_behind = self._clock(), sum(each.request.num_tokens - each.num_valid for each in chains)
        depth, going = 0, list(chains)
        while going:
            rows = RowCollector(self._twins.block_size)
            for each in going:
                token_ids = each.fresh()
                start = each.request.num_tokens + depth - len(token_ids)
                for at, token_id in enumerate(token_ids, start):
                    rows.add(each.request, at, [token_id], int(at == start + len(token_ids) - 1))
                self._twins.wrote(each.request, start, token_ids)
            logits = self._runner.compute_draft(rows.step())
            self._choice.extend(going, logits)
            depth += 1
            going = [each for each in going if not each.is_done]
        if self._is_warm and num_behind <= 2 * len(chains):
            self.costs.took(len(chains), (self._clock() - started_s) / depth)
        self._is_warm = True

    def _catch_up(self, late: Sequence[tuple[Request, int]], spare_s: float) -> None:
        """Computes a slice of the tokens whose KV is missing, sequence by sequence, but no sequence's last token."""
        most = FIRST_SLICE
        if self._token_s:
            most = max(MIN_SLICE, int(min(MAX_SLICE, SPARE_SHARE * spare_s / self._token_s)))
        rows, left = RowCollector(self._twins.block_size), most
        for request, num_valid in late:
            if not left:
                break
            token_ids = request.token_ids(num_valid, min(num_valid + left, request.num_tokens - 1))
            rows.add(request, num_valid, token_ids)
            self._twins.wrote(request, num_valid, token_ids)
            left -= len(token_ids)
        started_s = self._clock()
        self._runner.compute_draft(rows.step())
        token_s = (self._clock() - started_s) / (most - left)
        self._token_s = token_s if not self._token_s else self._token_s + WEIGHT * (token_s - self._token_s)


@dataclass(slots=True)
class _TwinChain(Chain):
    num_valid: int = 0  # tokens whose KV is in the twins

    def fresh(self) -> list[int]:
        """Returns the tokens to compute next: those that the twins lack, then the last draft."""
        return self.drafts[-1:] or self.request.token_ids(self.num_valid, self.request.num_tokens)
