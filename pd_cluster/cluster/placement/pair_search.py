"""Finds the cheapest pair of linked instances. Pure.

A pair's cost grows with the cost of either instance, so the search begins with the cheapest instances. It examines
other decode instances only if links are down or pairs must be avoided; otherwise it takes P + D steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from pd_cluster.cluster.instances.instance_state import Instance

Pair = tuple[Instance, Instance]


class PairCosts(NamedTuple):
    """Functions that return comparable costs: `prefill` and `decode` of an instance in that role, `joined` of a pair.
    By default, the prefill side's cost decides first. `joined` must strictly grow with each of its arguments.
    """

    prefill: Callable[[Instance], Any]
    decode: Callable[[Instance], Any]
    joined: Callable[[Any, Any], Any] = lambda prefill, decode: (prefill, decode)


@dataclass(frozen=True, slots=True)
class Sides:
    """The instances that take requests, each side in the order of the table. `avoid`: pairs of keys not to choose."""

    prefills: list[Instance]
    decodes: list[Instance]
    avoid: Collection[tuple[str, str]] = ()

    @classmethod
    def of(cls, instances: Sequence[Instance], avoid: Collection[tuple[str, str]] = ()) -> Sides:
        prefills, decodes = list[Instance](), list[Instance]()
        for each in instances:
            if each.takes_requests:
                if each.role == "prefill":
                    prefills.append(each)
                elif each.role == "decode":
                    decodes.append(each)
        return cls(prefills, decodes, avoid)

    def may_pair(self, prefill: Instance, decode: Instance) -> bool:
        key = decode.key
        return key in prefill.links.up and not (self.avoid and (prefill.key, key) in self.avoid)

    def partner_of(self, decode: Instance) -> int | None:
        """Returns the index of the first prefill instance that may be its partner, or None."""
        places = (at for at, each in enumerate(self.prefills) if each.links.up and self.may_pair(each, decode))
        return next(places, None)

    def paired(self) -> Sides:
        """Returns only the instances that are part of a pair."""
        if self.avoid:
            prefills = [p for p in self.prefills if any(self.may_pair(p, decode) for decode in self.decodes)]
            decodes = [each for each in self.decodes if self.partner_of(each) is not None]
            return Sides(prefills, decodes, self.avoid)
        keys = {each.key for each in self.decodes}
        prefills, left = [p for p in self.prefills if not keys.isdisjoint(p.links.up)], set(keys)
        for prefill in prefills:  # usually the first prefill instance has a link to every decode instance
            if not left:
                break
            left = {key for key in left if key not in prefill.links.up}
        return Sides(prefills, [each for each in self.decodes if each.key not in left] if left else self.decodes)

    def pairs(self) -> Iterator[Pair]:
        """Yields all pairs in the order of the table; there may be very many."""
        return ((p, d) for p in self.prefills if p.links.up for d in self.decodes if self.may_pair(p, d))

    def ranked(self, costs: PairCosts) -> RankedSides:
        return RankedSides(self, costs)


class RankedSides:
    """Sides with their instances' costs, each of which is computed once for any number of searches."""

    def __init__(self, sides: Sides, costs: PairCosts) -> None:
        self._sides, self._joined = sides, costs.joined
        self._prefills = list(map(costs.prefill, sides.prefills))
        self._decodes = list(map(costs.decode, sides.decodes))
        self._by_cost = sorted(range(len(self._prefills)), key=self._prefills.__getitem__)
        self._order: list[int | None] = []  # indices of decode instances, the cheapest first; sorted when first needed
        self._keys: list[str] = []  # the keys in that order
        self._ranks: dict[str, int] = {}  # key -> rank in that order

    def best(self, is_open: bool = False) -> Pair | None:
        """Returns the pair with the lowest cost, among equals the first in the table's order; None if there is none.
        `is_open`: considers only links that are open now.
        """
        sides, costs = self._sides, self._prefills
        if not costs or not self._decodes:
            return None
        cheapest = self._decodes.index(min(self._decodes))
        key = sides.decodes[cheapest].key
        found, least = None, (None, 0)
        for at in self._by_cost:
            cost = self._joined(costs[at], self._decodes[cheapest])
            if found is not None and cost > least[0]:
                break  # later instances cannot have a cheaper pair, either
            prefill = sides.prefills[at]
            links = prefill.links
            reached = links.open if is_open else links.up
            if sides.avoid or key not in reached:
                place = self._nearest(prefill, reached)
                if place is None:
                    continue
                cost = self._joined(costs[at], self._decodes[place])
            else:
                place = cheapest
            if found is None or (cost, at) < least:
                found, least = (prefill, sides.decodes[place]), (cost, at)
        return found

    def _nearest(self, prefill: Instance, reached: Set[str]) -> int | None:
        """Returns the index of the cheapest decode instance that may be the partner of this prefill instance."""
        if not reached:
            return None
        if not self._order:
            order = sorted(range(len(self._decodes)), key=self._decodes.__getitem__)
            self._keys = [self._sides.decodes[place].key for place in order]
            self._ranks = {key: rank for rank, key in enumerate(self._keys)}
            self._order = [*order, None]  # None marks the end
            self._keys.append("")
        keys, avoid = self._keys, self._sides.avoid
        ranks: Iterable[int]
        if len(reached) ** 2 < len(keys):  # fewer steps than a walk along all keys
            ranks = map(self._ranks.get, reached, itertools.repeat(len(self._ranks)))
            if not avoid:
                return self._order[min(ranks)]
            ranks = sorted(ranks)
        else:
            ranks = (rank for rank, key in enumerate(keys) if key in reached)
        if avoid:
            own = prefill.key
            ranks = (rank for rank in ranks if (own, keys[rank]) not in avoid)
        return self._order[next(iter(ranks), -1)]
