"""The answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from pd_cluster.service.answers.answers import Answer
from pd_cluster.service.answers.messages import ChoiceText
from pd_cluster.service.generation import Generation
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.sequence import Piece
from pd_cluster.service.service import TextService


class ChatAnswer(Answer):
    """`_texts` split each choice's text into content, reasoning and calls; empty where all of it is content."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, request: ChatCompletionRequest, model: str, service: TextService, generation: Generation
    ) -> None:
        super().__init__(request, model, service, [generation])
        last = request.messages[-1]
        self._role = service.response_role if request.opens_answer else last.role
        self._echoed = last.text if request.echo and last.role == self._role else ""
        self._texts: list[ChoiceText] = []
        if generation.new_reader is not None:
            shown = request.include_reasoning is not False
            self._texts = [ChoiceText(generation, shown) for _ in range(self._num_choices)]

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        answer = super().whole(pieces) | self._prompt_logprobs(self.generations[0])
        return answer | self._prompt_ids(0)

    def _opening(self, choice: int) -> bytes:
        ids = self._first_prompt_ids(choice)
        opening = self._chunk(self._choice(choice, {"delta": {"role": self._role, "content": ""}}) | ids)
        return opening + (self._chunk(self._choice(choice, self._delta(self._echoed))) if self._echoed else b"")

    def _text_chunk(self, piece: Piece) -> bytes:
        if not self._texts:
            return super()._text_chunk(piece)
        delta = self._texts[piece.index].read(piece.text)
        return self._full_chunk(piece, {"delta": delta}) if delta or self.shows_every_token else b""

    def _last_chunk(self, piece: Piece) -> bytes:
        rest = self._texts[piece.index].finish() if self._texts else {}
        held_back = self._chunk(self._choice(piece.index, {"delta": rest})) if rest else b""
        return held_back + super()._last_chunk(piece)

    def _finish_reason(self, piece: Piece) -> str | None:
        makes_calls = bool(self._texts) and self._texts[piece.index].ends_in_calls
        return "tool_calls" if makes_calls and piece.finish_reason == "stop" else piece.finish_reason

    def _logprobs(self, piece: Piece, is_whole: bool = False) -> dict[str, Any] | None:
        return self._format.chat(piece.logprobs) if self.wanted.logprobs else None

    def _whole(self, piece: Piece) -> dict[str, Any]:
        content: dict[str, Any] = {"content": piece.text}
        if self._texts:
            content = self._texts[piece.index].message(piece.text)
        if self._echoed:
            content["content"] = self._echoed + (content["content"] or "")
        return {"message": {"role": self._role, **content}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _no_delta(self) -> dict[str, Any]:
        return {"delta": {}}
