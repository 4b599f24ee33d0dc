"""Runs steps of hybrid models without an engine: pools for each group of layers, and sequences with tables in all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self
from unittest.mock import patch

import torch

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.language_model.cache_declaration import layouts_of
from pd_cluster.model.language_model.causal_lm import CausalLM, PlainCausalLM
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.loading.load_proof import probe_batch
from pd_cluster.model.loading.model_loader import load_model
from pd_cluster.types import Request, RequestSpec, Sampling

BLOCK_SIZE = 16
NUM_STATES = 8


def load_modules(folder: Path) -> PlainCausalLM:
    """Loads a model as transformers' modules, even if its layers could be fused."""
    with patch("pd_cluster.model.loading.model_loader.can_fuse", return_value=False):
        model = load_model(Checkpoint.open(str(folder)), "float32", CPU)
    assert isinstance(model, PlainCausalLM)
    return model


def load_fused(folder: Path) -> FusedCausalLM:
    """Loads a model with fused layers; loading compares them with transformers' modules."""
    model = load_model(Checkpoint.open(str(folder)), "float32", CPU)
    assert isinstance(model, FusedCausalLM)
    return model


class StateWorld:
    """Computes steps of a model; a context manager. Group 0 has keys and values, group 1 states."""

    def __init__(self, model: CausalLM, num_blocks: int = 64) -> None:
        self.model, self._stack = model, ExitStack()
        keys, states = layouts_of(model.caches, BLOCK_SIZE, "float32")
        self.keys = self._stack.enter_context(KVPool(keys, num_blocks))
        self.states = self._stack.enter_context(KVPool(states, NUM_STATES))
        self._free = list(reversed(range(num_blocks)))

    def request(self, ids: list[int], state: int, of: Request | None = None, num_computed: int = 0) -> Request:
        """Returns a sequence whose state is in block `state`, cleared or continuing from the sequence `of`."""
        shared = num_computed // BLOCK_SIZE
        assert num_computed == shared * BLOCK_SIZE
        blocks = [] if of is None else of.tables[0][:shared]
        blocks += [self._free.pop() for _ in range(-(-len(ids) // BLOCK_SIZE) - shared)]
        if of is None:
            self.states.clear([state])
        request = Request(f"{state}", RequestSpec(ids, Sampling()), tables=[blocks, [state]])
        request.num_computed_tokens = num_computed
        return request

    def step(
        self, requests: Sequence[Request], nums: Sequence[int], keeps: Sequence[tuple[int, int, int]] = ()
    ) -> list[torch.Tensor]:
        """Computes the given number of tokens of each request; returns the logits of each, [num_tokens, vocab_size]."""
        batch = probe_batch(list(zip(requests, nums, strict=True)), [self.keys, self.states], keeps)
        batch.sample_rows = torch.arange(batch.num_tokens)
        with torch.inference_mode():
            logits = self.model(batch)
        for request, num_tokens in zip(requests, nums, strict=True):
            request.num_computed_tokens += num_tokens
        return list(torch.split(logits, list(nums)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def row_errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns [num_tokens]: each row's error of logits, relative to the row's deviation from its mean."""
    expected = expected - expected.mean(-1, keepdim=True)
    actual = actual - actual.mean(-1, keepdim=True)
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
