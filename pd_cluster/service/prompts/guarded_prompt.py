"""Renders conversations to prompts in which only the template's own control tokens are control tokens.

Clients' texts (contents, documents, tools, template variables) are rendered with marks, which are removed afterwards
(control_tokens.py). An assistant's content keeps the control tokens of its reasoning and calls. A conversation without
texts of control tokens is rendered unchanged. Knows nothing of tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.service.prompts.conversation import Conversation
from pd_cluster.text.control_tokens import ControlTokens, PromptText, pattern_of

OWN_FIELDS = ("role", "content")  # the fields of every message; clients choose the names of other fields
Change = Callable[[str, bool], str]  # arguments: a text, and whether it is an assistant's content


class ControlTokenGuard:
    """`kept`: control tokens that stay control tokens in an assistant's content.

    `normalized`: the tokenizer's normalization before it matches control tokens, if it has one.
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
        """Yields conversations to render, and receives their texts. Raises RequestError.

        In the first conversation, whole control tokens in clients' texts are marked; in the second, so is every sign (a
        control token's character that words do not have). If the two texts then show different control tokens, the
        template has assembled one from pieces of clients' texts, or tested for one; the second text is then used.
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
                "messages: they contain nearly all private-use characters of Unicode, but rendering needs some of "
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

    def plain(self, text: str) -> PromptText:
        """Returns a client's text as a prompt, or part of one, without control tokens."""
        control, normalized = self.control, self._normalized
        shown = text if normalized is None else normalized(text)
        has_any = bool(control.texts) and any(control.pattern.search(each) for each in (text, shown))
        return PromptText(text, () if has_any else None)

    def _kept_in(self, is_reply: bool) -> re.Pattern[str] | None:
        return self._kept if is_reply else None


def _changed(conversation: Conversation, change: Change) -> Conversation:
    def message(fields: dict[str, Any]) -> dict[str, Any]:
        is_reply = fields.get("role") == "assistant"
        return {
            name if name in OWN_FIELDS else change(name, False): value
            if name == "role"  # conversation.py has checked it
            else _each(value, change, is_reply and name == "content")
            for name, value in fields.items()
        }

    variables = {name: _each(value, change, False) for name, value in conversation.variables.items()}
    return msgspec.structs.replace(
        conversation, messages=[message(fields) for fields in conversation.messages], variables=variables
    )


def _each(value: Any, change: Change, is_reply: bool) -> Any:
    """Returns the value with all texts in it changed, including keys of objects."""
    if isinstance(value, str):
        return change(value, is_reply)
    if isinstance(value, dict):
        return {change(key, False): _each(each, change, False) for key, each in value.items()}
    if isinstance(value, list):
        return [_each(each, change, is_reply) for each in value]
    return value


def _texts(conversation: Conversation) -> Iterator[tuple[str, bool]]:
    """Yields all texts that `_changed` would change."""
    found: list[tuple[str, bool]] = []

    def note(text: str, is_reply: bool) -> str:
        found.append((text, is_reply))
        return text

    _changed(conversation, note)
    return iter(found)
