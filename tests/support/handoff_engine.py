"""An engine without torch for the explorer: the real scheduler, and memory that knows what every slot stands for.

A slot's content, in each layer, is the hash of all tokens up to the one written there, and in a draft head's layer of
the head, too. Blocks reused too early, shared wrongly, or committed in spite of that, are therefore noticed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pd_cluster import wire
from pd_cluster.engine.step import beam_groups
from pd_cluster.engine.step.beams import BeamSearch, candidates_of, first_tokens_of
from pd_cluster.engine.step.group import LayerGroup
from pd_cluster.engine.step.plan import StepPlan
from pd_cluster.engine.step.scheduler import StepScheduler, StepSizes
from pd_cluster.kv.blocks import BlockPool
from pd_cluster.kv.layout import COLD, KVLayout, keys_and_values
from pd_cluster.kv.prefix import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.types import Candidate, Order, Request, Sampling, Status, TokenOutput

NUM_LAYERS = 3  # the model's own


class Memory:
    """`slots[layer][block * block_size + offset]`; 0 before the first write. A draft head has the last layer."""

    def __init__(self, blocks: BlockPool, block_size: int, draft_head: str = "") -> None:
        self.block_size = block_size
        num_draft = int(bool(draft_head))
        self.layout = KVLayout(
            NUM_LAYERS + num_draft,
            *(1, keys_and_values(1), block_size, "float32"),
            num_draft_layers=num_draft,
            draft_head=draft_head,
        )
        self.slots = [[0] * (blocks.num_blocks * block_size) for _ in range(self.layout.num_layers)]
        self._blocks = blocks

    def slot(self, block_table: Sequence[int], position: int) -> int:
        return block_table[position // self.block_size] * self.block_size + position % self.block_size

    def read(self, piece: wire.KVPiece) -> list[list[int]]:
        """Returns [num_layers][num_tokens]."""
        offset = piece.first_token // self.block_size * self.block_size
        at = [self.slot(piece.block_ids, p - offset) for p in range(piece.first_token, piece.stop_token)]
        return [[self.slots[layer][i] for i in at] for layer in range(piece.first_layer, piece.stop_layer)]

    def write(self, piece: wire.KVPiece, into: Sequence[int], content: list[list[int]]) -> None:
        """Writes a received piece into blocks that must still be held for it."""
        assert not self._blocks.num_unheld(into), f"{into} were released and are written"
        offset = piece.first_token // self.block_size * self.block_size
        for layer, values in zip(range(piece.first_layer, piece.stop_layer), content, strict=True):
            for position, value in zip(range(piece.first_token, piece.stop_token), values, strict=True):
                self.slots[layer][self.slot(into, position - offset)] = value

    def clear(self, blocks: Sequence[int], first_layer: int) -> None:
        """Clears layers from `first_layer` on of blocks that must still be held."""
        assert not self._blocks.num_unheld(blocks), f"{blocks} were released and are cleared"
        for layer in self.slots[first_layer:]:
            for block in blocks:
                layer[block * self.block_size : (block + 1) * self.block_size] = [0] * self.block_size

    def contents(self, request: Request, start: int, stop: int, layer: int) -> list[int]:
        """Returns the expected content of the slots of its tokens [start, stop) in a layer."""
        found, value = [], 0 if layer < NUM_LAYERS else ord(self.layout.draft_head)
        for position, token in enumerate(request.token_ids(0, stop)):
            value = hash((value, token)) or 1
            if position >= start:
                found.append(value)
        return found

    def holds(self, request: Request, piece: wire.KVPiece) -> bool:
        """Whether the piece has been computed for this request."""
        layers = range(piece.first_layer, piece.stop_layer)
        return self.read(piece) == [
            self.contents(request, piece.first_token, piece.stop_token, layer) for layer in layers
        ]

    def copy(self, source: int, target: int) -> None:
        size = self.block_size
        for layer in self.slots:
            layer[target * size : (target + 1) * size] = layer[source * size : (source + 1) * size]


class Engine:
    """One life of one side. `legs` has the sequences of each request that have not ended."""

    def __init__(self, num_blocks: int, block_size: int, budget: int, caches: bool, draft_head: str = "") -> None:
        prefix = PrefixScope("model", Numerics(), draft_head) if caches else None
        blocks = BlockPool(num_blocks, rests=False)  # the worst case for late readers and writers
        self.scheduler = StepScheduler([LayerGroup(blocks)], StepSizes(block_size, 6, budget), prefix)
        self.memory = Memory(blocks, block_size, draft_head)
        self.num_layers = self.memory.layout.num_layers
        self.legs: dict[str, list[Request]] = {}
        self.plan: StepPlan | None = None  # the step in progress
        self.num_layers_done = 0

    def begin(self, plan: StepPlan) -> None:
        for kind, source, target, _ in plan.moves:
            assert kind == "copy"
            self.memory.copy(source, target)
        self.plan, self.num_layers_done = plan, 0

    def compute_layer(self) -> None:
        """Computes one layer of the step: every chunk reads its prefix and writes its own slots."""
        assert self.plan is not None
        layer = self.memory.slots[self.num_layers_done]
        for request, num_tokens in self.plan.chunks:
            start = request.num_computed_tokens
            self.check_layer(request, start, self.num_layers_done)
            values = self.memory.contents(request, start, start + num_tokens, self.num_layers_done)
            for position, value in enumerate(values, start):
                layer[self.memory.slot(request.tables[0], position)] = value
        self.num_layers_done += 1

    def end_step(self) -> tuple[StepPlan, list[Request]]:
        """Returns the plan that was computed, and the requests that caught up."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        return plan, self.scheduler.computed(plan)

    def check_memory(self, request: Request, num_tokens: int) -> None:
        """Asserts that the slots of its first tokens hold these tokens' content, and nothing newer."""
        for layer in range(self.num_layers):
            self.check_layer(request, num_tokens, layer)

    def check_layer(self, request: Request, num_tokens: int, layer: int) -> None:
        """A prompt that landed without a head's layer has nothing there, but for what was computed here."""
        found = self.slots_of(request, 0, num_tokens, layer)
        expected = self.memory.contents(request, 0, num_tokens, layer)
        if layer >= NUM_LAYERS and request.kv_precision == COLD:
            expected = [value and right for value, right in zip(found, expected, strict=True)]
        assert found == expected, f"{request.key} holds foreign KV in layer {layer}"

    def slots_of(self, request: Request, start: int, stop: int, layer: int) -> list[int]:
        slots = self.memory.slots[layer]
        return [slots[self.memory.slot(request.tables[0], p)] for p in range(start, stop)]


