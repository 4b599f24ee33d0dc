"""Sequences that are decoded twice, through graphs and without them, and compared."""

from __future__ import annotations

import random

import torch

from pd_cluster.kv.pool import KVPool
from pd_cluster.model import graphs as module
from pd_cluster.model.batch import batch_of, step_input
from pd_cluster.model.causal_lm import CausalLM
from pd_cluster.model.declared import layout_of
from pd_cluster.model.graphs import DecodeGraphs
from pd_cluster.types import Order, Request, Sampling
from tests.support.checkpoints import VOCAB_SIZE

BLOCK_SIZE, NUM_BLOCKS, MOST, MAX_LEN = 4, 60, 12, 24


class World:
    """Sequences in two pools that hold the same; one is decoded through graphs."""

    def __init__(self, model: CausalLM, seed: int) -> None:
        self.model, self.rng = model, random.Random(seed)
        layout = layout_of(model.caches, BLOCK_SIZE, "float32")
        self.eager, self.pool = KVPool(layout, NUM_BLOCKS), KVPool(layout, NUM_BLOCKS)
        self.runs: list[int] = []  # how often each graph's launches were made
        self.graphs = DecodeGraphs(model, self.pool, MOST, MAX_LEN, self.capture)
        self.requests: list[Request] = []

    def capture(self, run: module.Run) -> module.Run:
        which = len(self.runs)
        self.runs.append(0)

        def again() -> torch.Tensor:
            self.runs[which] += 1
            return run()

        return again

    def start(self, num_requests: int) -> None:
        free = list(range(NUM_BLOCKS))
        self.rng.shuffle(free)
        for i in range(num_requests):
            prompt = [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randrange(1, 9))]
            self.requests.append(
                Request(str(i), Order(prompt, Sampling()), block_table=[free.pop() for _ in range(MAX_LEN // 4)][:4])
            )
        step = step_input([(r, len(r.prompt_token_ids)) for r in self.requests], BLOCK_SIZE)
        assert self.graphs.compute(step) is None or all(len(r.prompt_token_ids) == 1 for r in self.requests)
        for pool in (self.eager, self.pool):
            self.model(batch_of(step, pool))
        for request in self.requests:
            request.num_computed_tokens = len(request.prompt_token_ids)

    def decode(self) -> None:
        """One token each of some, in any order."""
        chosen = self.rng.sample(self.requests, self.rng.randrange(1, len(self.requests) + 1))
        for request in chosen:
            request.output_token_ids.append(self.rng.randrange(VOCAB_SIZE))
        step = step_input([(request, 1) for request in chosen], BLOCK_SIZE)
        expected = self.model(batch_of(step, self.eager))
        actual = self.graphs.compute(step)
        assert actual is not None
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        for request in chosen:
            request.num_computed_tokens += 1
