"""An engine without torch for the explorer: the real scheduler, and memory that knows what every slot stands for.

A slot's content, in each layer, is the hash of all tokens up to the one that was written there: so a block that is
reused too early, shared wrongly, or committed although it was, is noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pd_cluster import wire
from pd_cluster.engine import beam_groups
from pd_cluster.engine.beams import BeamSearch, candidates_of, first_tokens_of
from pd_cluster.engine.plan import StepPlan
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.prefix import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.types import Candidate, Request, SamplingParams, Status, TokenOutput

NUM_LAYERS = 3


class Memory:
    """`slots[layer][block * block_size + offset]`; 0 before anything was written."""

    def __init__(self, blocks: BlockPool, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [[0] * (blocks.num_blocks * block_size) for _ in range(NUM_LAYERS)]
        self._blocks = blocks

    def slot(self, block_table: Sequence[int], position: int) -> int:
        return block_table[position // self.block_size] * self.block_size + position % self.block_size

    def read(self, piece: wire.KVPiece) -> list[list[int]]:
        """[num_layers][num_tokens]"""
        offset = piece.first_token // self.block_size * self.block_size
        at = [self.slot(piece.block_ids, p - offset) for p in range(piece.first_token, piece.stop_token)]
        return [[self.slots[layer][i] for i in at] for layer in range(piece.first_layer, piece.stop_layer)]

    def write(self, piece: wire.KVPiece, into: Sequence[int], content: list[list[int]]) -> None:
        """What lands, in blocks that must still be held for it."""
        assert all(self._blocks._holders[block] for block in into), f"{into} were released and are written"
        offset = piece.first_token // self.block_size * self.block_size
        for layer, values in zip(range(piece.first_layer, piece.stop_layer), content, strict=True):
            for position, value in zip(range(piece.first_token, piece.stop_token), values, strict=True):
                self.slots[layer][self.slot(into, position - offset)] = value

    def copy(self, source: int, target: int) -> None:
        size = self.block_size
        for layer in self.slots:
            layer[target * size : (target + 1) * size] = layer[source * size : (source + 1) * size]


def contents(request: Request, start: int, stop: int) -> list[int]:
    """What the slots of its tokens [start, stop) must hold."""
    found, value = [], 0
    for position, token in enumerate(request.token_ids(0, stop)):
        value = hash((value, token)) or 1
        if position >= start:
            found.append(value)
    return found


class Engine:
    """One life of one side. `legs` has the sequences of each request that have not ended."""

    def __init__(self, num_blocks: int, block_size: int, budget: int, caches: bool) -> None:
        prefix = PrefixScope("model", Numerics()) if caches else None
        blocks = BlockPool(num_blocks, rests=False)  # the worst case for whoever still reads or writes one
        self.scheduler = Scheduler(blocks, block_size, 6, budget, prefix)
        self.memory = Memory(blocks, block_size)
        self.legs: dict[str, list[Request]] = {}
        self.plan: StepPlan | None = None  # the step that runs now
        self.num_layers_done = 0

    def begin(self, plan: StepPlan) -> None:
        for kind, source, target in plan.moves:
            assert kind == "copy"
            self.memory.copy(source, target)
        self.plan, self.num_layers_done = plan, 0

    def compute_layer(self) -> None:
        """One layer of the step: every chunk reads what is before it and writes its own."""
        assert self.plan is not None
        layer = self.memory.slots[self.num_layers_done]
        for request, num_tokens in self.plan.chunks:
            start = request.num_computed_tokens
            self.check_layer(request, start, self.num_layers_done)
            values = contents(request, start, start + num_tokens)
            for position, value in enumerate(values, start):
                layer[self.memory.slot(request.block_table, position)] = value
        self.num_layers_done += 1

    def end_step(self) -> tuple[StepPlan, list[Request]]:
        """The plan that was computed, and who caught up."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        return plan, self.scheduler.computed(plan)

    def check_memory(self, request: Request, num_tokens: int) -> None:
        """The slots of its first tokens hold what these tokens stand for, and nothing newer of anybody."""
        for layer in range(NUM_LAYERS):
            self.check_layer(request, num_tokens, layer)

    def check_layer(self, request: Request, num_tokens: int, layer: int) -> None:
        slots = self.memory.slots[layer]
        found = [slots[self.memory.slot(request.block_table, p)] for p in range(num_tokens)]
        assert found == contents(request, 0, num_tokens), f"{request.key} holds foreign KV in layer {layer}"


class Ends:
    """How each request's leg ended on one side, over all its lives."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.outcome: dict[str, str] = {}

    def add(self, name: str, outcome: str) -> None:
        self.count[name] += 1
        self.outcome[name] = outcome


def first_tokens(request: Request) -> list[TokenOutput]:
    """What P samples, one a sequence; of several sequences one ends with it, and all do when max_tokens is 1."""
    sampling = request.sampling
    if sampling.beam_width:
        return first_tokens_of(request, candidates(Request("", request.prompt_token_ids, sampling)))
    tokens = []
    for index in range(sampling.n):
        ends = sampling.max_tokens == 1 or (sampling.n > 1 and index == len(request.prompt_token_ids) % sampling.n)
        token_id = 100 + 10 * index + len(request.prompt_token_ids)
        tokens.append(TokenOutput(request.request_id, 0, index, 0, token_id, "length" if ends else None))
    return tokens


def candidates(beam: Request) -> list[Candidate]:
    """How a beam may go on: a function of its tokens."""
    start = hash(tuple(beam.token_ids(0, beam.num_tokens))) % 97
    width = beam.sampling.beam_width
    row = [Candidate(100 + start + at, -float((start + 31 * at) % 97 + 1), at == width) for at in range(width + 1)]
    return sorted(row, key=lambda candidate: (-candidate.logprob, candidate.token_id))


def ends_at_once(request: Request, tokens: Sequence[TokenOutput]) -> bool:
    """Whether there is nothing left for D."""
    if not request.sampling.beam_width:
        return all(token.finish_reason is not None for token in tokens)
    search = BeamSearch(request.sampling)
    search.advance([candidates_of(tokens)])
    return search.is_over


def decode_step(engine: Engine) -> list[Request]:
    """A whole step on D; returns the sequences that ended."""
    engine.begin(engine.scheduler.plan())
    for _ in range(NUM_LAYERS):
        engine.compute_layer()
    ended = []
    for request in engine.end_step()[1]:
        if request.sampling.beam_width:
            change = beam_groups.advance(engine.scheduler, request, candidates(request))
            engine.legs[request.request_id] += change.started
            ended += change.ended
            continue
        request.output_token_ids.append(7 + request.index)
        if len(request.output_token_ids) >= request.sampling.max_tokens:
            engine.scheduler.finish(request)
            ended.append(request)
    return ended


def abort(engine: Engine, sequences: list[Request], tell: object) -> None:
    """As a worker drops a leg."""
    for request in sequences:
        tell.abort(request)  # type: ignore[attr-defined]
        if request.key in engine.scheduler.requests and request.status is not Status.LANDING:
            engine.scheduler.finish(request)


def make_sampling(max_tokens: int, n: int, beam_width: int) -> SamplingParams:
    if beam_width:
        return SamplingParams(max_tokens=max_tokens, n=min(n, beam_width), beam_width=beam_width, temperature=0.0)
    return SamplingParams(max_tokens=max_tokens, n=n)
