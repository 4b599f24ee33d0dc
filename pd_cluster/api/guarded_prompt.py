"""Conversations to prompts in which only the template's own control tokens are control tokens.

What clients wrote (contents, documents, tools, variables of the template) is rendered with marks in it and put back
afterwards (control_tokens.py). An assistant's content keeps the marks of its reasoning and calls. A conversation
without such texts is rendered as it is, and so has the tokens that it always had. Knows nothing of tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any

import msgspec

from pd_cluster.api.conversation import Conversation
from pd_cluster.control_tokens import ControlTokens, PromptText, pattern_of
from pd_cluster.errors import RequestError

Change = Callable[[str, bool], str]  # a text, and whether it is an assistant's content


class Guard:
    """`kept`: the texts that stay control tokens in an assistant's content.

    `normalized`: what the tokenizer makes of a text before it looks for control tokens, where it does so.
    """

    def __init__(
        self,
        control: ControlTokens,
        kept: Collection[str] = (),
        normalized: Callable[[str], str] | None = None,
    ) -> None:
        self.control = control
        self._kept = pattern_of(control.texts & {*kept})
        self._normalized = normalized

    def prompt(self, conversation: Conversation) -> Generator[Conversation, str, PromptText]:
        """Yields what must be rendered, and is sent the text. Raises RequestError.

        Whole control tokens get marks first. Then all characters that one needs get them: if this shows other control
        tokens, the template has put one together from pieces of what was written, or looked at these; then the second
        text counts.
        """
        control, texts = self.control, [text for text, _ in _texts(conversation)]
        if not control.texts:
            return PromptText((yield conversation))
        is_hidden = self._normalized is not None and any(
            control.pattern.search(self._normalized(text)) and not control.pattern.search(text) for text in texts
        )
        if not control.has_signs(texts) and not any(map(control.pattern.search, texts)):
            text = yield conversation
            return control.prompt_of(text, None) if is_hidden else PromptText(text)
        marks = control.draw_marks(texts)
        if marks is None:
            raise RequestError(
                "messages: they have nearly all private-use characters of Unicode, of which some are needed to render "
                "them; leave some out",
                param="messages",
            )
        hidden = _changed(conversation, lambda text, is_reply: control.hidden(text, marks, self._kept_in(is_reply)))
        blurred = _changed(conversation, lambda text, is_reply: control.blurred(text, marks, self._kept_in(is_reply)))
        rendered = yield hidden
        again = yield blurred
        if control.names_in(again) != control.names_in(rendered):
            return control.prompt_of(again, marks)
        return control.prompt_of(rendered, marks) if is_hidden or hidden != conversation else PromptText(rendered)

    def _kept_in(self, is_reply: bool) -> re.Pattern[str] | None:
        return self._kept if is_reply else None


def _changed(conversation: Conversation, change: Change) -> Conversation:
    def message(fields: dict[str, Any]) -> dict[str, Any]:
        is_reply = fields.get("role") == "assistant"
        return {
            name: value if name == "role" else _each(value, change, is_reply and name == "content")
            for name, value in fields.items()
        }

    variables = {name: _each(value, change, False) for name, value in conversation.variables.items()}
    return msgspec.structs.replace(
        conversation, messages=[message(fields) for fields in conversation.messages], variables=variables
    )


def _each(value: Any, change: Change, is_reply: bool) -> Any:
    """The value with all texts in it changed, keys of objects, too."""
    if isinstance(value, str):
        return change(value, is_reply)
    if isinstance(value, dict):
        return {change(key, False): _each(each, change, False) for key, each in value.items()}
    if isinstance(value, list):
        return [_each(each, change, is_reply) for each in value]
    return value


def _texts(conversation: Conversation) -> Iterator[tuple[str, bool]]:
    """All texts that `_changed` would change."""
    found: list[tuple[str, bool]] = []

    def note(text: str, is_reply: bool) -> str:
        found.append((text, is_reply))
        return text

    _changed(conversation, note)
    return iter(found)
