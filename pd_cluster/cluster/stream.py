"""A request as the router follows it: its sequences, what was delivered of each, and what that leaves to do.

Pure but for the queue that its reader waits at. Knows nothing of instances' states or of who is chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pd_cluster import wire
from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.policy import Ask
from pd_cluster.cluster.prefixes import Prompt
from pd_cluster.errors import GenerationError
from pd_cluster.types import PromptOutput, Resumed, SamplingParams, TokenOutput


@dataclass(frozen=True, slots=True)
class Request:
    """What a request asks for, as every attempt at it is told."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    session: str = ""
    priority: int = 0

    @property
    def num_output_tokens(self) -> int:
        """What its output counts as, for routing: few get as long as they may."""
        return self.sampling.num_sequences * min(self.sampling.max_tokens, 256)


def ask_of(request: Request) -> Ask:
    """What routing knows of it."""
    prompt = Prompt(request.prompt_token_ids, request.cache_salt)
    return Ask(prompt, request.num_output_tokens, request.session)


@dataclass(frozen=True, slots=True)
class Setback:
    """An attempt has ended before its request. `error` is what the reader gets when there is no other."""

    error: GenerationError


@dataclass(slots=True)
class Sequence:
    """One of a request's n sequences. `arrived` holds tokens that came before an earlier one."""

    index: int = 0
    token_ids: list[int] = field(default_factory=list)  # delivered
    arrived: dict[int, TokenOutput] = field(default_factory=dict)
    is_finished: bool = False  # its last token has come, perhaps before others; or it was stopped
    is_over: bool = False  # its last token has been read, or it was stopped

    @property
    def num_delivered(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class Stream:
    """One request on its way, and the reader's handle on it: who serves it, and `stop`."""

    request_id: str
    attempt: int
    legs: dict[str, Instance]  # conn -> instance, of the legs that have not ended
    request: Request
    ask: Ask  # what routing knows of it
    prefill: Instance
    decode: Instance
    sequences: list[Sequence]
    send: Callable[[str, wire.Body], None]
    prompted: Callable[[PromptOutput], None] = lambda prompt: None
    is_prompted: bool = False
    has_prefill_spoken: bool = False  # and so has told of the prompt, which the first token must not come before
    queue: asyncio.Queue[TokenOutput | Exception | Setback | None] = field(default_factory=asyncio.Queue)
    deaths_s: list[float] = field(default_factory=list)  # when attempts of it ended with an instance's death
    num_moves: int = 0  # attempts that ended because somebody wanted their instance empty
    weights: dict[str, int] = field(default_factory=dict)  # conn -> tokens of work, of the same legs

    def put(self, token: TokenOutput) -> None:
        """Takes a token, of whatever leg and in whatever order; what was delivered already is dropped."""
        if token.attempt != self.attempt or not 0 <= token.index < len(self.sequences):
            return
        sequence = self.sequences[token.index]
        if sequence.is_over or token.position < sequence.num_delivered:
            return
        sequence.arrived.setdefault(token.position, token)
        if token.finish_reason is not None:
            sequence.is_finished = True
        self.release([sequence])

    def release(self, sequences: list[Sequence]) -> None:
        """Delivers each sequence's tokens in order of position, once the prompt's own outputs must have come."""
        if not self.has_prefill_spoken and any(member is self.prefill for member in self.legs.values()):
            return
        for sequence in sequences:
            while (token := sequence.arrived.pop(sequence.num_delivered, None)) is not None:
                sequence.token_ids.append(token.token_id)
                self.queue.put_nowait(token)

    def put_prompt(self, prompt: PromptOutput) -> None:
        if prompt.attempt == self.attempt and not self.is_prompted:
            self.is_prompted = True
            self.prompted(prompt)

    def take(self, token: TokenOutput) -> bool:
        """The reader gets this one; False when its sequence was stopped meanwhile."""
        sequence = self.sequences[token.index]
        if sequence.is_over:
            return False
        sequence.is_over = token.finish_reason is not None
        return True

    def stop(self, index: int) -> None:
        """Ends one sequence where the reader stands: its further tokens are dropped, wherever they are made."""
        sequence = self.sequences[index]
        if sequence.is_over:
            return
        sequence.is_finished = sequence.is_over = True
        sequence.arrived.clear()
        if self.is_over:
            self.queue.put_nowait(None)  # the last one: the whole request ends, and its legs with it
            return
        for conn in self.legs:
            self.send(conn, wire.Abort(self.request_id, self.attempt, index))

    def retreat(self, error: GenerationError) -> None:
        """This attempt is over, and the next goes on after what was delivered; nothing that it still says counts."""
        for sequence in self.sequences:
            if any(token.finish_reason is not None for token in sequence.arrived.values()):
                sequence.is_finished = False  # its last token was not delivered, and comes again
            sequence.arrived.clear()
        if not self.is_finished:
            self.attempt += 1
            self.queue.put_nowait(Setback(error))

    def resumed(self) -> list[Resumed]:
        """The sequences that another instance goes on with; empty when nothing is known of any yet."""
        if not any(sequence.token_ids or sequence.is_finished for sequence in self.sequences):
            return []
        return [Resumed(each.index, list(each.token_ids)) for each in self.sequences if not each.is_finished]

    @property
    def transfer_id(self) -> str:
        return f"{self.request_id}-{self.attempt}"

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    @property
    def is_over(self) -> bool:
        return all(sequence.is_over for sequence in self.sequences)
