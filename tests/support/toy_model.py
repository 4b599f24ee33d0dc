"""A model whose logits are a hash of all earlier tokens, and which asserts that its memory holds exactly these tokens.

Memory is modelled by groups of layers; see toy_memory.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pd_cluster.devices.device import CPU
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.step_plan import Move
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.model.inputs.forward_batch import EncoderTotals, RunnerOutput
from pd_cluster.model.inputs.step_input import NO_DRAFTS, Drafts
from pd_cluster.model.sampling.device_sampling import choose, tell
from pd_cluster.model.sampling.device_tokens import After, DeviceTokens
from pd_cluster.model.sampling.sampler import Sampler, SamplingRow
from pd_cluster.types import Logprobs, Request, RequestSpec, Sampling, StateCopy
from tests.support.reference_beams import search_everything
from tests.support.reference_sampler import adjusted, reference
from tests.support.toy_memory import ToyMemory

VOCAB_SIZE = 40
HIDDEN_SIZE = 8
EOS = frozenset({3})
_TABLE = torch.randn(997, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 3


def logits_after(token_ids: Sequence[int]) -> torch.Tensor:
    """Returns [vocab_size] logits, a function of all these tokens."""
    return _TABLE[random.Random(repr(tuple(token_ids))).randrange(len(_TABLE))]


def hidden_state_after(token_ids: Sequence[int]) -> torch.Tensor:
    """Returns a hidden state [hidden_size], a function of all these tokens."""
    return logits_after(token_ids)[:HIDDEN_SIZE]


class ToyRunner:
    """Runs chunks on modelled memory, and asserts that they read the right content."""

    eos_token_ids = EOS
    vocab_size = VOCAB_SIZE
    encoded = EncoderTotals()

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0) -> None:
        """Makes a runner with one group of layers that see all tokens; `over` makes others."""
        self.goes_ahead = False  # whether steps are launched ahead of the host
        self.memories = _memories([LayerGroup(BlockPool(num_blocks), swap=BlockPool(num_swap_blocks))], block_size)
        self.num_moves = {"copy": 0, "out": 0, "in": 0, "clear": 0}
        self.num_kept = 0  # number of states copied during or after a step

    @classmethod
    def over(cls, groups: Sequence[LayerGroup], block_size: int) -> ToyRunner:
        """Returns a runner with the memory of these groups, and of the first group's tier."""
        runner = cls(0, block_size)
        runner.memories = _memories(groups, block_size)
        return runner

    def move(self, moves: Sequence[Move]) -> None:
        for kind, source, target, group in moves:
            self.num_moves[kind] += 1
            self.memories[group].move(kind, source, target)

    def forward(
        self,
        chunks: list[tuple[Request, int]],
        on_layer: Callable[[int], None] | None = None,
        drafts: Drafts = NO_DRAFTS,
        keeps: Sequence[StateCopy] = (),
    ) -> RunnerOutput:
        assert not (drafts and any(each.rule.is_state for each in self.memories))
        for request, num_tokens in chunks:
            known = [*request.token_ids(0, request.num_tokens), *drafts.get(request, ())]
            stop = request.num_computed_tokens + num_tokens + len(drafts.get(request, ()))
            self._compute(
                request, known[:stop], [(each.num_tokens, each.block) for each in keeps if each[0] is request]
            )
        assert {keep.request for keep in keeps} <= {request for request, _ in chunks}
        self.num_kept += len(keeps)
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
        """Acts as a device with one layer that computes at once; `after` has the tokens that requests still lack."""
        known = [request.token_ids(0, request.num_tokens) for request, _ in chunks]
        unknown = [False] * len(chunks)
        if after is not None:
            at = [i for i, row in enumerate(after.rows) if row is not None]
            last = after.tokens.rows([row for row in after.rows if row is not None]).tolist()
            for i, token_id in zip(at, last, strict=True):
                known[i].append(token_id)
                unknown[i] = True
        for (request, num_tokens), tokens in zip(chunks, known, strict=True):
            stop = request.num_computed_tokens + num_tokens
            assert stop <= len(tokens)
            self._compute(request, tokens[:stop])
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

    def _compute(self, request: Request, tokens: list[int], keeps: Sequence[tuple[int, int]] = ()) -> None:
        """Reads the request's computed tokens, and computes the rest of `tokens`."""
        for each in self.memories:
            each.read(request, tuple(tokens[: request.num_computed_tokens]))
            each.write(request, tokens, request.num_computed_tokens, keeps)


def _memories(groups: Sequence[LayerGroup], block_size: int) -> list[ToyMemory]:
    sizes = [(each.blocks.num_blocks, each.swap.num_blocks, each.blocks.tier) for each in groups]
    return [
        ToyMemory(at, num_blocks, block_size, num_swapped + (0 if tier is None else tier.num_slots), groups[at].rule)
        for at, (num_blocks, num_swapped, tier) in enumerate(sizes)
    ]


def generate_alone(prompt: list[int], sampling: Sampling) -> list[list[int]]:
    """Generates the n outputs one token at a time, without an engine and by the slow sampler."""
    if sampling.beam_width:
        return search_everything(lambda tokens: logprobs_after(prompt, tokens, sampling), sampling, ends_of(sampling))
    outputs = []
    for index in range(sampling.n):
        request = Request("alone", RequestSpec(prompt, sampling), index=index)
        while True:
            output = request.output_token_ids
            logits = logits_after(request.token_ids(0, request.num_tokens)).numpy()
            output.append(reference(logits, SamplingRow(request, index, len(output)), EOS))
            if request.finish_reason_after(output[-1], len(output), EOS) is not None:
                break
        outputs.append(output)
    return outputs


def told_alone(prompt: list[int], output: list[int], sampling: Sampling) -> list[Logprobs | None]:
    """Returns the expected logprobs of each token of an output."""
    if sampling.logprobs is None or not output:
        return [None] * len(output)
    logits = torch.stack([logits_after([*prompt, *output[:position]]) for position in range(len(output))])
    return [*Sampler(VOCAB_SIZE, EOS).prompt_logprobs(logits, output, sampling.logprobs)]


def logprobs_after(prompt: list[int], tokens: tuple[int, ...], sampling: Sampling) -> list[float]:
    """Returns the logprobs of all next tokens, after masks and penalties."""
    request = Request("alone", RequestSpec(prompt, sampling), output_token_ids=list(tokens))
    logits = logits_after(request.token_ids(0, request.num_tokens)).numpy()
    left = adjusted(logits, SamplingRow(request, 0, len(tokens)), EOS).astype(np.float64)
    left -= left.max()
    values: list[float] = (left - np.log(np.exp(left).sum())).tolist()
    return values


def ends_of(sampling: Sampling) -> set[int]:
    return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS)}
