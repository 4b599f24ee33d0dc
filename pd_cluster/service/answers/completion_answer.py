"""The answers of /v1/completions: a text for each choice, after its prompt if that was requested."""

from __future__ import annotations

from typing import Any

from pd_cluster.service.answers.answers import Answer
from pd_cluster.service.answers.logprobs import behind
from pd_cluster.service.generation import Generation
from pd_cluster.service.schema.protocol import CompletionRequest
from pd_cluster.service.sequence import Piece, TokenLogprobs
from pd_cluster.service.service import TextService


class CompletionAnswer(Answer):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, request: CompletionRequest, model: str, service: TextService, generations: list[Generation]
    ) -> None:
        super().__init__(request, model, service, generations)
        self._echo = bool(request.echo)
        self._has_special = request.add_special_tokens is not False
        self._given: list[str | None] = [None] * len(generations)  # prompts that are echoed as they were given
        self._echoed = [""] * len(generations)
        if request.echo:
            is_cut = request.truncate_prompt_tokens is not None
            self._given = [None if is_cut or not isinstance(each, str) else each for each in request.prompts()]
            self._echoed = [
                each.prompt_text if given is None else given
                for given, each in zip(self._given, generations, strict=True)
            ]
        self._of_prompts: dict[int, list[TokenLogprobs]] = {}  # prompt -> its own logprobs, as far as they are echoed

    def _opening(self, choice: int) -> bytes:
        echoed = self._echoed_in(choice)
        if not echoed:
            return b""
        ids = self._first_prompt_ids(choice)
        logprobs = self._format.completion(self._prompt(choice)) if self.wanted.logprobs and self._echo else None
        return self._chunk(self._choice(choice, {"text": echoed}, logprobs), ids)

    def _whole_choice(self, piece: Piece) -> dict[str, Any]:
        return super()._whole_choice(piece) | self._prompt_logprobs(self._generation_of(piece.index))

    def _logprobs(self, piece: Piece, is_whole: bool = False) -> dict[str, Any] | None:
        if not self.wanted.logprobs:
            return None
        shifted = behind(piece.logprobs, len(self._echoed_in(piece.index)))
        return self._format.completion([*(self._prompt(piece.index) if is_whole else []), *shifted])

    def _echoed_in(self, choice: int) -> str:
        return self._echoed[choice // self._num_choices]

    def _prompt(self, choice: int) -> list[TokenLogprobs]:
        """Returns the prompt's own logprobs, as far as they are echoed."""
        if not self._echo:
            return []
        at = choice // self._num_choices
        if at not in self._of_prompts:
            generation = self.generations[at]
            ids, found = generation.prompt_token_ids, generation.prompt_logprobs
            offsets = self._prompt_offsets(at)
            self._of_prompts[at] = [TokenLogprobs(*each) for each in zip(ids, found, offsets, strict=False)]
        return self._of_prompts[at]

    def _prompt_offsets(self, at: int) -> list[int]:
        """Returns how many characters of the echoed text are before each token of a prompt."""
        generation, given = self.generations[at], self._given[at]
        if given is not None and given != generation.prompt_text:  # such as one with special tokens
            return self._tokenizer.offsets(given, self._has_special)
        return generation.sequences[0].detokenizer.offsets(generation.prompt_token_ids)

    def _whole(self, piece: Piece) -> tuple[dict[str, Any], Piece]:
        return {"text": self._echoed_in(piece.index) + piece.text}, piece

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _no_delta(self) -> dict[str, Any]:
        return {"text": ""}
