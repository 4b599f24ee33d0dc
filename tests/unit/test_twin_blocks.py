"""Twin blocks are recognized correctly: random sequences of few different tokens, over modelled memory."""

from __future__ import annotations

import random

from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.twin_blocks import TwinBlocks
from pd_cluster.types import Request, RequestSpec, Sampling

SIZE, NUM_BLOCKS = 4, 24
Memory = dict[tuple[int, int], tuple[int, ...]]  # (block, slot) -> tokens up to the one whose KV is there


class TwinWorld:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.blocks = BlockPool(NUM_BLOCKS, rests=False)
        self.twins = TwinBlocks(self.blocks, SIZE)
        self.memory: Memory = {}
        self.requests: list[Request] = []
        self.num_valid = self.num_shared = 0

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(count)]

    def start(self) -> None:
        """Starts a sequence with new blocks, or with blocks filled by another one, as shared by the prefix cache."""
        prompt, table = self.tokens(self.rng.randint(1, 14)), list[int]()
        if self.requests and self.rng.random() < 0.5:
            other = self.rng.choice(self.requests)
            num_blocks = self.rng.randint(0, (other.num_tokens - 1) // SIZE)
            prompt = other.token_ids(0, num_blocks * SIZE) + prompt
            table = other.tables[0][:num_blocks]
            self.num_shared += num_blocks
        num_missing = -(-len(prompt) // SIZE) - len(table)
        if num_missing <= self.blocks.num_available:
            self.blocks.share(table)
            request = Request("r", RequestSpec(prompt, Sampling()), tables=[table + self.blocks.take(num_missing)])
            self.requests.append(request)

    def grow(self, request: Request, count: int) -> None:
        num_missing = -(-(request.num_tokens + count) // SIZE) - len(request.tables[0])
        if 0 < num_missing <= self.blocks.num_available:
            request.tables[0] += self.blocks.take(num_missing)

    def write(self, request: Request, right: bool) -> None:
        """Computes missing tokens and drafts; then the sequence continues with some of the drafts."""
        start = self.check(request)
        drafts = self.tokens(self.rng.randint(0, 5))
        self.grow(request, len(drafts) + 2)
        drafts = drafts[: max(0, len(request.tables[0]) * SIZE - request.num_tokens - 2)]
        tokens = request.token_ids(0, request.num_tokens) + drafts
        stop = len(tokens) if self.rng.random() < 0.7 else self.rng.randint(start + 1, request.num_tokens)
        for at in range(start, stop):
            self.memory[request.tables[0][at // SIZE], at % SIZE] = tuple(tokens[: at + 1])
        self.twins.wrote(request, start, tokens[start:stop])
        assert self.check(request) == min(stop, request.num_tokens - 1)
        if len(request.tables[0]) * SIZE > len(tokens) + 1:
            request.output_token_ids += [*drafts, 1] if right else [1 - each for each in drafts[:1]] + [0]
            if right:
                assert self.check(request) == min(stop, request.num_tokens - 1)

    def check(self, request: Request) -> int:
        found = self.twins.num_valid(request)
        tokens = tuple(request.token_ids(0, request.num_tokens))
        assert found < len(tokens)
        for at in range(found):
            assert self.memory[request.tables[0][at // SIZE], at % SIZE] == tokens[: at + 1]
        self.num_valid += found
        return found

    def preempt(self, request: Request) -> None:
        if (num_blocks := len(request.tables[0])) <= self.blocks.num_available:
            self.blocks.release(request.tables[0])
            request.tables[0] = self.blocks.take(num_blocks)

    def end(self) -> None:
        request = self.requests.pop(self.rng.randrange(len(self.requests)))
        self.blocks.release(request.tables[0])


def test_twins_hold_what_they_are_said_to_hold() -> None:
    num_valid = num_shared = 0
    for seed in range(30):
        world = TwinWorld(seed)
        for _ in range(80):
            if not world.requests or world.rng.random() < 0.25:
                world.start()
            elif world.rng.random() < 0.2:
                world.end()
            elif world.rng.random() < 0.1:
                world.preempt(world.rng.choice(world.requests))
            else:
                world.write(world.rng.choice(world.requests), world.rng.random() < 0.5)
        num_valid, num_shared = num_valid + world.num_valid, num_shared + world.num_shared
    assert num_valid > 1000
    assert num_shared > 100
