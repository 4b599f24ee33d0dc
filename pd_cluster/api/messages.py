"""A choice's text as a message has it: content, reasoning and calls, whole or in deltas. Knows nothing of chunks."""

from __future__ import annotations

from typing import Any

from pd_cluster.api.generation import Generation
from pd_cluster.parsers.parts import CallArguments, CallBegin, Content, Part, Reasoning


class ChoiceText:
    """`reasoning` has two names in messages, vLLM's of today and that of before, so that either may be read."""

    def __init__(self, generation: Generation, shows_reasoning: bool) -> None:
        assert generation.new_reader is not None
        self._reader = generation.new_reader()
        self._new_call_id = generation.new_call_id
        self._calls_finish = generation.calls_finish
        self._shows_reasoning = shows_reasoning

    @property
    def ends_in_calls(self) -> bool:
        """Whether a finish_reason says that there are calls."""
        return self._calls_finish and self._reader.num_calls > 0

    def read(self, text: str) -> dict[str, Any]:
        """The delta that comes of new text; empty while nothing is certain."""
        return self._delta(self._reader.feed(text))

    def finish(self) -> dict[str, Any]:
        """The delta of what was held back."""
        return self._delta(self._reader.finish())

    def message(self, text: str) -> dict[str, Any]:
        """What a message has besides its role. The content is None where there are only calls."""
        message = self._delta([*self._reader.feed(text), *self._reader.finish()])
        calls = message.pop("tool_calls", [])
        for call in calls:
            del call["index"]
        content = message.pop("content", None if calls else "")
        unknown = {
            "reasoning": None,
            "reasoning_content": None,
        }  # clients look for them without asking whether they are
        return {"content": content, **unknown, **message, **({"tool_calls": calls} if calls else {})}

    def _delta(self, parts: list[Part]) -> dict[str, Any]:
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning)) if self._shows_reasoning else ""
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if isinstance(part, CallBegin):
                function = {"name": part.name, "arguments": ""}
                calls[part.index] = {
                    "index": part.index,
                    "id": self._new_call_id(),
                    "type": "function",
                    "function": function,
                }
            elif isinstance(part, CallArguments):
                call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
        found: dict[str, Any] = {"content": content} if content else {}
        if reasoning:
            found |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return found | ({"tool_calls": list(calls.values())} if calls else {})
