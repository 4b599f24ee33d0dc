"""A choice's text as a message: content, reasoning and calls, whole or in deltas. Independent of chunks."""

from __future__ import annotations

from typing import Any

import msgspec

from pd_cluster.parsers.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pd_cluster.service.answers.token_shares import TokenShares
from pd_cluster.service.generation import Generation
from pd_cluster.service.sequence import Piece, TokenLogprobs


class ChoiceText:
    """`reasoning` has two names in messages, vLLM's current and former one, so that clients may read either.

    Where it is hidden, a piece keeps only the tokens that wrote content.
    """

    def __init__(self, generation: Generation) -> None:
        assert generation.new_reader is not None
        self._reader = generation.new_reader()
        self._new_call_id = generation.new_call_id
        self._calls_finish = generation.calls_finish
        self._shows_reasoning = not generation.hides_reasoning
        lists_tokens = generation.every_token or generation.sampling.logprobs is not None
        shows_stop_token = generation.sequences[0].shows_stop_token
        self._shares = None if self._shows_reasoning or not lists_tokens else TokenShares(shows_stop_token)
        self.reasoning = ""  # so far, whether it is shown or not

    def finish_reason(self, piece: Piece) -> str | None:
        """Returns what the last piece's text ended with: calls, unless a stop of the request has cut the last one."""
        is_cut = piece.stop_reason is not None and self._reader.is_cut
        makes_calls = self._calls_finish and self._reader.num_calls > 0 and not is_cut
        return "tool_calls" if makes_calls and piece.finish_reason == "stop" else piece.finish_reason

    def read(self, piece: Piece) -> tuple[dict[str, Any], Piece]:
        """Returns the delta for new text, empty while nothing is certain; and the piece as clients may see it."""
        if self._shares is None:
            return self._delta(self._reader.feed(piece.text)), piece
        parts: list[Part] = []
        tokens: list[TokenLogprobs] = []
        for text in self._shares.cut(piece):
            found = self._reader.feed(text)
            parts += found
            tokens += self._tokens_of(found)
        return self._delta(parts), _with_tokens(piece, tokens)

    def finish(self, piece: Piece) -> tuple[dict[str, Any], Piece]:
        """Returns the delta of text that was held back. `piece`: the last, as `read` returned it; it gets that text's
        tokens.
        """
        parts = self._reader.finish()
        if self._shares is not None:
            piece = _with_tokens(piece, [*piece.logprobs, *self._tokens_of(parts)])
        return self._delta(parts), piece

    def message(self, piece: Piece) -> tuple[dict[str, Any], Piece]:
        """Returns a message's fields besides its role, and the piece as clients may see it. The content is None where
        there are only calls.
        """
        message, piece = self.read(piece)
        rest, piece = self.finish(piece)
        calls = _joined_calls([*message.pop("tool_calls", []), *rest.pop("tool_calls", [])])
        for name, text in rest.items():
            message[name] = message.get(name, "") + text
        content = message.pop("content", None if calls else "")
        unknown = {
            "reasoning": None,
            "reasoning_content": None,
        }  # clients read them without checking that they exist
        return {"content": content, **unknown, **message, **({"tool_calls": calls} if calls else {})}, piece

    def _tokens_of(self, parts: list[Part]) -> list[TokenLogprobs]:
        if self._shares is None:
            return []
        return [token for each in self._shares.of(parts, self._reader.num_held) for token in each]

    def _delta(self, parts: list[Part]) -> dict[str, Any]:
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        self.reasoning += reasoning
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if isinstance(part, CallBegin):
                function = {"name": part.name, "arguments": ""}
                calls[part.index] = {
                    "index": part.index,
                    "id": self._new_call_id(part.name, part.index),
                    "type": "function",
                    "function": function,
                }
            elif isinstance(part, CallArguments):
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        found: dict[str, Any] = {"content": content} if content else {}
        if reasoning and self._shows_reasoning:
            found |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return found | ({"tool_calls": list(calls.values())} if calls else {})


def _with_tokens(piece: Piece, tokens: list[TokenLogprobs]) -> Piece:
    return msgspec.structs.replace(piece, token_ids=[token.token_id for token in tokens], logprobs=tokens)


def _joined_calls(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the calls of a whole message; a delta without an id goes on with the call before it."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        del delta["index"]
        if "id" in delta:
            calls.append(delta)
        else:
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls
