"""OpenAI's answers, whole and in chunks: the common part of chat and completions. Independent of connections."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import msgspec

from pd_cluster.service.answers.logprobs import LogprobsFormat
from pd_cluster.service.answers.sse import event
from pd_cluster.service.answers.timings import timings_of
from pd_cluster.service.generation import Generation, usage_of
from pd_cluster.service.schema.protocol import GenerationRequest
from pd_cluster.service.sequence import Piece
from pd_cluster.service.service import TextService

_encode = msgspec.json.Encoder().encode


class Wanted(NamedTuple):
    """The optional parts of an answer that a request asked for. The request itself need not be kept until the end."""

    stream: bool
    usage: bool  # in the stream
    usage_so_far: bool  # in each chunk of the stream
    token_ids: bool
    logprobs: bool
    prompt_logprobs: bool
    timings: bool
    stop_reason: bool  # also where it is null
    kv_transfer_params: dict[str, Any] | None

    @classmethod
    def of(cls, request: GenerationRequest, forces_usage: bool = False) -> Wanted:
        return cls(
            bool(request.stream),
            request.include_usage or forces_usage,
            request.include_usage_so_far or forces_usage,
            bool(request.return_token_ids),
            request.num_logprobs is not None,
            request.prompt_logprobs is not None,
            bool(request.include_metrics),
            bool(request.stop or request.stop_token_ids),
            request.kv_transfer_params,
        )


class Answer(ABC):
    """The shapes of one endpoint: id, time and model are the same in every chunk.

    Choices are numbered consecutively: the first prompt's, then the second's.
    """

    prefix: str
    object: str
    chunk_object: str

    def __init__(
        self, request: GenerationRequest, model: str, service: TextService, generations: list[Generation]
    ) -> None:
        self.wanted = Wanted.of(request, service.forces_usage)
        self.generations = generations
        self._num_choices = request.num_choices  # per prompt
        self._tokenizer = service.tokenizer
        self._service = service
        self.kv_handle: dict[str, Any] | None = None  # for the prompt's KV cache, where one was asked for
        as_ids = request.return_tokens_as_token_ids
        self._format = LogprobsFormat(service.tokenizer, service.shows_token_ids if as_ids is None else as_ids)
        self.id = f"{self.prefix}-{request.request_id or secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._opened = [False for _ in generations]
        self._told_prompt_ids: set[int] = set()  # choices whose first chunk has been made
        self._prompts_told: dict[int, dict[str, Any]] = {}  # first choice -> its prompt's logprobs, for other choices
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # choice -> its chunk's bytes before and after the text

    @property
    def identity(self) -> tuple[str, int]:
        """Its id and time, before the first chunk is made."""
        return self.id, self._created

    @identity.setter
    def identity(self, identity: tuple[str, int]) -> None:
        self.id, self._created = identity

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _generation_of(self, choice: int) -> Generation:
        return self.generations[choice // self._num_choices]

    # ---- the whole answer

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        choices = [self._whole_choice(piece) for piece in pieces]
        handle = {"kv_transfer_params": self.kv_handle} if self.kv_handle is not None else {}
        return {**self._head(self.object), "choices": choices, "usage": self._usage(), **handle, **self._timings()}

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        content, piece = self._whole(piece)
        logprobs, reason = self._logprobs(piece, is_whole=True), self._finish_reason(piece)
        choice = self._choice(piece.index, content, logprobs, piece.token_ids, reason)
        return choice | self._stop_reason(piece) | self._prompt_ids(piece.index)

    def _first_prompt_ids(self, choice: int) -> dict[str, Any]:
        """Returns the prompt's ids for a choice's first chunk."""
        if not self.wanted.token_ids or choice in self._told_prompt_ids:
            return {}
        self._told_prompt_ids.add(choice)
        return self._prompt_ids(choice)

    def _prompt_ids(self, choice: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._generation_of(choice).prompt_token_ids} if self.wanted.token_ids else {}

    @property
    def is_large(self) -> bool:
        """Whether building it takes noticeable time."""
        return self.wanted.logprobs or self.wanted.prompt_logprobs or len(self.generations) > 1

    # ---- the answer in chunks

    def events(self, piece: Piece) -> bytes:
        """Returns a piece's events; b"" when nothing of it can be shown yet."""
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
        """Whether a chunk without text can have something to show."""
        return self.wanted.token_ids or self.wanted.logprobs

    def _text_chunk(self, piece: Piece) -> bytes:
        """Encodes only the text, where nothing else differs from one chunk to the next."""
        if self.shows_every_token or self.wanted.usage_so_far:
            return self._full_chunk(piece, self._delta(piece.text))
        around = self._around_text.get(piece.index)
        if around is None:
            sample = f"the text of {self.id}"
            before, _, after = self._chunk(self._choice(piece.index, self._delta(sample))).partition(_encode(sample))
            around = self._around_text[piece.index] = (before, after)
        return around[0] + _encode(piece.text) + around[1]

    def _full_chunk(self, piece: Piece, content: dict[str, Any], **end: Any) -> bytes:
        """`end`: the fields of a choice's last chunk."""
        logprobs = self._logprobs(piece) if piece.logprobs else None
        ids = self._first_prompt_ids(piece.index)
        return self._chunk(self._choice(piece.index, content, logprobs, piece.token_ids) | end, ids)

    def _last_chunk(self, piece: Piece) -> bytes:
        """Returns the chunk with the last text and the finish_reason."""
        return self._end(piece, self._delta(piece.text) if piece.text else self._no_delta())

    def _end(self, piece: Piece, content: dict[str, Any]) -> bytes:
        return self._full_chunk(piece, content, finish_reason=self._finish_reason(piece), **self._stop_reason(piece))

    def closing_chunk(self) -> bytes:
        """Returns the chunk after the last choice's end; b"" if there is nothing to tell."""
        if not (self.wanted.usage or self.wanted.timings):
            return b""
        usage = {"usage": self._usage()} if self.wanted.usage else {}
        return event({**self._head(self.chunk_object), "choices": [], **usage, **self._timings()})

    def _timings(self) -> dict[str, Any]:
        if not self.wanted.timings:
            return {}
        return {"metrics": timings_of(self.generations, self._service.router.timelines)}

    def _usage(self) -> dict[str, Any]:
        """Returns the usage of the whole answer."""
        return usage_of(self.generations)

    def _chunk(
        self, choice: dict[str, Any], prompt_ids: dict[str, Any] | None = None, num_tokens: int | None = None
    ) -> bytes:
        """`prompt_ids`: of the prompt, in a choice's first chunk. `num_tokens`: in its usage; None: all so far."""
        so_far = self._generation_of(choice["index"]).usage_after(num_tokens) if self.wanted.usage_so_far else None
        usage = {"usage": so_far} if self.wanted.usage else {}
        choice, ids = self._with_prompt_ids(choice, prompt_ids or {})
        return event({**self._head(self.chunk_object), "choices": [choice], **ids, **usage})

    def _with_prompt_ids(self, choice: dict[str, Any], ids: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns a chunk's choice and its fields beside it; completions have the prompt's ids in the choice."""
        return choice | ids, {}

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        token_ids: list[int] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        ids = {"token_ids": token_ids} if self.wanted.token_ids and token_ids is not None else {}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason, **ids}

    def _stop_reason(self, piece: Piece) -> dict[str, Any]:
        is_told = self.wanted.stop_reason or piece.stop_reason is not None
        return {"stop_reason": piece.stop_reason} if is_told else {}

    def _finish_reason(self, piece: Piece) -> str | None:
        return piece.finish_reason

    @abstractmethod
    def _opening(self, choice: int) -> bytes:
        """Returns a choice's chunk before its first text, if any."""

    @abstractmethod
    def _logprobs(self, piece: Piece, is_whole: bool = False) -> dict[str, Any] | None:
        """Returns the logprobs field of a choice, in the whole answer or in a chunk."""

    @abstractmethod
    def _whole(self, piece: Piece) -> tuple[dict[str, Any], Piece]:
        """Returns the fields with all text of the answer's choice, and the piece as clients may see it."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """Returns the fields with new text of a chunk's choice."""

    @abstractmethod
    def _no_delta(self) -> dict[str, Any]:
        """Returns the same fields for the chunk that carries the finish_reason."""

    def _prompt_logprobs(self, generation: Generation) -> dict[str, Any]:
        if not self.wanted.prompt_logprobs:
            return {}
        first = generation.first_choice
        if first not in self._prompts_told:
            found = self._format.prompt(generation.prompt_token_ids, generation.prompt_logprobs)
            self._prompts_told[first] = {"prompt_logprobs": found}
        return self._prompts_told[first]
