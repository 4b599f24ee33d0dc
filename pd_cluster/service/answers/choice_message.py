"""Makes a message of a choice's text: content, reasoning and calls, whole or in deltas. Independent of chunks."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning
from pd_cluster.service.answers.token_alignment import TokenAlignment
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece, TokenLogprobs


class CalledFunction(Struct):
    name: str
    arguments: Annotated[str, Meta(description="A JSON object as text. The model wrote it: check it before use.")]


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Struct, omit_defaults=True):
    role: str
    content: str | None
    reasoning: Annotated[str | UnsetType | None, Meta(description="The model's text before its answer.")] = UNSET
    reasoning_content: Annotated[str | UnsetType | None, Meta(description="The reasoning, under its older name.")] = (
        UNSET
    )
    tool_calls: Annotated[list[ToolCall] | None, Meta(description="The calls; absent if there are none.")] = None


class FunctionDelta(Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Struct, omit_defaults=True):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class Delta(Struct, omit_defaults=True):
    """The new part of a message. The first delta of a choice has the role."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChoiceText:
    """One choice's text. Messages have `reasoning` under two names, vLLM's current and former one.

    If reasoning is hidden, a piece keeps only the tokens of content.
    """

    def __init__(self, generation: Generation) -> None:
        assert generation.new_reader is not None
        self._reader = generation.new_reader()
        self._new_call_id = generation.new_call_id
        self._calls_finish = generation.calls_finish
        self._shows_reasoning = not generation.hides_reasoning
        lists_tokens = generation.every_token or generation.sampling.logprobs is not None
        shows_stop_token = generation.sequences[0].shows_stop_token
        self._shares = None if self._shows_reasoning or not lists_tokens else TokenAlignment(shows_stop_token)
        self.reasoning = ""  # the reasoning so far, shown or hidden

    def finish_reason(self, piece: Piece) -> str | None:
        """Returns the finish reason of the last piece: "tool_calls" if it made calls, unless the request's stop cut the
        last call.
        """
        is_cut = piece.stop_reason is not None and self._reader.is_cut
        makes_calls = self._calls_finish and self._reader.num_calls > 0 and not is_cut
        return "tool_calls" if makes_calls and piece.finish_reason == "stop" else piece.finish_reason

    def read(self, piece: Piece) -> tuple[Delta | None, Piece]:
        """Returns the delta for new text, or None if no text is final yet, and the piece as clients may see it."""
        if self._shares is None:
            return self._delta(self._reader.feed(piece.text)), piece
        parts: list[Part] = []
        tokens: list[TokenLogprobs] = []
        for text in self._shares.cut(piece):
            found = self._reader.feed(text)
            parts += found
            tokens += self._tokens_of(found)
        return self._delta(parts), _with_tokens(piece, tokens)

    def finish(self, piece: Piece) -> tuple[Delta | None, Piece]:
        """Returns the delta of the text that was held back (None without such text), and the last piece that `read`
        returned (`piece`), now with the tokens of this text.
        """
        parts = self._reader.finish()
        if self._shares is not None:
            piece = _with_tokens(piece, [*piece.logprobs, *self._tokens_of(parts)])
        return self._delta(parts), piece

    def message(self, piece: Piece, role: str = "assistant") -> tuple[AnswerMessage, Piece]:
        """Returns a message, and the piece as clients may see it. The content is None if there are only calls."""
        first, piece = self.read(piece)
        last, piece = self.finish(piece)
        deltas = [each for each in (first, last) if each is not None]
        calls = _joined_calls([call for each in deltas for call in each.tool_calls or []])
        content, reasoning = _joined([each.content for each in deltas]), _joined([each.reasoning for each in deltas])
        shown = "" if content is None and not calls else content
        # Clients read the reasoning without checking that it exists.
        return AnswerMessage(role, shown, reasoning, reasoning, calls or None), piece

    def _tokens_of(self, parts: list[Part]) -> list[TokenLogprobs]:
        if self._shares is None:
            return []
        return [token for each in self._shares.of(parts, self._reader.num_held) for token in each]

    def _delta(self, parts: list[Part]) -> Delta | None:
        content = "".join([part.text for part in parts if isinstance(part, Content)])
        reasoning = "".join([part.text for part in parts if isinstance(part, Reasoning)])
        self.reasoning += reasoning
        call_ids: dict[int, str] = {}
        functions: dict[int, FunctionDelta] = {}
        for part in parts:
            if isinstance(part, CallBegin):
                call_ids[part.index] = self._new_call_id(part.name, part.index)
                functions[part.index] = FunctionDelta(part.name, "")
            elif isinstance(part, CallArguments):
                function = functions.setdefault(part.index, FunctionDelta())
                function.arguments = (function.arguments or "") + part.text
        calls = [
            ToolCallDelta(at, call_ids.get(at), "function" if at in call_ids else None, function)
            for at, function in functions.items()
        ]
        shown = reasoning if reasoning and self._shows_reasoning else None
        has_news = content or shown or calls
        return Delta(None, content or None, shown, shown, calls or None) if has_news else None


def _with_tokens(piece: Piece, tokens: list[TokenLogprobs]) -> Piece:
    return msgspec.structs.replace(piece, token_ids=[token.token_id for token in tokens], logprobs=tokens)


def _joined(texts: list[str | None]) -> str | None:
    known = [text for text in texts if text is not None]
    return "".join(known) if known else None


def _joined_calls(deltas: list[ToolCallDelta]) -> list[ToolCall]:
    """Returns the calls of a whole message; a delta without an id continues the call before it."""
    calls: list[ToolCall] = []
    for delta in deltas:
        assert delta.function is not None
        if delta.id is not None:
            calls.append(ToolCall(delta.id, "function", CalledFunction(delta.function.name or "", "")))
        calls[-1].function.arguments += delta.function.arguments or ""
    return calls
