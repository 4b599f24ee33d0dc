"""Makes chains of drafts, for all sequences of a step at once: each draft follows from the previous draft."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from pd_cluster.engine.draft.drafter import Drafter
from pd_cluster.engine.draft.step_costs import StepCosts
from pd_cluster.model.draft.draft_pairs import has_embeddings
from pd_cluster.model.runner.model_runner import DraftLimits
from pd_cluster.model.sampling.sampler import Sampler, SamplingRow
from pd_cluster.types import Request


@dataclass(slots=True)
class Chain:
    """The drafts that one sequence has so far. `depth`: how many it will have."""

    request: Request
    depth: int
    drafts: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Returns the position of the next draft among the output tokens."""
        return len(self.request.output_token_ids) + len(self.drafts)

    @property
    def is_done(self) -> bool:
        return len(self.drafts) == self.depth


class DraftChoice:
    """Draws drafts with the sampling parameters and random numbers of the guessed tokens, or takes the likeliest."""

    def __init__(self, sampler: Sampler, limits: DraftLimits) -> None:
        self._sampler, self._limits = sampler, limits

    def most(self, request: Request, most: int) -> int:
        """Returns how many drafts of a sequence can be accepted, at most `most`."""
        left = request.sampling.max_tokens - len(request.output_token_ids) - 1
        return min(most, left, self._limits.max_model_len - request.num_tokens)

    def extend(self, chains: Sequence[Chain], logits: torch.Tensor) -> None:
        """Adds a draft to each chain, from the chain's row of logits [num_chains, vocab_size]."""
        if self._limits.is_greedy:
            chosen = [int(token_id) for token_id in logits.argmax(-1).tolist()]
        else:
            rows = [SamplingRow(each.request, each.request.index, each.position) for each in chains]
            chosen = self._sampler.token_ids(logits, rows)
        for chain, token_id in zip(chains, chosen, strict=True):
            chain.drafts.append(token_id)


class _Drafted(NamedTuple):
    num_tokens: int  # the sequence's number of tokens when the drafts were made
    token_ids: Sequence[int]


class ChainDrafter(Drafter):
    """Makes drafts for all sequences of a step at once (`look`). A sequence's drafts are valid until its next token."""

    def __init__(
        self, choice: DraftChoice, grow: Callable[[Request, int], int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`grow` reserves blocks for a number of a sequence's drafts, and returns how many drafts got blocks."""
        self._choice, self._grow, self._clock = choice, grow, clock
        self._found: WeakKeyDictionary[Request, _Drafted] = WeakKeyDictionary()
        self.costs: StepCosts = StepCosts()

    def is_for(self, request: Request) -> bool:
        """Whether the draft model has the embeddings of all tokens.

        Only the target embeds images and adapters' virtual tokens.
        """
        return has_embeddings(request)

    def found(self, chains: Sequence[Chain]) -> None:
        """Stores the drafts of a step."""
        self._found.clear()
        for each in chains:
            self._found[each.request] = _Drafted(each.request.num_tokens, each.drafts)

    def draft(self, request: Request, most: int) -> Sequence[int]:
        found = self._found.get(request)
        return found.token_ids[:most] if found is not None and found.num_tokens == request.num_tokens else ()

    def ended(self, request: Request) -> None: ...
