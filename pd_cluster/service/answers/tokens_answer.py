"""The answers of /inference/v1/generate: token ids without text."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from pd_cluster.service.answers.answer_logprobs import ChatLogprobs, LogprobsFormat
from pd_cluster.service.answers.openai_answer import Answer, OfHandle, OfMetrics, OfPrompt, StopReason, UnixTime
from pd_cluster.service.generation.prompt_generation import Generation, Usage
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.text_service import TextService


class TokensChoice(Struct, omit_defaults=True):
    index: int
    logprobs: Annotated[ChatLogprobs | None, Meta(description='Logprobs of tokens, which are named "token_id:5".')]
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int]
    stop_reason: StopReason = UNSET


class GeneratedTokens(Struct, omit_defaults=True, kw_only=True):
    request_id: str
    model: str
    created: UnixTime
    prompt_logprobs: OfPrompt = None
    choices: list[TokensChoice]
    usage: Usage
    kv_transfer_params: OfHandle = None
    metrics: OfMetrics = UNSET


class GeneratedTokensChunk(Struct, omit_defaults=True):
    """One event of a stream. If usage is requested, the last event has it, without choices."""

    request_id: str
    choices: list[TokensChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: OfMetrics = UNSET


class TokensAnswer(Answer):
    """Answers with token ids. Logprobs have the chat format, with ids as tokens, as in vLLM."""

    prefix = "generate-tokens"

    def __init__(
        self, request: CompletionRequest, model: str, service: TextService, generations: list[Generation]
    ) -> None:
        super().__init__(request, model, service, generations)
        self._format = LogprobsFormat(service.tokenizer, as_token_ids=True)

    def whole(self, pieces: list[Piece]) -> GeneratedTokens:
        return GeneratedTokens(
            request_id=self.id,
            model=self._model,
            created=self._created,
            prompt_logprobs=self._prompt_logprobs(self.generations[0]),
            choices=[self._choice(piece.index, None, self._logprobs(piece), piece) for piece in pieces],
            usage=self._usage(),
            kv_transfer_params=self.kv_handle,
            metrics=self._metrics(),
        )

    def _chunk_of(self, choices: list[TokensChoice], prompt_ids: list[int] | None = None) -> GeneratedTokensChunk:
        return GeneratedTokensChunk(self.id, choices)

    def _choice(
        self, index: int, content: None, logprobs: ChatLogprobs | None = None, piece: Piece | None = None
    ) -> TokensChoice:
        return TokensChoice(index, logprobs, *self._rest(piece))

    def _opening(self, choice: int) -> bytes:
        return b""

    def _logprobs(self, piece: Piece, is_whole: bool = False) -> ChatLogprobs | None:
        return self._format.chat(piece.logprobs) if self.wanted.logprobs else None

    def _delta(self, text: str | None) -> None:
        """Returns nothing: there is no text."""
