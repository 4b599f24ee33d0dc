"""Records about running requests that their clients cannot see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_cluster.bench.outcomes import GapCounts
from pd_cluster.simulate.step_progress import StepRun
from pd_cluster.types import TokenOutput


@dataclass(slots=True)
class TokenTimes:
    """The times of a sequence's tokens at one instance."""

    first_s: float
    last_s: float
    longest_s: float = 0.0  # the longest time between two tokens


@dataclass(slots=True)
class RequestNotes:
    """A request's records.

    `first_tokens`: when the instance that computed the prompt, and the one that took over, sent their first tokens.
    """

    first_tokens: list[tuple[str, float]] = field(default_factory=list)
    times: dict[str, TokenTimes] = field(default_factory=dict)  # by instance

    def longest_gap_s(self, first_s: float) -> float:
        """Returns the longest time between two tokens. `first_s`: when the client read the first token."""
        longest_s, before_s = 0.0, first_s
        for each in sorted(self.times.values(), key=lambda each: each.first_s):
            longest_s = max(longest_s, each.first_s - before_s, each.longest_s)
            before_s = max(before_s, each.last_s)
        return longest_s


class Notes:
    """The records of all requests. `gaps`: the times between successive tokens of all sequences."""

    def __init__(self) -> None:
        self.gaps = GapCounts()
        self._of: dict[str, RequestNotes] = {}

    def open(self, request_id: str) -> None:
        self._of[request_id] = RequestNotes()

    def close(self, request_id: str) -> RequestNotes:
        return self._of.pop(request_id, None) or RequestNotes()

    def sent(self, name: str, tokens: Sequence[TokenOutput], now_s: float) -> None:
        """Records the first tokens among the tokens that an instance has sent."""
        for token in tokens:
            if token.position == len(token.earlier) and (found := self._of.get(token.request_id)) is not None:
                found.first_tokens.append((name, now_s))

    def sampled(self, name: str, request_id: str, now_s: float) -> None:
        """Records a further token of a sequence."""
        if (found := self._of.get(request_id)) is None:
            return
        if (times := found.times.get(name)) is None:
            found.times[name] = TokenTimes(now_s, now_s)
        else:
            self.gaps.add(now_s - times.last_s)
            times.longest_s = max(times.longest_s, now_s - times.last_s)
            times.last_s = now_s

    def sampled_often(self, name: str, request_ids: Sequence[str], now_s: float, steps: StepRun) -> None:
        """Records one further token for each of these sequences in each of these steps."""
        self.gaps.add_line(steps.first_s, steps.growth_s, steps.num_steps, len(request_ids))
        longest_s = steps.first_s + steps.growth_s * (steps.num_steps - 1)
        for request_id in request_ids:
            times = found.times.get(name) if (found := self._of.get(request_id)) is not None else None
            if times is not None:
                times.longest_s, times.last_s = max(times.longest_s, longest_s), now_s
