"""The pairs that a draft head still has to compute for each sequence, and the states of the preceding tokens.

Pairs of a prompt are written in the step that computes the prompt, so that they are handed over with its layers. Pairs
of decoded tokens are written when the head drafts, or when a block becomes full, because a block with a known hash must
be complete in all layers. If another process or another sequence has computed a token, the token's states are missing;
then the next step computes the token once more, as a row that writes no keys and values. Beams take over each other's
tokens and blocks, so their states are never kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.draft.draft_head import FIRST_KEY, DraftHead
from pd_cluster.model.inputs.forward_batch import ForwardBatch, PairRows, batch_of
from pd_cluster.model.inputs.step_input import Drafts, RowCollector
from pd_cluster.types import Request


class HeadOutput(NamedTuple):
    """The outputs of the last pair in each chunk."""

    logits: torch.Tensor  # [num_chunks, vocab_size] float32, of the model's tokens
    states: torch.Tensor  # [num_chunks, hidden_size]


@dataclass(slots=True)
class PairChunk:
    """Consecutive pairs of a sequence: tokens from index `start` on, each with the states of the token before it."""

    request: Request
    start: int
    token_ids: Sequence[int]
    states: torch.Tensor  # [num_tokens, hidden_size]


@dataclass(slots=True)
class _WaitingPairs:
    """`rows`: the tapped values of tokens from `first` on, each [width]. The pairs of tokens up to `first` are written.

    `num_computed`: the number of computed tokens when this was recorded. If the request now has fewer, it has restarted
    in other blocks.
    """

    first: int
    num_computed: int
    rows: list[torch.Tensor] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.first + len(self.rows)


class HeadPairs:
    """The pairs of each sequence that are not written yet; see `num_paired`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._waiting: WeakKeyDictionary[Request, _WaitingPairs] = WeakKeyDictionary()

    def lacking(self, chunks: Iterable[tuple[Request, int]]) -> list[Request]:
        """Returns the requests whose last token before the chunk must be computed once more, because its states are
        missing.
        """
        return [request for request, _ in chunks if self._lacks(request)]

    def _lacks(self, request: Request) -> bool:
        start, waiting = request.num_computed_tokens, self._waiting.get(request)
        if not 0 < start < num_paired(request):
            return False
        return waiting is None or not waiting.num_computed <= start <= waiting.stop

    def unpaired_blocks(self, chunks: Iterable[tuple[Request, int]]) -> list[int]:
        """Returns the blocks that tokens without pairs start to fill; there, the head's layer must be cleared."""
        found: list[int] = []
        for request, num_tokens in chunks:
            if not has_embeddings(request):
                start, stop = request.num_computed_tokens, request.num_computed_tokens + num_tokens
                found += request.tables[0][-(-start // self._block_size) : -(-stop // self._block_size)]
        return found

    def take(
        self, chunks: Sequence[tuple[Request, int]], drafts: Drafts, lacking: Sequence[Request], taps: torch.Tensor
    ) -> list[PairChunk]:
        """Takes the tapped values of a step, [num_tokens, width], in the order of `step_input`; returns the pairs to
        compute.

        `PairChunk.states` has the tapped values. Call this before the chunks count as computed.
        """
        num_tokens, num_drafts = sum(number for _, number in chunks), sum(map(len, drafts.values()))
        again = dict(zip(lacking, taps[num_tokens + num_drafts :], strict=True))
        found: list[PairChunk] = []
        at, draft_at = 0, num_tokens
        for request, number in chunks:
            own = taps[at : at + number]
            token_ids = drafts.get(request, ())
            if token_ids:
                own = torch.cat((own, taps[draft_at : draft_at + len(token_ids)]))
            at, draft_at = at + number, draft_at + len(token_ids)
            if (left := num_paired(request) - request.num_computed_tokens) > 0:
                found += self._continued(request, min(number, left), token_ids, own[:left], again.get(request))
        return found

    def _continued(
        self, request: Request, number: int, drafts: Sequence[int], own: torch.Tensor, before: torch.Tensor | None
    ) -> Iterable[PairChunk]:
        """Records `own`, the states of a chunk and its drafts; yields the pairs that must be written now."""
        start = request.num_computed_tokens
        stop, computed = start + len(own), start + number
        waiting = self._waiting.get(request)
        if start == 0 or waiting is None:
            waiting = _WaitingPairs(0, 0)
        if before is not None:
            waiting = _WaitingPairs(start - 1, start, [before])
        del waiting.rows[start - waiting.first :]
        waiting.num_computed = computed
        kept = own[number - 1 :].clone()  # a copy, so that the memory of all rows of the step can be freed
        if number == 1 and stop // self._block_size == start // self._block_size and _may_wait(request):
            waiting.rows += kept.unbind()
        else:
            token_ids = [*request.token_ids(start, computed), *drafts]
            first = max(waiting.first + 1, FIRST_KEY)
            before_ids = request.token_ids(first, start) if first < start else []
            states = torch.cat((*(row[None] for row in waiting.rows), own[:-1]))
            if first < stop:
                yield PairChunk(request, first, [*before_ids, *token_ids[max(0, first - start) :]], states)
            # Drafts may be rejected, so their pairs are written again when the drafts are accepted.
            waiting.first, waiting.rows = computed - 1, [*kept.unbind()]
        if request.sampling.beam_width:
            self._waiting.pop(request, None)
        else:
            self._waiting[request] = waiting

    def waiting(self, request: Request) -> PairChunk | None:
        """Returns the unwritten pairs up to a sequence's last token, with tapped values as states; call `wrote` after
        writing them.

        Returns None if states of earlier tokens are missing.
        """
        waiting, stop = self._waiting.get(request), request.num_tokens
        if waiting is None or self._lacks(request) or not waiting.first < stop - 1 <= waiting.stop:
            return None
        rows, first = waiting.rows[: stop - 1 - waiting.first], waiting.first + 1
        return PairChunk(request, first, request.token_ids(first, stop), torch.stack(rows))

    def wrote(self, request: Request) -> None:
        """Records that the pairs of all the request's tokens are written."""
        self._waiting[request] = _WaitingPairs(request.num_tokens - 1, request.num_tokens - 1)


def has_embeddings(request: Request) -> bool:
    """Whether all tokens of the request use the model's embeddings: no pictures, no virtual tokens."""
    return not request.order.images and not request.num_virtual_tokens


def num_paired(request: Request) -> int:
    """Returns how many leading tokens have pairs: the tokens before the first picture; none with virtual tokens.

    The tokens before a picture have pairs, because their blocks may be shared with other requests.
    """
    if has_embeddings(request):
        return request.most_tokens
    return 0 if request.num_virtual_tokens else request.order.spans[0].start


def _may_wait(request: Request) -> bool:
    """Whether the next token's pair can be written later, because its block is neither handed over nor shared."""
    is_decoded = request.num_computed_tokens >= len(request.prompt_token_ids)
    return is_decoded and request.leg != "prefill" and not request.sampling.beam_width


def write_pairs(head: DraftHead, pool: KVPool, chunks: Sequence[PairChunk]) -> None:
    """Writes the keys and values of pairs; their states are tapped values."""
    _compute(head, pool, chunks, head.project(_states(chunks)), 0)


def draft_pairs(
    head: DraftHead, pool: KVPool, chunks: Sequence[PairChunk], are_tapped: bool, vocab_size: int
) -> HeadOutput:
    """Writes the pairs, and returns the head's outputs after the last pair of each chunk.

    The chunks' states are tapped values if `are_tapped`, otherwise hidden states that an earlier call returned.
    """
    states = _states(chunks)
    logits, batch = _compute(head, pool, chunks, head.project(states) if are_tapped else states, 1)
    assert batch.hidden is not None
    assert batch.hidden.states is not None
    return HeadOutput(head.in_model_vocabulary(logits.float(), vocab_size), batch.hidden.states)


def _states(chunks: Sequence[PairChunk]) -> torch.Tensor:
    return torch.cat([chunk.states for chunk in chunks])


def _compute(
    head: DraftHead, pool: KVPool, chunks: Sequence[PairChunk], states: torch.Tensor, num_outputs: int
) -> tuple[torch.Tensor, ForwardBatch]:
    rows = RowCollector(pool.layout.block_size)
    for chunk in chunks:
        rows.add(chunk.request, chunk.start, chunk.token_ids, num_outputs, num_outputs)
    batch = batch_of(rows.step(), pool)
    batch.pairs = PairRows(states)
    return head.model(batch), batch
