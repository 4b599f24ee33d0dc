"""Made-up workers limited by a clock: a number of prompt tokens per second, a number of sequences at a time.

    python -m benchmarks.peers.paced_workers SPEC

They take almost no CPU time, so that the measurement shows how the scheduler chooses which requests to serve.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from benchmarks.peers.router_workers import Leg, Worker, main
from pd_cluster import wire
from pd_cluster.types import LegEnd, PromptOutput, TokenOutput


class PacedWorker(Worker):
    def __init__(self, *arguments: Any) -> None:
        self._free_s = 0.0  # when the previous prompt is computed
        self._waiting: deque[str] = deque()  # transfer ids that have landed, without a place
        self._num_running = 0  # sequences
        super().__init__(*arguments)  # begins to report its load

    def load(self) -> wire.Load:
        """Returns the load, on the mailbox's thread."""
        spec = self._spec
        is_prefill = self.me.role == "prefill"
        queued = (
            sum(len(leg.submit.order.prompt_token_ids) for leg in list(self._expected.values())) if is_prefill else 0
        )
        return wire.Load(
            num_running=self._num_running,
            num_waiting=len(self._expected) if is_prefill else len(self._waiting),
            num_blocks=4096,
            num_free_blocks=4096,
            num_queued_tokens=queued,
            prefill_tokens_per_s=spec.prefill_tokens_per_s if is_prefill else 0.0,
            decode_step_s=0.0 if is_prefill else spec.step_s,
            links=self.links,
        )

    def _aborted(self, transfer_id: str) -> None:
        leg = self._running.get(transfer_id)
        if leg is not None and transfer_id not in self._waiting:
            self._num_running -= leg.submit.order.sampling.n
        if transfer_id in self._waiting:
            self._waiting.remove(transfer_id)
        super()._aborted(transfer_id)

    def prefill_step(self) -> None:
        """Finishes the prompts that are computed by now, one after another."""
        ends, self._ends = self._ends, {}
        for conn in ends:
            self._send(conn, [], ends[conn], [])
        while self._expected:
            transfer_id, leg = next(iter(self._expected.items()))
            took_s = len(leg.submit.order.prompt_token_ids) / self._spec.prefill_tokens_per_s
            done_s = max(self._free_s, leg.read_s) + took_s
            if done_s > time.monotonic():
                return
            self._free_s = done_s
            del self._expected[transfer_id]
            self._computed(transfer_id, leg)

    def _computed(self, transfer_id: str, leg: Leg) -> None:
        submit = leg.submit
        tokens = list(self._tokens(leg, 0))
        if tokens[0].finish_reason is None:
            self._handed_over(submit.peer, transfer_id)
        self._ends.setdefault(leg.conn, []).append(LegEnd(submit.request_id, submit.attempt))
        self._send(leg.conn, tokens, [], [PromptOutput(submit.request_id, submit.attempt)])

    def _tokens(self, leg: Leg, position: int) -> Iterator[TokenOutput]:
        token = self._token(leg, position)
        for index in range(leg.submit.order.sampling.n):
            yield TokenOutput(token.request_id, token.attempt, index, position, token.token_id, token.finish_reason)

    def landed(self, transfer_id: str) -> None:
        super().landed(transfer_id)
        self._waiting.append(transfer_id)

    def decode_step(self) -> None:
        """Sends a token of each sequence with a place, of a new one that of its prompt, which prefill has sent, too.

        Places are assigned in the order in which prompts landed.
        """
        spec = self._spec
        while self._waiting and (leg := self._running.get(self._waiting[0])) is not None:
            if self._num_running and self._num_running + leg.submit.order.sampling.n > spec.max_num_seqs:
                break
            self._waiting.popleft()
            self._num_running += leg.submit.order.sampling.n
        without = set(self._waiting)
        told: dict[str, list[TokenOutput]] = {}
        for transfer_id in [each for each in self._running if each not in without]:
            leg = self._running[transfer_id]
            tokens = list(self._tokens(leg, leg.num_tokens))
            leg.num_tokens += 1
            told.setdefault(leg.conn, []).extend(tokens)
            if tokens[-1].finish_reason is not None:
                del self._running[transfer_id]
                self._num_running -= leg.submit.order.sampling.n
        for conn, tokens in told.items():
            self._send(conn, tokens, [], [])


if __name__ == "__main__":
    main(PacedWorker)
