"""An engine without torch for random exploration: the real scheduler, over memory that records each slot's content.

In each layer a slot's content is a hash of all tokens up to its own and, in a draft head's layer, of the head. A state
is a hash of all tokens so far, and 0 before the first. So blocks that are reused too early, shared wrongly or
committed nevertheless are detected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pd_cluster import wire
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.step import beam_groups
from pd_cluster.engine.step.beam_search import BeamSearch, candidates_of, first_tokens_of
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.kv_layout import COLD, KVLayout, keys_and_values
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.types import Candidate, Request, RequestSpec, Sampling, Status, TokenOutput
from pd_cluster.wire import RuleName

NUM_LAYERS = 3  # layers of a model with one group; with several groups, each has two
WINDOW = 5
Kinds = tuple[RuleName, ...]
MAX_NUM_SEQS = 6


def layouts_of(kinds: Kinds, block_size: int, draft_head: str = "") -> list[KVLayout]:
    """Returns the layouts of a model in which layers of different groups alternate."""
    num_draft = int(bool(draft_head))
    whole = KVLayout(NUM_LAYERS + num_draft, 1, keys_and_values(1), block_size, "float32", draft_head=draft_head)
    whole = replace(whole, num_draft_layers=num_draft)
    if len(kinds) == 1:
        return [whole]
    found = []
    for at, kind in enumerate(kinds):
        layout = replace(whole, num_layers=2, rule=kind, layers=(at, at + len(kinds)))
        layout = replace(layout, window=WINDOW) if kind == "window" else layout
        found.append(replace(layout, block_size=1) if kind == "state" else layout)
    return found


class Memory:
    """One group's memory: `slots[layer][block * block_size + offset]`; 0 before the first write."""

    def __init__(self, blocks: BlockPool, layout: KVLayout) -> None:
        self.layout, self.block_size = layout, layout.block_size
        self.slots = [[0] * (blocks.num_blocks * layout.block_size) for _ in range(layout.num_layers)]
        self._blocks = blocks

    def slot(self, block_table: Sequence[int], position: int) -> int:
        return block_table[position // self.block_size] * self.block_size + position % self.block_size

    def read(self, piece: wire.KVPiece) -> list[list[int]]:
        """Returns [num_layers][num_tokens]."""
        offset = piece.first_token // self.block_size * self.block_size
        at = [self.slot(piece.block_ids, p - offset) for p in range(piece.first_token, piece.stop_token)]
        return [[self.slots[layer][i] for i in at] for layer in range(piece.first_layer, piece.stop_layer)]

    def write(self, piece: wire.KVPiece, into: Sequence[int], content: list[list[int]]) -> None:
        """Writes a received piece into blocks, which must still be held."""
        assert not self._blocks.num_unheld(into), f"{into} were released and are written"
        offset = piece.first_token // self.block_size * self.block_size
        for layer, values in zip(range(piece.first_layer, piece.stop_layer), content, strict=True):
            for position, value in zip(range(piece.first_token, piece.stop_token), values, strict=True):
                self.slots[layer][self.slot(into, position - offset)] = value

    def clear(self, blocks: Sequence[int], first_layer: int = 0) -> None:
        """Clears blocks from layer `first_layer` on; they must still be held."""
        assert not self._blocks.num_unheld(blocks), f"{blocks} were released and are cleared"
        for layer in self.slots[first_layer:]:
            for block in blocks:
                layer[block * self.block_size : (block + 1) * self.block_size] = [0] * self.block_size

    def contents(self, request: Request, start: int, stop: int, layer: int) -> list[int]:
        """Returns the expected content, in one layer, of the slots of the request's tokens [start, stop)."""
        value = self.layout.layers[layer] if self.layout.layers else 0
        if layer >= self.layout.num_model_layers:
            value = ord(self.layout.draft_head)
        found = []
        for position, token in enumerate(request.token_ids(0, stop)):
            value = hash((value, token)) or 1
            if position >= start:
                found.append(value)
        return found

    def state(self, request: Request, num_tokens: int, layer: int) -> int:
        """Returns the expected state after the request's first `num_tokens` tokens."""
        return self.contents(request, num_tokens - 1, num_tokens, layer)[0] if num_tokens else 0

    def holds(self, request: Request, piece: wire.KVPiece) -> bool:
        """Whether the piece has been computed for this request; a state must include the whole prompt."""
        layers, num_prompt = range(piece.first_layer, piece.stop_layer), len(request.prompt_token_ids)
        if self.layout.holds.is_state:
            return self.read(piece) == [[self.state(request, num_prompt, layer)] for layer in layers]
        return self.read(piece) == [
            self.contents(request, piece.first_token, piece.stop_token, layer) for layer in layers
        ]

    def copy(self, source: int, target: int) -> None:
        size = self.block_size
        for layer in self.slots:
            layer[target * size : (target + 1) * size] = layer[source * size : (source + 1) * size]


class Engine:
    """One side's engine, from start to death. `legs` maps each request to its sequences that have not ended."""

    def __init__(
        self, num_blocks: int, budget: int, caches: bool, layouts: Sequence[KVLayout], num_states: int = 0
    ) -> None:
        prefix = PrefixScope("model", Numerics(), layouts[0].draft_head) if caches else None
        counts = [num_states if each.holds.is_state else num_blocks for each in layouts]
        pools = [BlockPool(count, rests=False) for count in counts]  # blocks are reused at once: the worst case
        groups = [LayerGroup(pool, each.holds) for pool, each in zip(pools, layouts, strict=True)]
        self.scheduler = StepScheduler(groups, StepSizes(layouts[0].block_size, MAX_NUM_SEQS, budget), prefix)
        self.memories = [Memory(pool, each) for pool, each in zip(pools, layouts, strict=True)]
        own = [(at, layer) for at, each in enumerate(layouts) for layer in range(each.num_layers)]
        self.order = sorted(own, key=lambda of: layouts[of[0]].layers[of[1]] if layouts[of[0]].layers else of[1])
        self.legs: dict[str, list[Request]] = {}
        self.plan: StepPlan | None = None  # the step in progress
        self.num_computed_layers = 0

    @property
    def is_computed(self) -> bool:
        return self.num_computed_layers == len(self.order)

    @property
    def num_layers_done(self) -> int:
        """Returns the number of attention layers that the step has written."""
        done = (self.memories[group] for group, _ in self.order[: self.num_computed_layers])
        return sum(not memory.layout.holds.is_state for memory in done)

    def begin(self, plan: StepPlan) -> None:
        for kind, source, target, group in plan.moves:
            assert kind in ("copy", "clear")
            memory = self.memories[group]
            memory.copy(source, target) if kind == "copy" else memory.clear([target])
        self.plan, self.num_computed_layers = plan, 0

    def compute_layer(self) -> None:
        """Computes the next layer: every chunk reads its prefix and writes its own slots."""
        assert self.plan is not None
        group, layer = self.order[self.num_computed_layers]
        memory = self.memories[group]
        slots = memory.slots[layer]
        for request, num_tokens in self.plan.chunks:
            start, table = request.num_computed_tokens, request.tables[group]
            self.check_layer(request, start, group, layer)
            if memory.layout.holds.is_state:
                slots[table[0]] = memory.state(request, start + num_tokens, layer)
                for keep in [each for each in self.plan.keeps if each.request is request]:
                    slots[keep.block] = memory.state(request, keep.num_tokens, layer)
                continue
            values = memory.contents(request, start, start + num_tokens, layer)
            for position, value in enumerate(values, start):
                slots[memory.slot(table, position)] = value
        self.num_computed_layers += 1

    def end_step(self) -> tuple[StepPlan, list[Request]]:
        """Ends the step; returns its plan, and the requests whose known tokens are all computed."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        return plan, self.scheduler.computed(plan)

    def check_memory(self, request: Request, num_tokens: int) -> None:
        """Asserts that the slots of the request's first tokens hold these tokens' content and nothing newer."""
        for group, layer in self.order if num_tokens else []:
            self.check_layer(request, num_tokens, group, layer)

    def check_layer(self, request: Request, num_tokens: int, group: int, layer: int) -> None:
        """Checks everything that the token after the first `num_tokens` reads.

        A prompt that landed without a head's layer has zeros there, except for tokens computed on this side.
        """
        memory = self.memories[group]
        if memory.layout.holds.is_state:
            found, expected = (
                [memory.slots[layer][request.tables[group][0]]],
                [memory.state(request, num_tokens, layer)],
            )
        else:
            first = memory.layout.holds.first_seen(num_tokens)
            found = self.slots_of(request, first, num_tokens, layer, group)
            expected = memory.contents(request, first, num_tokens, layer)
        if layer >= memory.layout.num_model_layers and request.kv_precision == COLD:
            expected = [value and right for value, right in zip(found, expected, strict=True)]
        assert found == expected, f"{request.key} holds foreign KV in layer {layer} of group {group}"

    def slots_of(self, request: Request, start: int, stop: int, layer: int, group: int = 0) -> list[int]:
        memory = self.memories[group]
        return [memory.slots[layer][memory.slot(request.tables[group], p)] for p in range(start, stop)]


class Ends:
    """Records how each request's leg ended on one side, across restarts of its engine."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.outcome: dict[str, str] = {}

    def add(self, name: str, outcome: str) -> None:
        self.count[name] += 1
        self.outcome[name] = outcome


def first_tokens(request: Request) -> list[TokenOutput]:
    """Returns P's first tokens, one for each sequence: the end of one of several sequences, or of all if max_tokens is
    1.
    """
    sampling = request.sampling
    if sampling.beam_width:
        return first_tokens_of(request, candidates(Request("", RequestSpec(request.prompt_token_ids, sampling))))
    tokens = []
    for index in range(sampling.n):
        ends = sampling.max_tokens == 1 or (sampling.n > 1 and index == len(request.prompt_token_ids) % sampling.n)
        token_id = 100 + 10 * index + len(request.prompt_token_ids)
        tokens.append(TokenOutput(request.request_id, 0, index, 0, token_id, "length" if ends else None))
    return tokens


def candidates(beam: Request) -> list[Candidate]:
    """Returns a beam's continuations, which are a function of its tokens."""
    start = hash(tuple(beam.token_ids(0, beam.num_tokens))) % 97
    width = beam.sampling.beam_width
    row = [Candidate(100 + start + at, -float((start + 31 * at) % 97 + 1), at == width) for at in range(width + 1)]
    return sorted(row, key=lambda candidate: (-candidate.logprob, candidate.token_id))


def ends_at_once(request: Request, tokens: Sequence[TokenOutput]) -> bool:
    """Returns whether the request ends with P's tokens, so that D has nothing to do."""
    if not request.sampling.beam_width:
        return all(token.finish_reason is not None for token in tokens)
    search = BeamSearch(request.sampling)
    search.advance([candidates_of(tokens)])
    return search.is_over


def decode_step(engine: Engine) -> list[Request]:
    """Runs one whole step on D; returns the sequences that ended."""
    engine.begin(engine.scheduler.plan())
    while not engine.is_computed:
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
    """Aborts a leg's sequences as a worker does."""
    for request in sequences:
        tell.abort(request)  # type: ignore[attr-defined]
        if request.key in engine.scheduler.requests and request.status is not Status.LANDING:
            engine.scheduler.finish(request)


def make_sampling(max_tokens: int, n: int, beam_width: int) -> Sampling:
    if beam_width:
        return Sampling(max_tokens=max_tokens, n=min(n, beam_width), beam_width=beam_width, temperature=0.0)
    return Sampling(max_tokens=max_tokens, n=n)
