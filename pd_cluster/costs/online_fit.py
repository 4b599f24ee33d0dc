"""Fits linear costs to steps and handovers as they happen; recent ones weigh most. Reads no clock.

Decode steps, prompt steps and mixed steps have separate sums, so many steps of one kind do not erase the others.
Coordinate descent computes the terms, with one sweep per step, which takes about 10 µs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import mul

from pd_cluster.costs.cost_fit import TERMS, columns_of
from pd_cluster.costs.linear_costs import HandoverCost, StepCost, StepWork

DECAY = 0.96  # a step's weight halves after 17 more of its kind
FADE = 0.999  # a step of one kind multiplies the weights of the others by this
LEAST_SHARE = 0.05  # a kind keeps at least this share of its weight
MAX_TIME_RATIO = 16.0  # a step is weighted by its predicted time, clamped to within this factor of its kind's mean
LEAST_TERM = {"prompt_token_s": 1e-12}  # in seconds; 0 would mean that the cost is unknown

FIRST_HANDOVERS = 3  # ignored, because the first ones open links and register memory
LEAST_HANDOVERS = 4
LEAST_SPREAD = 0.2  # a slope is fitted only if the relative spread of sizes is larger

NUM = len(TERMS)
PAIRS = [(a, b) for a in range(NUM) for b in range(a, NUM)]
FIRSTS, SECONDS = ([pair[at] for pair in PAIRS] for at in range(2))
PLACES = [[PAIRS.index((min(a, b), max(a, b))) for b in range(NUM)] for a in range(NUM)]
SQUARES = [PLACES[at][at] for at in range(NUM)]
LEAST = [LEAST_TERM.get(name, 0.0) for name in TERMS]


@dataclass(slots=True)
class _KindSums:
    """One kind's weighted sums of products: of PAIRS of columns, and of columns with seconds.

    A step's weight depends on its predicted time relative to `level_s`, the mean time of its kind. So errors are
    relative, and the fit adapts equally quickly when a machine becomes slower or faster.
    """

    level_s: float
    sums: list[float] = field(default_factory=lambda: [0.0] * (len(PAIRS) + NUM))
    share: float = 1.0

    def add(self, columns: tuple[float, ...], took_s: float, predicted_s: float) -> None:
        self.level_s += (1 - DECAY) * (took_s - self.level_s)
        least_s, most_s = self.level_s / MAX_TIME_RATIO, self.level_s * MAX_TIME_RATIO
        weight = (self.level_s / min(max(predicted_s, least_s), most_s)) ** 2
        weighted = [weight * column for column in columns]
        news = [*map(mul, map(weighted.__getitem__, FIRSTS), map(columns.__getitem__, SECONDS))]
        news += [took_s * column for column in weighted]
        self.sums = [DECAY * old + new for old, new in zip(self.sums, news, strict=True)]
        self.share = 1.0


class OnlineFit:
    """Fits the cost of a step. `cost`: the fit to the steps so far."""

    def __init__(self) -> None:
        self.cost = StepCost()
        self._terms = [0.0] * NUM
        self._kinds: dict[tuple[bool, bool], _KindSums] = {}

    def add(self, work: StepWork, took_s: float) -> None:
        """Adds a step. Ignores steps without work or time."""
        name = work.num_rows > 0, work.num_prompt_tokens > 0
        if took_s <= 0 or not any(name):
            return
        if (kind := self._kinds.get(name)) is None:
            kind = self._kinds[name] = _KindSums(took_s)
        for other in self._kinds.values():
            other.share = max(LEAST_SHARE, FADE * other.share)
        kind.add(columns_of(work), took_s, self.cost.seconds(work) or took_s)
        self._sweep()

    def _sweep(self) -> None:
        terms, sums = self._terms, self._all_sums()
        for at, (places, right, square) in enumerate(zip(PLACES, sums[len(PAIRS) :], SQUARES, strict=True)):
            if (product := sums[square]) > 0:
                predicted = sum(map(mul, map(sums.__getitem__, places), terms))
                terms[at] = max(LEAST[at], terms[at] + (right - predicted) / product)
        self.cost = StepCost(terms[1], terms[2], terms[3], terms[0], terms[4])

    def _all_sums(self) -> list[float]:
        found: list[float] = []
        for kind in self._kinds.values():
            share = kind.share / kind.level_s**2
            more = [share * value for value in kind.sums]
            found = [one + other for one, other in zip(found, more, strict=True)] if found else more
        return found


class MeanWork:
    """The mean work of recent steps."""

    def __init__(self) -> None:
        self._sums = [0.0] * len(StepWork._fields)
        self._num = 0.0

    def add(self, work: StepWork) -> None:
        self._sums = [DECAY * total + each for total, each in zip(self._sums, work, strict=True)]
        self._num = DECAY * self._num + 1

    @property
    def work(self) -> StepWork:
        """Returns the rounded means; no work before the first step."""
        return StepWork(*(round(total / self._num) for total in self._sums)) if self._num else StepWork()


class OnlineHandoverFit:
    """Fits a line to recent handovers: a setup time, and a time per byte.

    If handovers have similar sizes, a byte is assumed to take `assumed_byte_s`, and the rest of the time is setup.
    """

    def __init__(self, assumed_byte_s: float) -> None:
        self._assumed_byte_s = assumed_byte_s
        self._num_left_out = FIRST_HANDOVERS
        self._num = self._nbytes = self._took_s = self._squares = self._products = 0.0

    def add(self, nbytes: int, took_s: float) -> None:
        if self._num_left_out:
            self._num_left_out -= 1
            return
        self._num = DECAY * self._num + 1
        self._nbytes = DECAY * self._nbytes + nbytes
        self._took_s = DECAY * self._took_s + took_s
        self._squares = DECAY * self._squares + nbytes * nbytes
        self._products = DECAY * self._products + nbytes * took_s

    @property
    def cost(self) -> HandoverCost | None:
        """Returns the fit; None if there were too few handovers."""
        if self._num < LEAST_HANDOVERS:
            return None
        nbytes, took_s = self._nbytes / self._num, self._took_s / self._num
        variance = self._squares / self._num - nbytes**2
        byte_s = self._assumed_byte_s
        if variance > LEAST_SPREAD**2 * nbytes**2:
            byte_s = max(0.0, (self._products / self._num - nbytes * took_s) / variance)
        return HandoverCost(max(0.0, took_s - nbytes * byte_s), byte_s)
