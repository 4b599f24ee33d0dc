"""OpenAI's answers, whole and in chunks, as chat and completions have them. Knows nothing of connections."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import msgspec

from pd_cluster.api.http import event
from pd_cluster.api.logprobs import LogprobsFormat, prompt_entries
from pd_cluster.api.protocol import CompletionRequest, GenerationRequest
from pd_cluster.api.sequence import Piece, TokenLogprobs
from pd_cluster.api.service import Generation
from pd_cluster.text import Tokenizer

_encode = msgspec.json.Encoder().encode


class Wanted(NamedTuple):
    """What of its answer a request asked to see. The request itself, prompt and all, need not wait for the end."""

    stream: bool
    usage: bool  # in the stream
    token_ids: bool
    logprobs: bool
    prompt_logprobs: bool

    @classmethod
    def of(cls, request: GenerationRequest) -> Wanted:
        return cls(
            request.stream,
            request.include_usage,
            request.return_token_ids,
            request.num_logprobs is not None,
            request.prompt_logprobs is not None,
        )


class Answer(ABC):
    """The shapes of one endpoint: id, time and model are the same in every chunk."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, request: GenerationRequest, model: str, tokenizer: Tokenizer) -> None:
        self.wanted = Wanted.of(request)
        self._tokenizer = tokenizer
        self._format = LogprobsFormat(tokenizer, bool(request.return_tokens_as_token_ids))
        self._of_prompt: list[dict[str, Any] | None] | None = None  # the same for every choice
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # choice -> its chunk before and after the text

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def whole(self, pieces: list[Piece], generation: Generation) -> dict[str, Any]:
        choices = [self._whole_choice(piece, generation) for piece in pieces]
        return {**self._head(self.object), "choices": choices, "usage": generation.usage}

    def _whole_choice(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        ids = {"prompt_token_ids": generation.prompt_token_ids} if self.wanted.token_ids else {}
        logprobs = self._logprobs(piece.logprobs, generation)
        return self._choice(piece.index, self._whole(piece.text), logprobs, piece.token_ids, piece.finish_reason) | ids

    @property
    def has_logprobs(self) -> bool:
        return self.wanted.logprobs or self.wanted.prompt_logprobs

    @property
    def shows_every_token(self) -> bool:
        """Whether a chunk without text can have something to show."""
        return self.wanted.token_ids or self.wanted.logprobs

    def chunk(self, piece: Piece) -> bytes:
        """Where only the text differs from one chunk to the next, only the text is encoded."""
        if self.shows_every_token:
            logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
            return self._chunk(self._choice(piece.index, self._delta(piece.text), logprobs, piece.token_ids))
        around = self._around_text.get(piece.index)
        if around is None:
            sample = f"the text of {self.id}"
            before, _, after = self._chunk(self._choice(piece.index, self._delta(sample))).partition(_encode(sample))
            around = self._around_text[piece.index] = (before, after)
        return around[0] + _encode(piece.text) + around[1]

    def last_chunk(self, piece: Piece) -> bytes:
        return self._chunk(self._choice(piece.index, self._no_delta(), finish_reason=piece.finish_reason))

    def usage_chunk(self, generation: Generation) -> bytes:
        return event({**self._head(self.chunk_object), "choices": [], "usage": generation.usage})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self.wanted.usage else {}
        return event({**self._head(self.chunk_object), "choices": [choice], **usage})

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

    @abstractmethod
    def opening(self, index: int, generation: Generation) -> bytes:
        """A choice's chunk before its first text, if any."""

    @abstractmethod
    def _logprobs(self, entries: list[TokenLogprobs], whole: Generation | None = None) -> dict[str, Any] | None:
        """As part of a choice; of the whole answer when a generation is given."""

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]:
        """All text as part of the answer's choice."""

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]:
        """New text as part of a chunk's choice."""

    @abstractmethod
    def _no_delta(self) -> dict[str, Any]:
        """The same for the chunk that carries the finish_reason."""

    def _prompt_logprobs(self, generation: Generation) -> dict[str, Any]:
        if not self.wanted.prompt_logprobs:
            return {}
        if self._of_prompt is None:
            self._of_prompt = self._format.prompt(generation.prompt_token_ids, generation.prompt_logprobs)
        return {"prompt_logprobs": self._of_prompt}


class ChatAnswer(Answer):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, pieces: list[Piece], generation: Generation) -> dict[str, Any]:
        return super().whole(pieces, generation) | self._prompt_logprobs(generation)

    def opening(self, index: int, generation: Generation) -> bytes:
        return self._chunk(self._choice(index, {"delta": {"role": "assistant", "content": ""}}))

    def _logprobs(self, entries: list[TokenLogprobs], whole: Generation | None = None) -> dict[str, Any] | None:
        return self._format.chat(entries) if self.wanted.logprobs else None

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _no_delta(self) -> dict[str, Any]:
        return {"delta": {}}


class CompletionAnswer(Answer):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, request: CompletionRequest, model: str, tokenizer: Tokenizer, echoed: str) -> None:
        super().__init__(request, model, tokenizer)
        self._echo = request.echo
        self._echoed = echoed
        self._echoed_logprobs: list[TokenLogprobs] | None = None

    def opening(self, index: int, generation: Generation) -> bytes:
        if not self._echoed:
            return b""
        logprobs = self._format.completion(self._prompt(generation)) if self.wanted.logprobs else None
        return self._chunk(self._choice(index, {"text": self._echoed}, logprobs))

    def _whole_choice(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        return super()._whole_choice(piece, generation) | self._prompt_logprobs(generation)

    def _logprobs(self, entries: list[TokenLogprobs], whole: Generation | None = None) -> dict[str, Any] | None:
        if not self.wanted.logprobs:
            return None
        shifted = [entry._replace(text_offset=entry.text_offset + len(self._echoed)) for entry in entries]
        return self._format.completion([*(self._prompt(whole) if whole is not None else []), *shifted])

    def _prompt(self, generation: Generation) -> list[TokenLogprobs]:
        """The prompt's own logprobs, as far as they are echoed."""
        if not self._echo:
            return []
        if self._echoed_logprobs is None:
            ids, found = generation.prompt_token_ids, generation.prompt_logprobs
            self._echoed_logprobs = prompt_entries(self._tokenizer, ids, found)
        return self._echoed_logprobs

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": self._echoed + text}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _no_delta(self) -> dict[str, Any]:
        return {"text": ""}
