"""Makes the answers of /v1/completions: a text for each choice, which follows its prompt if `echo` is set."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from pd_cluster.service.answers.answer_logprobs import CompletionLogprobs, behind
from pd_cluster.service.answers.answered_weights import OfWeights
from pd_cluster.service.answers.openai_answer import (
    Answer,
    EndReason,
    OfHandle,
    OfMetrics,
    OfPrompt,
    StopReason,
    UnixTime,
)
from pd_cluster.service.generation.prompt_generation import Generation, Usage
from pd_cluster.service.generation.text_sequence import Piece, TokenLogprobs
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.text_service import TextService


class CompletionChoice(Struct, omit_defaults=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason
    token_ids: list[int] | None = None
    stop_reason: StopReason = UNSET
    weight_versions: OfWeights = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: OfPrompt = None


class Completion(Struct, omit_defaults=True):
    id: str
    object: Literal["text_completion"]
    created: UnixTime
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: OfHandle = None
    metrics: OfMetrics = UNSET


class CompletionChunkChoice(Struct, omit_defaults=True):
    index: int
    text: Annotated[str, Meta(description="The new text.")]
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason | None
    token_ids: list[int] | None = None
    stop_reason: StopReason = UNSET
    weight_versions: OfWeights = None
    prompt_token_ids: Annotated[list[int] | None, Meta(description="In a choice's first event.")] = None


class CompletionChunk(Struct, omit_defaults=True):
    """One event of a stream. If usage is requested, the last event has it, without choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: OfMetrics = UNSET


class CompletionAnswer(Answer):
    prefix = "cmpl"

    def __init__(
        self, request: CompletionRequest, model: str, service: TextService, generations: list[Generation]
    ) -> None:
        super().__init__(request, model, service, generations)
        self._echo = bool(request.echo)
        self._has_special = request.add_special_tokens is not False
        self._given: list[str | None] = [None] * len(generations)  # prompt texts to echo unchanged
        self._echoed = [""] * len(generations)
        if request.echo:
            is_cut = request.truncate_prompt_tokens is not None
            self._given = [None if is_cut or not isinstance(each, str) else each for each in request.prompts()]
            self._echoed = [
                each.prompt_text if given is None else given
                for given, each in zip(self._given, generations, strict=True)
            ]
        self._of_prompts: dict[int, list[TokenLogprobs]] = {}  # prompt -> its echoed logprobs

    def whole(self, pieces: list[Piece]) -> Completion:
        return Completion(
            id=self.id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=[self._whole_choice(piece) for piece in pieces],
            usage=self._usage(),
            kv_transfer_params=self.kv_handle,
            metrics=self._metrics(),
        )

    def _whole_choice(self, piece: Piece) -> CompletionChoice:
        return CompletionChoice(
            piece.index,
            self._echoed_in(piece.index) + piece.text,
            self._logprobs(piece, is_whole=True),
            *self._rest(piece),
            prompt_token_ids=self._prompt_ids(piece.index),
            prompt_logprobs=self._prompt_logprobs(self._generation_of(piece.index)),
        )

    def _chunk_of(self, choices: list[CompletionChunkChoice], prompt_ids: list[int] | None = None) -> CompletionChunk:
        for choice in choices:
            choice.prompt_token_ids = prompt_ids
        return CompletionChunk(self.id, "text_completion", self._created, self._model, choices)

    def _choice(
        self, index: int, content: str, logprobs: CompletionLogprobs | None = None, piece: Piece | None = None
    ) -> CompletionChunkChoice:
        return CompletionChunkChoice(index, content, logprobs, *self._rest(piece))

    def _opening(self, choice: int) -> bytes:
        echoed = self._echoed_in(choice)
        if not echoed:
            return b""
        ids = self._first_prompt_ids(choice)
        logprobs = self._format.completion(self._prompt(choice)) if self.wanted.logprobs and self._echo else None
        return self._chunk(self._choice(choice, echoed, logprobs), ids)

    def _logprobs(self, piece: Piece, is_whole: bool = False) -> CompletionLogprobs | None:
        if not self.wanted.logprobs:
            return None
        shifted = behind(piece.logprobs, len(self._echoed_in(piece.index)))
        return self._format.completion([*(self._prompt(piece.index) if is_whole else []), *shifted])

    def _echoed_in(self, choice: int) -> str:
        return self._echoed[choice // self._num_choices]

    def _prompt(self, choice: int) -> list[TokenLogprobs]:
        """Returns the prompt's echoed logprobs."""
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
        """Returns the number of characters of the echoed text before each token of a prompt."""
        generation, given = self.generations[at], self._given[at]
        if given is not None and given != generation.prompt_text:  # for example, the given text contains special tokens
            return self._tokenizer.offsets(given, self._has_special)
        return generation.sequences[0].detokenizer.offsets(generation.prompt_token_ids)

    def _delta(self, text: str | None) -> str:
        return text or ""
