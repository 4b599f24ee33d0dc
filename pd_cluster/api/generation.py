"""One prompt of a request as it goes along. Knows nothing of who serves it or of HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pd_cluster.api.sequence import Piece, Sequence
from pd_cluster.cluster.stream import Stream
from pd_cluster.errors import GenerationError
from pd_cluster.parsers.reply import ReplyReader
from pd_cluster.types import Logprobs, PromptOutput, SamplingParams


def _stop_nothing(index: int) -> None:
    """Until a request is on its way there is nothing to stop."""


def _fail_nothing(error: GenerationError) -> None:
    """Likewise."""


def _no_calls() -> str:
    raise AssertionError("an answer without a reader makes no calls")


@dataclass(slots=True)
class Generation:
    """One request as it goes along: what it asked, how far its sequences are, who serves it."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    sequences: list[Sequence]
    num_choices: int  # of the sequences, the best ones are the answer
    first_choice: int = 0  # the number of its first one, among those of all prompts of a request
    every_token: bool = False  # a piece for each token, even when there is no text yet
    is_prompt_only: bool = False  # max_tokens 0, with echo
    cache_salt: str = ""
    batch: str = ""  # the name of many of which none is wanted early
    session: str = ""  # requests of one session like to meet the same caches
    priority: int = 0
    new_reader: Callable[[], ReplyReader] | None = None  # of a choice's text, where it is more than content
    new_call_id: Callable[[], str] = _no_calls
    calls_finish: bool = False  # a choice that makes calls says so by its finish_reason
    prompt: PromptOutput | None = None  # known no later than the first piece
    served_by: list[str] = field(default_factory=list)
    stop: Callable[[int], None] = _stop_nothing
    fail: Callable[[GenerationError], None] = _fail_nothing
    client_id: str = ""  # what the answer calls itself
    received_s: float | None = None

    @property
    def usage(self) -> dict[str, Any]:
        """Of the sequences that are answered; cached tokens as soon as they are known."""
        num_prompt = len(self.prompt_token_ids)
        num_output = sum(sequence.num_tokens for sequence in self.sequences)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        if self.prompt is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.prompt.num_cached_tokens}
        return usage

    @property
    def has_stops(self) -> bool:
        """Whether a sequence may end by what its text is."""
        return any(sequence.stops for sequence in self.sequences)

    @property
    def prompt_logprobs(self) -> list[Logprobs | None]:
        return self.prompt.logprobs if self.prompt is not None else []

    def routed(self, stream: Stream) -> None:
        self.served_by = [stream.prefill.name, stream.decode.name]
        self.stop = stream.stop
        self.fail = stream.inbox.put

    def prompted(self, prompt: PromptOutput) -> None:
        self.prompt = prompt

    def keep_best(self) -> None:
        """Leaves the sequences with the highest mean logprob of their tokens, best first, numbered anew."""
        ranked = sorted(self.sequences, key=lambda sequence: -sequence.mean_logprob)
        self.sequences = ranked[: self.num_choices]

    def piece_of(self, sequence: Sequence, text: str) -> Piece:
        """What came of a sequence since its last piece, by the number that its choice has in the answer."""
        return sequence.piece(text, self.first_choice + sequence.index)


def usage_of(generations: list[Generation]) -> dict[str, Any]:
    """Of a request with several prompts. Cached tokens are told when all are known."""
    usages = [generation.usage for generation in generations]
    if len(usages) == 1:
        return usages[0]
    total: dict[str, Any] = {
        name: sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    if all("prompt_tokens_details" in usage for usage in usages):
        num_cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        total["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return total
