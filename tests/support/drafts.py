"""A drafter whose drafts are right, wrong, random or invalid, and policies for the number of drafts in a step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from pd_cluster.engine.draft.draft_size import DraftSize, Guess
from pd_cluster.engine.draft.drafter import Drafter
from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.step.drafting import Drafting
from pd_cluster.types import Request, Status

KINDS = ("right", "right", "right", "half right", "wrong", "random", "outside", "end", "nothing")
MOST = 12
Truth = Callable[[Request], Sequence[int]]  # returns a sequence's whole output


class Liar(Drafter):
    """Drafts from the right output (`truth`) or with a random fault; `end` is the end token."""

    name = "liar"

    def __init__(self, rng: random.Random, truth: Truth, vocab_size: int, end: int) -> None:
        self._rng, self._truth, self._vocab_size, self._end = rng, truth, vocab_size, end
        self.num_asked: Counter[str] = Counter()

    def draft(self, request: Request, most: int) -> Sequence[int]:
        kind = self._rng.choice(KINDS)
        self.num_asked[kind] += 1
        behind = list(self._truth(request)[len(request.output_token_ids) :])
        if kind == "half right":
            behind = behind[: self._rng.randrange(4)]
        elif kind == "wrong":
            behind = [(token_id + 1) % self._vocab_size for token_id in behind]
        elif kind == "outside":
            behind = [*behind[: self._rng.randrange(3)], self._rng.choice([-1, self._vocab_size, 1 << 40])]
        elif kind == "end":
            behind = [*behind[: self._rng.randrange(3)], self._end]
        if kind in ("half right", "random", "end"):
            behind += [self._rng.randrange(self._vocab_size) for _ in range(most)]
        return [] if kind == "nothing" else behind[:most]

    def ended(self, request: Request) -> None:
        assert request.status is Status.FINISHED


class RandomSize(DraftSize):
    """Verifies a random number of each request's drafts."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def can_pay(self, num_rows: int, drafters: Mapping[Request, Sequence[str]], most_each: int, most: int) -> bool:
        return True

    def choose(self, num_rows: int, guesses: Mapping[Request, Guess], most: int) -> dict[Request, int]:
        chosen: dict[Request, int] = {}
        for request, guess in guesses.items():
            chosen[request] = self._rng.randrange(min(most, len(guess.token_ids)) + 1)
            most -= chosen[request]
        return {request: num_drafts for request, num_drafts in chosen.items() if num_drafts}


class AllDrafts(DraftSize):
    """Verifies every draft."""

    def can_pay(self, num_rows: int, drafters: Mapping[Request, Sequence[str]], most_each: int, most: int) -> bool:
        return True

    def choose(self, num_rows: int, guesses: Mapping[Request, Guess], most: int) -> dict[Request, int]:
        return {request: len(guess.token_ids) for request, guess in guesses.items()}


def liars(scheduler: StepScheduler, rng: random.Random, truth: Truth, vocab_size: int, end: int = 3) -> Drafting:
    drafting = Drafting(scheduler, [Liar(rng, truth, vocab_size, end)], vocab_size=vocab_size)
    drafting.size = RandomSize(rng)
    return drafting
