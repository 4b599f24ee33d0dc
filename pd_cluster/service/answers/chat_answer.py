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
            self._texts = [ChoiceText(generation) for _ in range(self._num_choices)]

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        return super().whole(pieces) | self._prompt_logprobs(self.generations[0]) | self._prompt_ids(0)

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if not self._texts:
            return usage
        num_tokens = sum(len(self._tokenizer.encode(text.reasoning, False)) for text in self._texts)
        return usage | {"completion_tokens_details": {"reasoning_tokens": min(num_tokens, usage["completion_tokens"])}}

    def _with_prompt_ids(self, choice: dict[str, Any], ids: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return choice, ids

    def _opening(self, choice: int) -> bytes:
        ids = self._first_prompt_ids(choice)
        deltas = [
            {"delta": {"role": self._role, "content": ""}},
            *([self._delta(self._echoed)] if self._echoed else []),
        ]
        chunks = [self._choice(choice, delta) for delta in deltas]
        return b"".join(self._chunk(chunk, ids if not at else None, 0) for at, chunk in enumerate(chunks))

    def _text_chunk(self, piece: Piece) -> bytes:
        if not self._texts:
            return super()._text_chunk(piece)
        delta, piece = self._texts[piece.index].read(piece)
        has_tokens = self.shows_every_token and (piece.token_ids or piece.logprobs)
        return self._full_chunk(piece, {"delta": delta}) if delta or has_tokens else b""

    def _last_chunk(self, piece: Piece) -> bytes:
        if not self._texts:
            return super()._last_chunk(piece)
        text = self._texts[piece.index]
        before, piece = text.read(piece)
        rest, piece = text.finish(piece)
        if not before or not rest:
            return self._end(piece, {"delta": before or rest})
        return self._chunk(self._choice(piece.index, {"delta": before})) + self._end(piece, {"delta": rest})

    def _finish_reason(self, piece: Piece) -> str | None:
        return self._texts[piece.index].finish_reason(piece) if self._texts else piece.finish_reason

    def _logprobs(self, piece: Piece, is_whole: bool = False) -> dict[str, Any] | None:
        return self._format.chat(piece.logprobs) if self.wanted.logprobs else None

    def _whole(self, piece: Piece) -> tuple[dict[str, Any], Piece]:
        content: dict[str, Any] = {"content": piece.text}
        if self._texts:
            content, piece = self._texts[piece.index].message(piece)
        if self._echoed:
            content["content"] = self._echoed + (content["content"] or "")
        return {"message": {"role": self._role, **content}}, piece

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _no_delta(self) -> dict[str, Any]:
        return {"delta": {}}