class Ends:
    """How each request's leg ended on one side, over all its lives."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.outcome: dict[str, str] = {}

    def add(self, name: str, outcome: str) -> None:
        self.count[name] += 1
        self.outcome[name] = outcome


def first_tokens(request: Request) -> list[TokenOutput]:
    """Returns P's samples, one per sequence; of several sequences one ends with it, and all do if max_tokens is 1."""
    sampling = request.sampling
    if sampling.beam_width:
        return first_tokens_of(request, candidates(Request("", Order(request.prompt_token_ids, sampling))))
    tokens = []
    for index in range(sampling.n):
        ends = sampling.max_tokens == 1 or (sampling.n > 1 and index == len(request.prompt_token_ids) % sampling.n)
        token_id = 100 + 10 * index + len(request.prompt_token_ids)
        tokens.append(TokenOutput(request.request_id, 0, index, 0, token_id, "length" if ends else None))
    return tokens


def candidates(beam: Request) -> list[Candidate]:
    """Returns a beam's continuations, a function of its tokens."""
    start = hash(tuple(beam.token_ids(0, beam.num_tokens))) % 97
    width = beam.sampling.beam_width
    row = [Candidate(100 + start + at, -float((start + 31 * at) % 97 + 1), at == width) for at in range(width + 1)]
    return sorted(row, key=lambda candidate: (-candidate.logprob, candidate.token_id))


def ends_at_once(request: Request, tokens: Sequence[TokenOutput]) -> bool:
    """Returns whether nothing is left for D."""
    if not request.sampling.beam_width:
        return all(token.finish_reason is not None for token in tokens)
    search = BeamSearch(request.sampling)
    search.advance([candidates_of(tokens)])
    return search.is_over


def decode_step(engine: Engine) -> list[Request]:
    """Runs a whole step on D; returns the sequences that ended."""
    engine.begin(engine.scheduler.plan())
    for _ in range(engine.num_layers):
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
    """Drops a leg as a worker does."""
    for request in sequences:
        tell.abort(request)  # type: ignore[attr-defined]
        if request.key in engine.scheduler.requests and request.status is not Status.LANDING:
            engine.scheduler.finish(request)


def make_sampling(max_tokens: int, n: int, beam_width: int) -> Sampling:
    if beam_width:
        return Sampling(max_tokens=max_tokens, n=min(n, beam_width), beam_width=beam_width, temperature=0.0)
    return Sampling(max_tokens=max_tokens, n=n)
