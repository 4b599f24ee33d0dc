"""The answers of /inference/v1/generate: token ids, and no text."""

from __future__ import annotations

from typing import Any

from pd_cluster.service.answers.answers import Answer
from pd_cluster.service.answers.logprobs import LogprobsFormat
from pd_cluster.service.generation import Generation
from pd_cluster.service.schema.protocol import CompletionRequest
from pd_cluster.service.sequence import Piece
from pd_cluster.service.service import TextService


class TokensAnswer(Answer):
    """Logprobs have the shape of a chat's; tokens are named by their ids, as in vLLM."""

    prefix, object, chunk_object = "generate-tokens", "", ""

    def __init__(
        self, request: CompletionRequest, model: str, service: TextService, generations: list[Generation]
    ) -> None:
        super().__init__(request, model, service, generations)
        self._format = LogprobsFormat(service.tokenizer, as_token_ids=True)

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        found = self._prompt_logprobs(self.generations[0])
        answer = {"request_id": self.id, "model": self._model, "created": self._created, **found}
        choices = [self._whole_choice(piece) for piece in pieces]
        handle = {"kv_transfer_params": self.kv_handle} if self.kv_handle is not None else {}
        return {**answer, "choices": choices, "usage": self._usage(), **handle, **self._timings()}

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        choice = self._choice(piece.index, {}, self._logprobs(piece), piece.token_ids, piece.finish_reason)
        return choice | self._stop_reason(piece)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"request_id": self.id}

    def _first_prompt_ids(self, choice: int) -> dict[str, Any]:
        return {}

    def _opening(self, choice: int) -> bytes:
        return b""

    def _logprobs(self, piece: Piece, is_whole: bool = False) -> dict[str, Any] | None:
        return self._format.chat(piece.logprobs) if self.wanted.logprobs else None

    def _whole(self, piece: Piece) -> tuple[dict[str, Any], Piece]:
        return {}, piece

    def _delta(self, text: str) -> dict[str, Any]:
        return {}

    def _no_delta(self) -> dict[str, Any]:
        return {}
