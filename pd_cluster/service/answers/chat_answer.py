"""Makes the answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from pd_cluster.service.answers.answer_logprobs import ChatLogprobs
from pd_cluster.service.answers.answered_weights import OfWeights
from pd_cluster.service.answers.choice_message import AnswerMessage, ChoiceText, Delta
from pd_cluster.service.answers.openai_answer import (
    Answer,
    EndReason,
    OfHandle,
    OfMetrics,
    OfPrompt,
    StopReason,
    UnixTime,
)
from pd_cluster.service.generation.prompt_generation import CompletionTokensDetails, Generation, Usage
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.text_service import TextService


class ChatChoice(Struct, omit_defaults=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason
    token_ids: list[int] | None = None
    stop_reason: StopReason = UNSET
    weight_versions: OfWeights = None
    prompt_token_ids: list[int] | None = None


class ChatCompletion(Struct, omit_defaults=True):
    id: str
    object: Literal["chat.completion"]
    created: UnixTime
    model: str
    choices: list[ChatChoice]
    usage: Usage
    kv_transfer_params: OfHandle = None
    metrics: OfMetrics = UNSET
    prompt_logprobs: OfPrompt = None
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class ChatChunkChoice(Struct, omit_defaults=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: EndReason | None
    token_ids: list[int] | None = None
    stop_reason: StopReason = UNSET
    weight_versions: OfWeights = None


class ChatCompletionChunk(Struct, omit_defaults=True):
    """One event of a stream. If usage is requested, the last event has it, without choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: Annotated[list[int] | None, Meta(description="In a choice's first event.")] = None
    usage: Usage | UnsetType | None = UNSET
    metrics: OfMetrics = UNSET


class ChatAnswer(Answer):
    """Answers a chat. `_texts` splits each choice's text into content, reasoning and calls; empty: all is content."""

    prefix = "chatcmpl"

    def __init__(
        self, request: ChatCompletionRequest, model: str, service: TextService, generation: Generation
    ) -> None:
        super().__init__(request, model, service, [generation])
        last = request.messages[-1]
        self._role = service.response_role if request.opens_answer else last.role
        self._echoed = last.text if request.echo and last.role == self._role else ""
        self._texts: list[ChoiceText] = []
        if generation.new_reader is not None:
            self._texts = [ChoiceText(generation) for _ in range(self._num_choices)]

    def whole(self, pieces: list[Piece]) -> ChatCompletion:
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[self._whole_choice(piece) for piece in pieces],
            usage=self._usage(),
            kv_transfer_params=self.kv_handle,
            metrics=self._metrics(),
            prompt_logprobs=self._prompt_logprobs(self.generations[0]),
            prompt_token_ids=self._prompt_ids(0) if self.wanted.token_ids else UNSET,
        )

    def _whole_choice(self, piece: Piece) -> ChatChoice:
        message = AnswerMessage(self._role, piece.text)
        if self._texts:
            message, piece = self._texts[piece.index].message(piece, self._role)
        if self._echoed:
            message.content = self._echoed + (message.content or "")
        ids = self._prompt_ids(piece.index)
        return ChatChoice(piece.index, message, self._logprobs(piece), *self._rest(piece), prompt_token_ids=ids)

    def _usage(self) -> Usage:
        usage = super()._usage()
        if self._texts:
            num_tokens = sum(len(self._tokenizer.encode(text.reasoning, False)) for text in self._texts)
            details = usage.completion_tokens_details or CompletionTokensDetails()
            details = replace(details, reasoning_tokens=min(num_tokens, usage.completion_tokens))
            usage = replace(usage, completion_tokens_details=details)
        return usage

    def _chunk_of(self, choices: list[ChatChunkChoice], prompt_ids: list[int] | None = None) -> ChatCompletionChunk:
        kind: Literal["chat.completion.chunk"] = "chat.completion.chunk"
        return ChatCompletionChunk(self.id, kind, self._created, self._model, choices, prompt_ids)

    def _choice(
        self, index: int, content: Delta, logprobs: ChatLogprobs | None = None, piece: Piece | None = None
    ) -> ChatChunkChoice:
        return ChatChunkChoice(index, content, logprobs, *self._rest(piece))

    def _opening(self, choice: int) -> bytes:
        ids = self._first_prompt_ids(choice)
        first = self._chunk(self._choice(choice, Delta(self._role, "")), ids, 0)
        if not self._echoed:
            return first
        return first + self._chunk(self._choice(choice, self._delta(self._echoed)), None, 0)

    def _text_chunk(self, piece: Piece) -> bytes:
        if not self._texts:
            return super()._text_chunk(piece)
        delta, piece = self._texts[piece.index].read(piece)
        has_tokens = self.shows_every_token and (piece.token_ids or piece.logprobs)
        return self._full_chunk(piece, delta or Delta()) if delta or has_tokens else b""

    def _last_chunk(self, piece: Piece) -> bytes:
        if not self._texts:
            return super()._last_chunk(piece)
        text = self._texts[piece.index]
        before, piece = text.read(piece)
        rest, piece = text.finish(piece)
        if before is None or rest is None:
            return self._full_chunk(piece, before or rest or Delta())
        return self._chunk(self._choice(piece.index, before)) + self._full_chunk(piece, rest)

    def _finish_reason(self, piece: Piece) -> str | None:
        return self._texts[piece.index].finish_reason(piece) if self._texts else piece.finish_reason

    def _logprobs(self, piece: Piece, is_whole: bool = False) -> ChatLogprobs | None:
        return self._format.chat(piece.logprobs) if self.wanted.logprobs else None

    def _delta(self, text: str | None) -> Delta:
        return Delta(content=text)
