"""The beams of one search in a scheduler.

They are separate sequences that wait for each other and share blocks. A computed beam is parked with its candidates.
When all beams are parked, the best (beam, candidate) combinations become the beams of the next step. No KV is copied
for this: a child holds its parent's blocks, and the scheduler copies a shared block before it is written.
beam_search.py chooses the best candidates. docs/protocol/requests.md has the states. Uses no torch.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from pd_cluster.engine.scheduling.scheduler import StepScheduler
from pd_cluster.engine.scheduling.step_plan import service_order
from pd_cluster.engine.step.beam_search import BeamSearch, Growth, answer, candidates_of
from pd_cluster.types import Candidate, Request, Status, TokenOutput


@dataclass(slots=True)
class Change:
    """The changes of a group; all are empty until all beams are computed.

    `started` and `ended`: new and dropped beams. `tokens`: the answer, once the search is over.
    """

    started: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)


class BeamGroup:
    """One search. Its beams are the scheduler's requests of this leg with indices from 0 to `num_beams` - 1."""

    def __init__(self, leader: Request) -> None:
        self.search = BeamSearch(leader.sampling)
        self.num_beams = 1
        self.rows: dict[int, Sequence[Candidate]] = {}  # by index of a parked beam


_groups: WeakKeyDictionary[Request, BeamGroup] = WeakKeyDictionary()  # by beam; a group refers to no beam


def advance(scheduler: StepScheduler, beam: Request, row: Sequence[Candidate]) -> Change:
    """Adds the candidates of a beam that was just computed. The first beam is the prompt itself."""
    group = _groups.get(beam)
    if group is None:
        group = _groups[beam] = BeamGroup(beam)
    scheduler.park(beam)
    group.rows[beam.index] = row
    if len(group.rows) < group.num_beams:
        return Change()
    growths = group.search.advance([group.rows[index] for index in range(group.num_beams)])
    group.rows.clear()
    before = [scheduler.requests[beam.key_of(index)] for index in range(group.num_beams)]
    beams = [] if group.search.is_over else regroup(scheduler, before, growths)
    group.num_beams = len(beams)
    change = Change(beams[len(before) :], before[len(beams) :])
    for started in change.started:
        _groups[started] = group
    for ended in change.ended:
        scheduler.finish(ended)
    if group.search.is_over:
        change.tokens = answer(beam, group.search)
    return change


def start(scheduler: StepScheduler, request: Request, first_tokens: Sequence[TokenOutput]) -> list[Request]:
    """Starts a search from a landed prompt and the candidates for its first token. Returns the search's beams."""
    return [request, *advance(scheduler, request, candidates_of(first_tokens)).started]


def regroup(scheduler: StepScheduler, before: Sequence[Request], growths: Sequence[Growth]) -> list[Request]:
    """Turns parked beams into the beams that `growths` lists, by index.

    Surplus beams release their blocks. A child waits for admission if its parent's KV was swapped out or dropped, or if
    there is no place for it.
    """
    children = [_child(scheduler, before, index, growth) for index, growth in enumerate(growths)]
    for beam in before:
        for each in scheduler.groups:
            each.give_back(beam)
    num_places = scheduler.places.num_free_for_group
    return [
        _go_on(scheduler, before[index] if index < len(before) else child, child, index < num_places)
        for index, child in enumerate(children)
    ]


def _child(scheduler: StepScheduler, before: Sequence[Request], index: int, growth: Growth) -> Request:
    """Returns a beam of the next step. It and its parent hold the same blocks."""
    parent = before[growth.parent]
    for each in scheduler.groups:
        each.swap.share(parent.swap_tables[each.at])
    return replace(
        parent,
        index=index,
        output_token_ids=[*parent.output_token_ids, growth.token_id],
        tables=scheduler.share_tables(parent),
        swap_tables=[list(table) for table in parent.swap_tables],
        block_hashes=list(parent.block_hashes),
    )


def _go_on(scheduler: StepScheduler, beam: Request, child: Request, has_place: bool) -> Request:
    """Moves the child's state and place in the scheduler to `beam`, which has its index and may be the child itself."""
    for name in ("output_token_ids", "tables", "swap_tables", "block_hashes"):
        setattr(beam, name, getattr(child, name))
    beam.num_computed_tokens, beam.num_hashed_blocks = child.num_computed_tokens, child.num_hashed_blocks
    scheduler.requests[beam.key] = beam
    if beam.tables[0] and has_place:
        beam.status = Status.RUNNING
        scheduler.running.append(beam)
        return beam
    if beam.tables[0]:
        for each in scheduler.groups:
            each.give_back(beam)
        beam.num_computed_tokens, beam.num_hashed_blocks = 0, 0
    beam.status = Status.WAITING
    insort(scheduler.waiting, beam, key=service_order)
    return beam
