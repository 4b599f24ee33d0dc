"""Makes the answers of /inference/v1/generate: token ids, and their text if the request asks for it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from pd_cluster.service.answers.answer_logprobs import ChatLogprobs, LogprobsFormat, npy_base64
from pd_cluster.service.answers.answered_weights import OfWeights
from pd_cluster.service.answers.openai_answer import (
    Answer,
    OfHandle,
    OfMetrics,
    OfPrompt,
    StopReason,
    UnixTime,
)
from pd_cluster.service.generation.prompt_generation import Generation, Usage
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.schema.completion_protocol import TokensCompletionRequest
from pd_cluster.service.text_service import TextService


class TokensChoice(Struct, omit_defaults=True):
    index: int
    logprobs: Annotated[
        ChatLogprobs | None, Meta(description='Tokens are named "token_id:5"; with output_mode "text" by their text.')
    ]
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int]
    stop_reason: StopReason = UNSET
    weight_versions: OfWeights = None
    text: Annotated[str | None, Meta(description='With output_mode "text".')] = None


class GeneratedTokens(Struct, omit_defaults=True, kw_only=True):
    request_id: str
    model: str
    created: UnixTime
    prompt_logprobs: OfPrompt = None
    prompt_token_id_logprobs: Annotated[
        str | None,
        Meta(
            description="With prompt_logprob_token_ids: base64 of a NumPy file, float32 [rows, most ids of a row]; "
            "-inf after a row's last value."
        ),
    ] = None
    output_mode: Literal["text"] | None = None
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
    """Logprobs have the chat format; without text, tokens are named by their ids, as in vLLM."""

    prefix = "generate-tokens"

    def __init__(
        self, request: TokensCompletionRequest, model: str, service: TextService, generations: list[Generation]
    ) -> None:
        super().__init__(request, model, service, generations)
        self._has_text = request.output_mode == "text"
        self._first_scored = request.prompt_logprob_start or 0
        if not self._has_text:
            self._format = LogprobsFormat(service.tokenizer, as_token_ids=True, tells_chosen=self._format.tells_chosen)

    def whole(self, pieces: list[Piece]) -> GeneratedTokens:
        return GeneratedTokens(
            request_id=self.id,
            model=self._model,
            created=self._created,
            prompt_logprobs=self._prompt_logprobs(self.generations[0]),
            prompt_token_id_logprobs=self._named_logprobs(),
            output_mode="text" if self._has_text else None,
            choices=[
                self._choice(piece.index, self._delta(piece.text), self._logprobs(piece), piece) for piece in pieces
            ],
            usage=self._usage(),
            kv_transfer_params=self.kv_handle,
            metrics=self._metrics(),
        )

    def _chunk_of(self, choices: list[TokensChoice], prompt_ids: list[int] | None = None) -> GeneratedTokensChunk:
        return GeneratedTokensChunk(self.id, choices)

    def _choice(
        self, index: int, content: str | None, logprobs: ChatLogprobs | None = None, piece: Piece | None = None
    ) -> TokensChoice:
        return TokensChoice(index, logprobs, *self._rest(piece), text=content)

    def _opening(self, choice: int) -> bytes:
        return b""

    def _logprobs(self, piece: Piece, is_whole: bool = False) -> ChatLogprobs | None:
        return self._format.chat(piece.logprobs) if self.wanted.logprobs else None

    def _delta(self, text: str | None) -> str | None:
        """Returns the text if the request asks for text."""
        return (text or "") if self._has_text else None

    def _named_logprobs(self) -> str | None:
        rows = self.generations[0].named_prompt_logprobs
        return npy_base64(rows[self._first_scored :]) if rows else None
