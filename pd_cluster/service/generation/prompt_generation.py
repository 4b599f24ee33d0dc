"""Tracks the progress of one prompt of a request. Knows nothing of HTTP or of instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from pd_cluster.cluster.streams.request_origin import ANYBODY, RequestOrigin, RequestOwner
from pd_cluster.cluster.streams.request_stream import RequestStream
from pd_cluster.cluster.streams.stream_records import KeptStream
from pd_cluster.errors import GenerationError
from pd_cluster.parsers.reply_format import ReplyReader
from pd_cluster.service.generation.text_sequence import Piece, TextSequence
from pd_cluster.service.media.pixel_budget import PixelHold
from pd_cluster.types import Logprobs, PromptOutput, RequestSpec, Sampling
from pd_cluster.types.variants import num_virtual_tokens


def _stop_nothing(index: int, num_dropped: int) -> None:
    """Does nothing: a request that has not been sent cannot be stopped."""


def _fail_nothing(error: GenerationError) -> None:
    """Does nothing: a request that has not been sent cannot fail."""


def _nothing() -> None:
    """Ignores the event."""


def _no_calls(name: str, index: int) -> str:
    raise AssertionError("an answer without a reader makes no calls")


class PromptTokensDetails(Struct):
    cached_tokens: Annotated[int, Meta(description="Prompt tokens whose KV cache was reused.")]


class CompletionTokensDetails(Struct, omit_defaults=True):
    reasoning_tokens: Annotated[int | None, Meta(description="Tokens of the reasoning, tokenized separately.")] = None
    accepted_prediction_tokens: Annotated[
        int | None, Meta(description="Tokens of the prediction that were accepted; each saved a step.")
    ] = None
    rejected_prediction_tokens: Annotated[
        int | None, Meta(description="Tokens of the prediction that were rejected. They are not billed.")
    ] = None


class Usage(Struct, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: Annotated[int, Meta(description="Output tokens of all choices together.")]
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: Annotated[
        CompletionTokensDetails | None,
        Meta(
            description="For chats whose answers are parsed for reasoning or calls, and for requests with a prediction."
        ),
    ] = None


@dataclass(slots=True)
class Generation:
    """The progress of one prompt: its parameters, the state of its sequences, and the stream that serves it."""

    order: RequestSpec
    sequences: list[TextSequence]
    num_choices: int  # the number of sequences in the answer: the best ones
    first_choice: int = 0  # the number of its first choice among the choices of all prompts
    every_token: bool = False  # a piece for each token, even without text
    parts_steps: bool = False  # tokens that arrive together get separate pieces
    is_prompt_only: bool = False  # max_tokens 0, with echo
    new_reader: Callable[[], ReplyReader] | None = None  # reads a choice's text that may have reasoning or calls
    new_call_id: Callable[..., str] = _no_calls  # (a call's name, its number in the choice) -> its id
    hides_reasoning: bool = False  # clients do not get the reasoning
    calls_finish: bool = False  # a choice with calls has "tool_calls" as its finish_reason
    prompt: PromptOutput | None = None  # known no later than the first piece
    served_by: list[str] = field(default_factory=list)
    stream: RequestStream | None = None  # set when the request is sent
    stop: Callable[[int, int], None] = _stop_nothing  # see RequestStream.stop
    fail: Callable[[GenerationError], None] = _fail_nothing
    client_id: str = ""  # the answer's id for clients
    received_s: float | None = None
    owner: RequestOwner = ANYBODY
    arrived: Callable[[], None] = _nothing  # called when the router has the request
    hold: PixelHold | None = None  # the memory of its images
    kept: KeptStream | None = None  # for a stream that clients may resume

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's own tokens, without those of a prompt adapter."""
        ids, num_virtual = self.order.prompt_token_ids, self.num_virtual_tokens
        return ids[num_virtual:] if num_virtual else ids

    @property
    def prompt_text(self) -> str:
        """The prompt's text before each answer, with special tokens shown as the request asks."""
        return self.sequences[0].detokenizer.prompt_text(self.prompt_token_ids)

    @property
    def num_virtual_tokens(self) -> int:
        return num_virtual_tokens(self.order.variant)

    @property
    def num_cached_tokens(self) -> int:
        """Counts the prompt's own tokens that were cached."""
        return 0 if self.prompt is None else max(0, self.prompt.num_cached_tokens - self.num_virtual_tokens)

    @property
    def origin(self) -> RequestOrigin:
        return RequestOrigin(self.client_id, self.received_s, self.owner, self.kept)

    @property
    def sampling(self) -> Sampling:
        return self.order.sampling

    def resume(self, order: RequestSpec) -> None:
        """Adopts the RequestSpec of a request that was sent before, perhaps by another process."""
        self.order = order
        for sequence in self.sequences:
            sequence.detokenizer.follow(self.prompt_token_ids)

    def follow_session(self, session: str) -> None:
        """Routes a request, before it is sent, to the instances of this session."""
        self.order = msgspec.structs.replace(self.order, session=session)

    @property
    def usage(self) -> Usage:
        """Counts the tokens of the answer's sequences, and cached tokens once they are known."""
        return self.usage_after(None)

    def usage_after(self, num_tokens: int | None) -> Usage:
        """Returns the usage with this many output tokens; None: all so far."""
        num_prompt = len(self.prompt_token_ids)
        num_output = sum(each.num_tokens for each in self.sequences) if num_tokens is None else num_tokens
        cached = None if self.prompt is None else PromptTokensDetails(self.num_cached_tokens)
        return Usage(num_prompt, num_output, num_prompt + num_output, cached, self._details())

    def _details(self) -> CompletionTokensDetails | None:
        """Returns how much of the prediction was accepted; None without a prediction."""
        if not self.order.prediction:
            return None
        return CompletionTokensDetails(
            accepted_prediction_tokens=sum(each.num_accepted for each in self.sequences),
            rejected_prediction_tokens=sum(each.num_rejected for each in self.sequences),
        )

    @property
    def has_stops(self) -> bool:
        """Whether a sequence may end because of its text."""
        return any(sequence.stops for sequence in self.sequences)

    @property
    def prompt_logprobs(self) -> list[Logprobs | None]:
        if self.prompt is None:
            return []
        found, first = self.prompt.logprobs, self.num_virtual_tokens
        if self.sampling.prompt_logprob_token_ids:
            number = self.sampling.prompt_logprobs or 0
            found = [each and msgspec.structs.replace(each, top=each.top[:number]) for each in found]
        return [None, *found[first + 1 :]] if first and found else found

    @property
    def named_prompt_logprobs(self) -> list[list[float]]:
        """For each prompt token but the first, the logprobs of the token ids that the request names; possibly empty."""
        if self.prompt is None or not self.sampling.prompt_logprob_token_ids:
            return []
        number = self.sampling.prompt_logprobs or 0
        found = self.prompt.logprobs[self.num_virtual_tokens + 1 :]
        return [[value for _, value in each.top[number:]] if each is not None else [] for each in found]

    def routed(self, stream: RequestStream) -> None:
        self.stream = stream
        self.served_by = [stream.prefill.name, stream.decode.name]
        self.stop = stream.stop
        self.fail = stream.inbox.put

    def prompted(self, prompt: PromptOutput) -> None:
        self.prompt = prompt

    def keep_best(self) -> None:
        """Keeps the sequences with the highest mean logprob of their tokens, best first, and renumbers them."""
        ranked = sorted(self.sequences, key=lambda sequence: -sequence.mean_logprob)
        self.sequences = ranked[: self.num_choices]

    def piece_of(self, sequence: TextSequence, text: str) -> Piece:
        """Returns a sequence's output since its last piece, with the number of its choice in the answer."""
        return sequence.piece(text, self.first_choice + sequence.index)


def usage_of(generations: list[Generation]) -> Usage:
    """Returns the usage of a request with several prompts. Cached tokens are included once all are known."""
    return added_up([generation.usage for generation in generations])


def added_up(usages: list[Usage]) -> Usage:
    """Adds up the counts; details that one of the usages lacks are left out."""
    if len(usages) == 1:
        return usages[0]
    cached = [usage.prompt_tokens_details for usage in usages if usage.prompt_tokens_details is not None]
    details = [usage.completion_tokens_details for usage in usages if usage.completion_tokens_details is not None]
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.total_tokens for usage in usages),
        PromptTokensDetails(sum(each.cached_tokens for each in cached)) if len(cached) == len(usages) else None,
        _details_together(details) if len(details) == len(usages) else None,
    )


def _details_together(details: list[CompletionTokensDetails]) -> CompletionTokensDetails:
    """Adds up each count that all details have."""
    numbers = {name: [getattr(each, name) for each in details] for name in CompletionTokensDetails.__struct_fields__}
    return CompletionTokensDetails(**{name: sum(all_) for name, all_ in numbers.items() if None not in all_})
