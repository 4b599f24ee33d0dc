"""The beams of one search in a scheduler: sequences that are computed apart, wait for each other, and share blocks.

A beam that is computed is parked with its candidates; when all are, the best (beam, candidate) become the beams of the
next step. Nothing is copied for that: a child holds its parent's blocks, and the scheduler copies a shared one before
it is written. Which candidates are best is beams.py's to say. The states are in docs/protocol.md. No torch.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pd_cluster.engine.beams import BeamSearch, Growth, answer, candidates_of
from pd_cluster.engine.plan import service_order
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.types import Candidate, Request, Status, TokenOutput


@dataclass(slots=True)
class Change:
    """What has become of a group; all empty while beams are still to be computed.

    `started` and `ended` are beams that it has more or less than before; `tokens` is its answer, when it is over.
    """

    started: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)


class BeamGroup:
    """Lives as long as its beams do: each of them refers to it, and nobody else."""

    def __init__(self, leader: Request) -> None:
        self.search = BeamSearch(leader.sampling)
        self.beams = [leader]  # by index
        self.rows: dict[int, Sequence[Candidate]] = {}  # of the beams that are parked, by index


def advance(scheduler: Scheduler, beam: Request, row: Sequence[Candidate]) -> Change:
    """A running beam is computed, and these are its candidates. The first time it is the prompt's only sequence."""
    group = beam.beams
    if not isinstance(group, BeamGroup):
        group = beam.beams = BeamGroup(beam)
    scheduler.park(beam)
    group.rows[beam.index] = row
    if len(group.rows) < len(group.beams):
        return Change()
    growths = group.search.advance([group.rows[index] for index in range(len(group.beams))])
    group.rows.clear()
    before = group.beams
    group.beams = [] if group.search.is_over else regroup(scheduler, before, growths)
    change = Change(group.beams[len(before) :], before[len(group.beams) :])
    for ended in change.ended:
        scheduler.finish(ended)
    if group.search.is_over:
        change.tokens = answer(beam, group.search)
    return change


def start(scheduler: Scheduler, request: Request, first_tokens: Sequence[TokenOutput]) -> list[Request]:
    """A prompt has landed with the candidates for token one; returns its beams."""
    return [request, *advance(scheduler, request, candidates_of(first_tokens)).started]


def regroup(scheduler: Scheduler, before: Sequence[Request], growths: Sequence[Growth]) -> list[Request]:
    """Parked beams become those that `growths` says, by index; those that are too many keep nothing.

    A child whose parent's KV was swapped out or dropped waits to be admitted, and so does one that finds no place.
    """
    children = [_child(scheduler, before, index, growth) for index, growth in enumerate(growths)]
    for beam in before:
        scheduler.blocks.release(scheduler.held(beam.block_table))
        scheduler.swap.release(beam.swap_table)
        beam.block_table, beam.swap_table = [], []
    num_places = max(0, scheduler.max_num_seqs - scheduler.num_seqs)
    return [
        _go_on(scheduler, before[index] if index < len(before) else child, child, index < num_places)
        for index, child in enumerate(children)
    ]


def _child(scheduler: Scheduler, before: Sequence[Request], index: int, growth: Growth) -> Request:
    """As the beam will be; holds its parent's blocks beside the parent."""
    parent = before[growth.parent]
    table = parent.block_table and parent.block_table[: scheduler.num_blocks_for(parent.num_computed_tokens)]
    scheduler.blocks.share(scheduler.held(table))
    scheduler.swap.share(parent.swap_table)
    return replace(
        parent,
        index=index,
        output_token_ids=[*parent.output_token_ids, growth.token_id],
        block_table=list(table),
        swap_table=list(parent.swap_table),
        block_hashes=list(parent.block_hashes),
        sampler_state=None,
    )


def _go_on(scheduler: Scheduler, beam: Request, child: Request, has_place: bool) -> Request:
    """The beam of that index, which may be the child itself, as the child is; in its place in the scheduler."""
    for name in ("output_token_ids", "block_table", "swap_table", "block_hashes"):
        setattr(beam, name, getattr(child, name))
    beam.num_computed_tokens, beam.num_hashed_blocks = child.num_computed_tokens, child.num_hashed_blocks
    scheduler.requests[beam.key] = beam
    if beam.block_table and has_place:
        beam.status = Status.RUNNING
        scheduler.running.append(beam)
        return beam
    if beam.block_table:
        scheduler.blocks.release(scheduler.held(beam.block_table))
        beam.block_table, beam.num_computed_tokens, beam.num_hashed_blocks = [], 0, 0
    beam.status = Status.WAITING
    insort(scheduler.waiting, beam, key=service_order)
    return beam
