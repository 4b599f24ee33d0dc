"""Drafts with a draft head of the target: one layer that reads the hidden states of the last tokens (EAGLE-3, MTP).

Its keys and values are in the sequences' own blocks; see draft_pairs.py. A sequence's first step on this instance
provides the hidden states; its drafts begin one step later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pd_cluster.engine.draft.chain_drafter import Chain, ChainDrafter, DraftChoice
from pd_cluster.model.draft.draft_pairs import HeadOutput, HeadPairs, PairChunk
from pd_cluster.types import Request


class HeadRunner(Protocol):
    """The part of a runner that this drafter needs."""

    vocab_size: int

    @property
    def head_pairs(self) -> HeadPairs:
        """The pairs that must still be computed."""

    def draft_pairs(self, chunks: Sequence[PairChunk], are_tapped: bool) -> HeadOutput:
        """Computes pairs.

        Their hidden states were tapped from the target (`are_tapped`) or returned by an earlier call.
        """


class HeadDrafter(ChainDrafter):
    needs_blocks = True

    def __init__(
        self,
        name: str,
        runner: HeadRunner,
        choice: DraftChoice,
        grow: Callable[[Request, int], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(choice, grow, clock)
        self.name, self._runner = name, runner

    def look(self, requests: Sequence[Request], most: int, spare_s: float) -> None:
        chains, pairs = list[Chain](), list[PairChunk]()
        for request in requests:
            waiting = self._runner.head_pairs.waiting(request)
            if waiting is None or (depth := self._choice.most(request, most)) <= 0:
                continue
            if (depth := self._grow(request, depth)) > 0:
                chains.append(Chain(request, depth))
                pairs.append(waiting)
        if chains:
            self._draft(chains, pairs)
        self.found(chains)

    def _draft(self, chains: Sequence[Chain], pairs: Sequence[PairChunk]) -> None:
        """Computes the pairs up to each sequence's last token, then one draft after another."""
        started_s, depth = self._clock(), max(each.depth for each in chains)
        output = self._runner.draft_pairs(pairs, True)
        for each in chains:
            self._runner.head_pairs.wrote(each.request)
        self._choice.extend(chains, output.logits)
        going, states = list(chains), output.states
        while kept := [at for at, each in enumerate(going) if not each.is_done]:
            going, states = [going[at] for at in kept], states[kept]
            output = self._runner.draft_pairs([_next(*each) for each in zip(going, states, strict=True)], False)
            self._choice.extend(going, output.logits)
            states = output.states
        if sum(len(each.token_ids) for each in pairs) <= 2 * len(chains):
            self.costs.took(len(chains), (self._clock() - started_s) / depth)


def _next(chain: Chain, states: torch.Tensor) -> PairChunk:
    """Returns the pair of a chain's last draft. `states` [hidden_size]: the hidden state after the previous pair."""
    at = chain.request.num_tokens + len(chain.drafts) - 1
    return PairChunk(chain.request, at, chain.drafts[-1:], states[None])
