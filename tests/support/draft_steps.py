"""Computes known sequences one token per step, and checks that rows with drafts equal these steps bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pd_cluster.kv.block_major import BlockMajor
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.types import Request, RequestSpec, Sampling

MOST_ROWS = 12
NUM_BESIDE = 33  # length of a prompt that is computed in the same step
HIGHEST_ID = 250
Case = tuple[list[int], bool]  # rows of each sequence, and whether the step also computes a prompt


@dataclass(frozen=True, slots=True)
class Known:
    """A sequence with all its tokens; the first `start` are computed before the single steps begin."""

    request: Request
    token_ids: list[int]
    start: int

    def go_to(self, num_computed: int, num_known: int) -> None:
        self.request.num_computed_tokens = num_computed
        self.request.output_token_ids = self.token_ids[len(self.request.prompt_token_ids) : num_known]


def random_orders(starts: Sequence[int]) -> list[RequestSpec]:
    """Returns requests with prompts of one token."""
    return [RequestSpec([1 + at], Sampling()) for at in range(len(starts))]


class Steps:
    """Computes each sequence alone: its first tokens (`starts`) in one chunk, then `num_steps` single tokens.

    Tokens after the prompts of `orders` are random. Blocks are scattered over the pool.
    """

    def __init__(
        self,
        runner: ModelRunner,
        orders: Sequence[RequestSpec],
        starts: Sequence[int],
        seed: int = 0,
        num_steps: int = MOST_ROWS,
    ) -> None:
        rng = random.Random(seed)
        self._runner = runner
        self._bytes = [memory_of(pool).bytes for pool in runner.pools]  # each [num_blocks, block_nbytes]
        free = [rng.sample(range(pool.num_blocks), pool.num_blocks) for pool in runner.pools]

        def request_of(name: str, order: RequestSpec, num_tokens: int) -> Request:
            num_blocks = runner.pool.layout.num_blocks_for(num_tokens)
            return Request(name, order, tables=[[own.pop() for _ in range(num_blocks)] for own in free])

        self.sequences: list[Known] = []
        for at, (order, start) in enumerate(zip(orders, starts, strict=True)):
            num_behind = start + num_steps - len(order.prompt_token_ids)
            token_ids = order.prompt_token_ids + [rng.randrange(1, HIGHEST_ID) for _ in range(num_behind)]
            self.sequences.append(Known(request_of(f"s{at}", order, start + num_steps), token_ids, start))
        beside = [rng.randrange(1, HIGHEST_ID) for _ in range(NUM_BESIDE)]
        self._beside = request_of("beside", RequestSpec(beside, Sampling()), NUM_BESIDE)
        for each in self.sequences:
            each.go_to(0, each.start)
            runner.forward([(each.request, each.start)])
        self._before = [each.clone() for each in self._bytes]
        self._alone = [self._steps_of(each) for each in self.sequences]

    def _held(self, request: Request) -> torch.Tensor:
        """Returns all bytes of a sequence's blocks."""
        pairs = zip(self._bytes, request.tables, strict=True)
        return torch.cat([each[table].flatten() for each, table in pairs])

    def _steps_of(self, known: Known) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns each step's logits [1, vocab_size] and the content of the sequence's blocks afterwards."""
        found = []
        for stop in range(known.start + 1, len(known.token_ids) + 1):
            known.go_to(stop - 1, stop)
            logits = self._runner.forward([(known.request, 1)]).logits.clone()
            found.append((logits, self._held(known.request)))
        return found

    def compare(self, *cases: Case) -> None:
        """Computes each case's rows of all sequences in one step, and asserts that they equal the single steps."""
        for counts, has_beside in cases:
            self._compare(counts, has_beside)

    def _compare(self, counts: Sequence[int], has_beside: bool) -> None:
        for each, before in zip(self._bytes, self._before, strict=True):
            each.copy_(before)
        given = zip(self.sequences, self._alone, counts, strict=True)
        going = [(known, steps[:num_rows]) for known, steps, num_rows in given if num_rows]
        for known, _ in going:
            known.go_to(known.start, known.start + 1)
        chunks = [(known.request, 1) for known, _ in going]
        if has_beside:
            chunks.insert(1, (self._beside, NUM_BESIDE))
        drafts = {
            known.request: known.token_ids[known.start + 1 : known.start + len(steps)]
            for known, steps in going
            if len(steps) > 1
        }
        logits = self._runner.forward(chunks, None, drafts).logits
        behind = len(chunks)
        for known, steps in going:
            first = [request for request, _ in chunks].index(known.request)
            rows = [first, *range(behind, behind + len(steps) - 1)]
            behind += len(steps) - 1
            expected = torch.cat([each for each, _ in steps])
            what = f"{counts} rows, prompt beside: {has_beside}, behind {known.start} tokens"
            error = (logits[rows] - expected).abs().amax(1).tolist()
            assert torch.equal(logits[rows], expected), f"{what}: logits differ by {error}"
            assert torch.equal(self._held(known.request), steps[-1][1]), f"{what}: KV differs"
        assert behind == len(logits)


def memory_of(pool: KVPool) -> BlockMajor:
    assert isinstance(pool.memory, BlockMajor)
    return pool.memory


def cases_of(*counts: int) -> list[Case]:
    """Returns cases for two sequences: each count alone, beside the other sequence, and beside a prompt."""
    found: list[Case] = []
    for count in counts:
        found += [([count, 0], False), ([count, max(1, count - 2)], False), ([count, MOST_ROWS + 1 - count], True)]
    return found


EACH_COUNT: list[Case] = [([count, 0], False) for count in range(1, MOST_ROWS + 1)]
