"""How fast an engine has been recently, for routing's predictions. Numbers only, no clock of its own."""

from __future__ import annotations

from collections.abc import Sequence

from pd_cluster.engine.step.tally import Tallied
from pd_cluster.types import Request
from pd_cluster.wire import STEP_TOKENS_BOUNDS

MIN_PROMPT_TOKENS = 16  # a smaller step measures the cost of a step rather than the speed of prompts
DECAY = 0.95  # a step weighs half after 14 more


class StepPace:
    """Sums over steps, with the most weight on recent ones."""

    def __init__(self) -> None:
        self._prompt_tokens = self._prompt_s = 0.0
        self._num_decodes = self._decode_s = 0.0
        self._num_rows = self._num_tokens = 0.0
        self.step_tokens = Tallied(STEP_TOKENS_BOUNDS)

    def computed(self, chunks: Sequence[tuple[Request, int]], took_s: float, num_sampled: int) -> None:
        """Counts a step, which gave `num_sampled` tokens.

        A chunk of one token is a sequence's next one; longer chunks belong to prompts.
        """
        num_prompt_tokens = sum(num_tokens for _, num_tokens in chunks if num_tokens > 1)
        if chunks:
            self.step_tokens.add(sum(num_tokens for _, num_tokens in chunks))
        if num_prompt_tokens >= MIN_PROMPT_TOKENS:
            self._prompt_tokens = DECAY * self._prompt_tokens + num_prompt_tokens
            self._prompt_s = DECAY * self._prompt_s + took_s
        if any(num_tokens == 1 for _, num_tokens in chunks):
            self._num_decodes = DECAY * self._num_decodes + 1
            self._decode_s = DECAY * self._decode_s + took_s
            if not num_prompt_tokens:
                self._num_rows = DECAY * self._num_rows + len(chunks)
                self._num_tokens = DECAY * self._num_tokens + num_sampled

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._prompt_tokens / self._prompt_s if self._prompt_s else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Returns how many tokens a running sequence gets in a step: more than one with drafts."""
        return max(1.0, self._num_tokens / self._num_rows) if self._num_rows else 1.0

    @property
    def decode_step_s(self) -> float:
        return self._decode_s / self._num_decodes if self._num_decodes else 0.0
