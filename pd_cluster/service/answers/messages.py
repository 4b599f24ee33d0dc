"""A choice's text as a message: content, reasoning and calls, whole or in deltas. Independent of chunks."""

from __future__ import annotations

from typing import Any

from pd_cluster.parsers.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pd_cluster.service.generation import Generation
from pd_cluster.service.sequence import Piece


class ChoiceText:
    """`reasoning` has two names in messages, vLLM's current and former one, so that clients may read either."""

    def __init__(self, generation: Generation, shows_reasoning: bool) -> None:
        assert generation.new_reader is not None
        self._reader = generation.new_reader()
        self._new_call_id = generation.new_call_id
        self._calls_finish = generation.calls_finish
        self._shows_reasoning = shows_reasoning
        self.reasoning = ""  # so far, whether it is shown or not

    def finish_reason(self, piece: Piece) -> str | None:
        """Returns what the last piece's text ended with: calls, unless a stop of the request has cut the last one."""
        is_cut = piece.stop_reason is not None and self._reader.is_cut
        makes_calls = self._calls_finish and self._reader.num_calls > 0 and not is_cut
        return "tool_calls" if makes_calls and piece.finish_reason == "stop" else piece.finish_reason

    def read(self, text: str) -> dict[str, Any]:
        """Returns the delta for new text; empty while nothing is certain."""
        return self._delta(self._reader.feed(text))

    def finish(self) -> dict[str, Any]:
        """Returns the delta of text that was held back."""
        return self._delta(self._reader.finish())

    def message(self, text: str) -> dict[str, Any]:
        """Returns a message's fields besides its role. The content is None where there are only calls."""
        message = self._delta([*self._reader.feed(text), *self._reader.finish()])
        calls = message.pop("tool_calls", [])
        for call in calls:
            del call["index"]
        content = message.pop("content", None if calls else "")
        unknown = {
            "reasoning": None,
            "reasoning_content": None,
        }  # clients read them without checking that they exist
        return {"content": content, **unknown, **message, **({"tool_calls": calls} if calls else {})}

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
