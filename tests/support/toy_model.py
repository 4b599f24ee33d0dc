"""A model whose logits are a hash of all tokens found in its KV memory: wrong memory gives other tokens.

Memory is modelled as the meaning of each block's last written token: all tokens up to it, with the request's salt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pd_cluster.devices.device import CPU
from pd_cluster.engine.step.plan import Move, StateCopy
from pd_cluster.model.batch import Encoded, RunnerOutput
from pd_cluster.model.sampling.on_device import choose, tell
from pd_cluster.model.sampling.sampler import Sampler, SamplingRow
from pd_cluster.model.sampling.tokens import After, DeviceTokens
from pd_cluster.model.step_input import NO_DRAFTS, Drafts
from pd_cluster.types import Logprobs, Order, Request, Sampling
from tests.support.reference_beams import search_everything
from tests.support.reference_sampler import adjusted, reference

VOCAB_SIZE = 40
HIDDEN_SIZE = 8
EOS = frozenset({3})
_TABLE = torch.randn(997, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 3


def logits_after(token_ids: Sequence[int]) -> torch.Tensor:
    """Returns [vocab_size] logits; a function of all tokens before."""
    return _TABLE[random.Random(repr(tuple(token_ids))).randrange(len(_TABLE))]


def hidden_state_after(token_ids: Sequence[int]) -> torch.Tensor:
    """Returns [hidden_size] numbers; a function of all tokens before."""
    return logits_after(token_ids)[:HIDDEN_SIZE]


class ToyRunner:
    """Runs chunks against modelled memory, and asserts that they read what they should."""

    eos_token_ids = EOS
    vocab_size = VOCAB_SIZE
    encoded = Encoded()

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self.goes_ahead = False  # whether steps run without the host's knowledge
        self.memory: list[tuple[int, ...] | None] = [None] * (num_blocks + 1)  # one extra for padding
        self.host: list[tuple[int, ...] | None] = [None] * num_swap_blocks
        self.num_moves = {"copy": 0, "out": 0, "in": 0}

    def move(self, moves: Sequence[Move]) -> None:
        for kind, source, target, _ in moves:
            self.num_moves[kind] += 1
            read = self.host if kind == "in" else self.memory
            write = self.host if kind == "out" else self.memory
            write[target] = read[source]

    def forward(
        self,
        chunks: list[tuple[Request, int]],
        on_layer: Callable[[int], None] | None = None,
        drafts: Drafts = NO_DRAFTS,
        keeps: Sequence[StateCopy] = (),
    ) -> RunnerOutput:
        for request, num_tokens in chunks:
            self._read(request, tuple(request.token_ids(0, request.num_computed_tokens)))
            known = [*request.token_ids(0, request.num_tokens), *drafts.get(request, ())]
            stop = request.num_computed_tokens + num_tokens + len(drafts.get(request, ()))
            for position in range(request.num_computed_tokens, stop):
                self.memory[request.tables[0][position // self.block_size]] = tuple(known[: position + 1])
        rows, states = [], []
        for request, num_tokens in chunks:
            stop = request.num_computed_tokens + num_tokens
            ends = range(stop - request.num_logit_rows(num_tokens) + 1, stop + 1)
            rows += [logits_after(request.token_ids(0, end)) for end in ends]
            ends = range(stop - request.num_hidden_rows(num_tokens) + 1, stop + 1)
            states += [hidden_state_after(request.token_ids(0, end)) for end in ends]
        for request, _ in chunks:
            own, behind = request.token_ids(0, request.num_tokens), list(drafts.get(request, ()))
            assert all(0 <= token_id < VOCAB_SIZE for token_id in behind)
            rows += [logits_after([*own, *behind[: at + 1]]) for at in range(len(behind))]
        return RunnerOutput(
            torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE),
            torch.stack(states) if states else torch.empty(0, HIDDEN_SIZE),
        )

    def can_launch(self, requests: Sequence[Request]) -> bool:
        return True

    def launch(
        self,
        chunks: Sequence[tuple[Request, int]],
        after: After | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> DeviceTokens:
        """Acts as a device of one layer that computes at once: it knows `after`, which the requests do not."""
        known = [request.token_ids(0, request.num_tokens) for request, _ in chunks]
        unknown = [False] * len(chunks)
        if after is not None:
            at = [i for i, row in enumerate(after.rows) if row is not None]
            last = after.tokens.rows([row for row in after.rows if row is not None]).tolist()
            for i, token_id in zip(at, last, strict=True):
                known[i].append(token_id)
                unknown[i] = True
        for (request, _), tokens in zip(chunks, known, strict=True):
            self._read(request, tuple(tokens[: request.num_computed_tokens]))
        for (request, num_tokens), tokens in zip(chunks, known, strict=True):
            start = request.num_computed_tokens
            assert start + num_tokens <= len(tokens)
            for position in range(start, start + num_tokens):
                self.memory[request.tables[0][position // self.block_size]] = tuple(tokens[: position + 1])
        if on_layer is not None:
            on_layer(1)
        ready = [i for i, (r, n) in enumerate(chunks) if r.num_computed_tokens + n == len(known[i])]
        if not ready:
            return DeviceTokens(torch.empty(0, dtype=torch.int64), CPU)
        logits = torch.stack([logits_after(known[i]) for i in ready])
        requests, last_ids = [chunks[i][0] for i in ready], torch.tensor([known[i][-1] for i in ready])
        is_ahead = [unknown[i] for i in ready]
        token_ids = choose(logits, requests, last_ids if any(is_ahead) else None, EOS, CPU, is_ahead)
        return DeviceTokens(token_ids, CPU, tell(logits, token_ids, requests, CPU))

    def _read(self, request: Request, tokens: tuple[int, ...]) -> None:
        least = 0 if self.window is None else max(0, len(tokens) - self.window + 1)  # first token still seen
        stops = range(self.block_size, len(tokens) + self.block_size, self.block_size)
        expected = [tokens[: min(stop, len(tokens))] for stop in stops if stop > least]
        seen = slice(least // self.block_size, len(stops))
        found = [self.memory[block] for block in request.tables[0][seen]]
        if found and found[-1] is not None:
            found[-1] = found[-1][: len(expected[-1])]  # what drafts left behind it is overwritten
        assert found == expected, f"{request.key} reads foreign KV: {found} instead of {expected}"


def generate_alone(prompt: list[int], sampling: Sampling) -> list[list[int]]:
    """Returns the n outputs, one token at a time, without any engine and by the slow sampler."""
    if sampling.beam_width:
        return search_everything(lambda tokens: logprobs_after(prompt, tokens, sampling), sampling, ends_of(sampling))
    outputs = []
    for index in range(sampling.n):
        request = Request("alone", Order(prompt, sampling), index=index)
        while True:
            output = request.output_token_ids
            logits = logits_after(request.token_ids(0, request.num_tokens)).numpy()
            output.append(reference(logits, SamplingRow(request, index, len(output)), EOS))
            if request.finish_reason_after(output[-1], len(output), EOS) is not None:
                break
        outputs.append(output)
    return outputs


def told_alone(prompt: list[int], output: list[int], sampling: Sampling) -> list[Logprobs | None]:
    """Returns the logprobs of each token of an output."""
    if sampling.logprobs is None or not output:
        return [None] * len(output)
    logits = torch.stack([logits_after([*prompt, *output[:position]]) for position in range(len(output))])
    return [*Sampler(VOCAB_SIZE, EOS).prompt_logprobs(logits, output, sampling.logprobs)]


def logprobs_after(prompt: list[int], tokens: tuple[int, ...], sampling: Sampling) -> list[float]:
    """Returns logprobs of every token that may follow, after masks and penalties."""
    request = Request("alone", Order(prompt, sampling), output_token_ids=list(tokens))
    logits = logits_after(request.token_ids(0, request.num_tokens)).numpy()
    left = adjusted(logits, SamplingRow(request, 0, len(tokens)), EOS).astype(np.float64)
    left -= left.max()
    values: list[float] = (left - np.log(np.exp(left).sum())).tolist()
    return values


def ends_of(sampling: Sampling) -> set[int]:
    return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)}
