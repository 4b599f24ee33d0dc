"""Makes OpenAI's answers, whole or in chunks: the part that chat and completions share. Independent of connections."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pd_cluster.service.answers.answer_logprobs import LogprobsFormat, PromptLogprobs
from pd_cluster.service.answers.answer_metrics import AnswerMetrics, timings_of, with_drafts
from pd_cluster.service.answers.answered_weights import weights_of
from pd_cluster.service.answers.sse import event
from pd_cluster.service.generation.kv_handles import KVHandle
from pd_cluster.service.generation.prompt_generation import Generation, Usage, usage_of
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.schema.completion_protocol import GenerationRequest
from pd_cluster.service.text_service import TextService

_encode = msgspec.json.Encoder().encode
# A field that has its default value is left out. So a None is written, as null, only if the default is UNSET.
EndReason = Literal["stop", "length", "tool_calls"]
UnixTime = Annotated[int, Meta(description="Unix time, in seconds.")]
StopReason = Annotated[
    str | int | UnsetType | None, Meta(description="The stop string or stop token that ended the answer.")
]
OfPrompt = Annotated[PromptLogprobs | None, Meta(description="Logprobs by token id; null for the first token.")]
OfMetrics = Annotated[
    AnswerMetrics | UnsetType | None,
    Meta(
        description="With include_metrics, --enable-per-request-metrics or --per-request-spec-decode-metrics; a stream "
        "sends it with its usage. Null for more than one answer."
    ),
]
OfHandle = Annotated[KVHandle | None, Meta(description="With kv_transfer_params: {do_remote_decode: true}.")]


class Wanted(NamedTuple):
    """The optional parts of an answer that a request asks for."""

    stream: bool
    usage: bool  # the stream has usage
    usage_so_far: bool  # each chunk of the stream has usage
    token_ids: bool
    logprobs: bool
    prompt_logprobs: bool
    timings: bool
    stop_reason: bool  # even if null
    weight_versions: bool  # even for weights without a name
    kv_transfer_params: dict[str, Any] | None

    @classmethod
    def of(cls, request: GenerationRequest, forces_usage: bool = False, tells_metrics: bool = False) -> Wanted:
        """`forces_usage` and `tells_metrics`: settings of the server."""
        return cls(
            bool(request.stream),
            request.include_usage or forces_usage,
            request.include_usage_so_far or forces_usage,
            bool(request.return_token_ids),
            request.num_logprobs is not None,
            request.prompt_logprobs is not None,
            tells_metrics if request.include_metrics is None else request.include_metrics,
            bool(request.stop or request.stop_token_ids),
            bool(request.return_weight_versions),
            request.kv_transfer_params,
        )


class Answer(ABC):
    """The answer of one endpoint: id, time and model are the same in every chunk.

    Choices are numbered consecutively: the first prompt's, then the second's.
    """

    prefix: str

    def __init__(
        self, request: GenerationRequest, model: str, service: TextService, generations: list[Generation]
    ) -> None:
        self.wanted = Wanted.of(request, service.forces_usage, service.settings.tells_request_metrics)
        self.generations = generations
        self._num_choices = request.num_choices  # per prompt
        self._tokenizer = service.tokenizer
        self._service = service
        self.kv_handle: KVHandle | None = None  # for the prompt's KV cache, if requested
        as_ids = request.return_tokens_as_token_ids
        as_ids = service.shows_token_ids if as_ids is None else as_ids
        self._format = LogprobsFormat(service.tokenizer, as_ids, tells_chosen=bool(request.logprob_token_ids))
        self.id = f"{self.prefix}-{request.request_id or secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._opened = [False for _ in generations]
        self._told_prompt_ids: set[int] = set()  # choices whose first chunk has been made
        self._prompts_told: dict[int, PromptLogprobs] = {}  # first choice -> its prompt's logprobs, for other choices
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # choice -> its chunk's bytes before and after the text

    @property
    def identity(self) -> tuple[str, int]:
        """The id and the time; may be set before the first chunk."""
        return self.id, self._created

    @identity.setter
    def identity(self, identity: tuple[str, int]) -> None:
        self.id, self._created = identity

    def _generation_of(self, choice: int) -> Generation:
        return self.generations[choice // self._num_choices]

    # ---- the whole answer

    @abstractmethod
    def whole(self, pieces: list[Piece]) -> msgspec.Struct:
        """Returns the whole answer. `pieces`: one for each choice."""

    def _prompt_ids(self, choice: int) -> list[int] | None:
        return self._generation_of(choice).prompt_token_ids if self.wanted.token_ids else None

    @property
    def is_large(self) -> bool:
        """Whether building the answer takes noticeable time."""
        return self.wanted.logprobs or self.wanted.prompt_logprobs or len(self.generations) > 1

    # ---- the answer in chunks

    def events(self, piece: Piece) -> bytes:
        """Returns a piece's events; b"" if nothing of the piece can be shown yet."""
        at = piece.index // self._num_choices
        if self._opened[at]:
            events = b""
        else:
            self._opened[at] = True
            first = at * self._num_choices
            events = b"".join(self._opening(choice) for choice in range(first, first + self._num_choices))
        if piece.finish_reason is not None:
            return events + self._last_chunk(piece)
        if piece.text or (self.shows_every_token and piece.token_ids):
            events += self._text_chunk(piece)
        return events

    @property
    def shows_every_token(self) -> bool:
        """Whether chunks are sent even without text."""
        return self.wanted.token_ids or self.wanted.logprobs

    def _text_chunk(self, piece: Piece) -> bytes:
        """Returns a chunk of text; encodes only the text, because the rest equals the previous chunk."""
        if self.shows_every_token or self.wanted.usage_so_far:
            return self._full_chunk(piece, self._delta(piece.text))
        around = self._around_text.get(piece.index)
        if around is None:
            sample = f"the text of {self.id}"
            before, _, after = self._chunk(self._choice(piece.index, self._delta(sample))).partition(_encode(sample))
            around = self._around_text[piece.index] = (before, after)
        return around[0] + _encode(piece.text) + around[1]

    def _full_chunk(self, piece: Piece, content: Any) -> bytes:
        logprobs = self._logprobs(piece) if piece.logprobs else None
        return self._chunk(
            self._choice(piece.index, content, logprobs, piece), prompt_ids=self._first_prompt_ids(piece.index)
        )

    def _first_prompt_ids(self, choice: int) -> list[int] | None:
        """Returns the prompt's ids for a choice's first chunk."""
        if not self.wanted.token_ids or choice in self._told_prompt_ids:
            return None
        self._told_prompt_ids.add(choice)
        return self._prompt_ids(choice)

    def _last_chunk(self, piece: Piece) -> bytes:
        """Returns the chunk with the last text and the finish_reason."""
        return self._full_chunk(piece, self._delta(piece.text or None))

    def closing_chunk(self) -> bytes:
        """Returns the chunk after the last choice's end; b"" if there is none."""
        if not (self.wanted.usage or self.wanted.timings):
            return b""
        chunk = self._chunk_of([])
        if self.wanted.usage:
            chunk.usage = self._usage()
        chunk.metrics = self._metrics()
        return event(chunk)

    def _metrics(self) -> AnswerMetrics | UnsetType | None:
        level, timings = self._service.settings.spec_decode_metrics, self.wanted.timings
        if level == "none" and not timings:
            return UNSET
        metrics = timings_of(self.generations, self._service.router.timelines) if timings else None
        if level == "none":
            return metrics
        most = self._service.settings.engine.speculation.num_speculative_tokens
        return with_drafts(metrics, self.generations, most, level == "detailed")

    def _usage(self) -> Usage:
        """Returns the usage of the whole answer."""
        return usage_of(self.generations)

    def _chunk(self, choice: Any, prompt_ids: list[int] | None = None, num_tokens: int | None = None) -> bytes:
        """Returns a chunk. `prompt_ids`: the prompt's token ids, for a choice's first chunk. `num_tokens`: the output
        tokens to show in the chunk's usage; None: all so far.
        """
        chunk = self._chunk_of([choice], prompt_ids)
        if self.wanted.usage:
            so_far = self.wanted.usage_so_far
            chunk.usage = self._generation_of(choice.index).usage_after(num_tokens) if so_far else None
        return event(chunk)

    def _rest(self, piece: Piece | None) -> tuple[Any, Any, Any, Any]:
        """Returns finish_reason, token_ids, stop_reason and weight_versions of a choice's piece, if it has them."""
        if piece is None:
            return None, None, UNSET, None
        reason = self._finish_reason(piece)
        tells_stop = reason is not None and (self.wanted.stop_reason or piece.stop_reason is not None)
        token_ids = piece.token_ids if self.wanted.token_ids else None
        versions = None
        if reason is not None:
            generation, tells_tokens = self._generation_of(piece.index), self.shows_every_token
            choice = piece.index % self._num_choices
            versions = weights_of(generation, self.wanted.weight_versions, tells_tokens, choice)
        return reason, token_ids, piece.stop_reason if tells_stop else UNSET, versions

    def _finish_reason(self, piece: Piece) -> str | None:
        return piece.finish_reason

    @abstractmethod
    def _opening(self, choice: int) -> bytes:
        """Returns a choice's chunk before its first text, if any."""

    @abstractmethod
    def _logprobs(self, piece: Piece, is_whole: bool = False) -> msgspec.Struct | None:
        """Returns the logprobs of a choice, in the whole answer or in a chunk."""

    @abstractmethod
    def _delta(self, text: str | None) -> Any:
        """Returns new text in the form that a chunk's choice needs. None: the chunk has only the finish_reason."""

    @abstractmethod
    def _choice(self, index: int, content: Any, logprobs: Any = None, piece: Piece | None = None) -> msgspec.Struct:
        """Returns a chunk's choice. `piece`: the source of all fields but the content and logprobs."""

    @abstractmethod
    def _chunk_of(self, choices: list[Any], prompt_ids: list[int] | None = None) -> Any:
        """Returns the chunk of these choices, without usage and metrics."""

    def _prompt_logprobs(self, generation: Generation) -> PromptLogprobs | None:
        if not self.wanted.prompt_logprobs:
            return None
        first = generation.first_choice
        if first not in self._prompts_told:
            self._prompts_told[first] = self._format.prompt(generation.prompt_token_ids, generation.prompt_logprobs)
        return self._prompts_told[first]
