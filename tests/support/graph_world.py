"""Compares decode steps that run as graphs with the same steps run eagerly."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.graphs.decode_graphs import DecodeGraphs, GraphRules, Run
from pd_cluster.model.inputs.forward_batch import batch_of
from pd_cluster.model.inputs.step_input import StepInput, step_input
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.language_model.causal_lm import CausalLM
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import VOCAB_SIZE

BLOCK_SIZE, NUM_BLOCKS, MOST, MAX_LEN = 4, 60, 12, 24


class World:
    """Sequences in two pools with the same content, of which one is decoded by graphs."""

    def __init__(
        self, model: CausalLM, seed: int = 0, refuse: Callable[[int], Exception | None] = lambda n: None
    ) -> None:
        """`refuse`: returns the error that the n-th capture (from 0) raises, or None."""
        self.model, self.rng, self._refuse = model, random.Random(seed), refuse
        layout = layout_of(model.caches, BLOCK_SIZE, "float32")
        self.eager, self.pool = KVPool(layout, NUM_BLOCKS), KVPool(layout, NUM_BLOCKS)
        self.runs: list[int] = []  # the number of replays of each graph
        self.num_asked = 0
        self.graphs = self.use()
        self.requests: list[Request] = []

    def use(self, most: int = MOST, longest: int = MAX_LEN, **given: Any) -> DecodeGraphs:
        """Makes new graphs, which `decode` uses from now on."""
        self.graphs = DecodeGraphs(self.model, self.pool, self.capture, GraphRules(most, longest, **given))
        return self.graphs

    def capture(self, run: Run) -> Run:
        error = self._refuse(self.num_asked)
        self.num_asked += 1
        if error is not None:
            raise error
        which = len(self.runs)
        self.runs.append(0)

        def again() -> torch.Tensor:
            self.runs[which] += 1
            return run()

        return again

    def start(self, num_requests: int) -> None:
        self.eager.data.copy_(self.pool.data)
        free = list(range(NUM_BLOCKS))
        self.rng.shuffle(free)
        for i in range(num_requests):
            prompt = [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.randrange(1, 9))]
            self.requests.append(
                Request(str(i), RequestSpec(prompt, Sampling()), tables=[[free.pop() for _ in range(MAX_LEN // 4)][:4]])
            )
        step = step_input([(r, len(r.prompt_token_ids)) for r in self.requests], BLOCK_SIZE)
        assert self.graphs.compute(step) is None or all(len(r.prompt_token_ids) == 1 for r in self.requests)
        for pool in (self.eager, self.pool):
            self.model(batch_of(step, pool))
        for request in self.requests:
            request.num_computed_tokens = len(request.prompt_token_ids)

    def next_step(self) -> StepInput:
        """Returns a step that computes the next token of each sequence."""
        for request in self.requests:
            request.output_token_ids.append(self.rng.randrange(VOCAB_SIZE))
        return step_input([(request, 1) for request in self.requests], BLOCK_SIZE)

    def decode(self) -> None:
        """Decodes one token of some sequences, in random order."""
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


def one_token_each(num_seqs: int, context_len: int = 1, first: int = 0) -> StepInput:
    """Returns a decode step over separate contexts of that length, in consecutive blocks from `first` on."""
    requests = []
    num_blocks = -(-context_len // BLOCK_SIZE)
    for i in range(num_seqs):
        table = [(first + i) * num_blocks + at for at in range(num_blocks)]
        order = RequestSpec([1] * context_len, Sampling())
        requests.append(Request(str(i), order, num_computed_tokens=context_len - 1, tables=[table]))
    return step_input([(request, 1) for request in requests], BLOCK_SIZE)
