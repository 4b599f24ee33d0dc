"""Turns conversations into prompts with a model's chat template, in a sandbox. Knows nothing of tokens or HTTP.

Nothing here limits how long a template runs; a template that a client sends is therefore rendered in a child process
(service/prompts/template_child.py).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pd_cluster.errors import ModelError, RequestError
from pd_cluster.text.template_roles import named_roles

NOTHING: Mapping[str, Any] = MappingProxyType({})
# Errors that a template's expressions may raise on messages that it was not written for.
TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
MAX_ERROR_NUM_CHARS = 300  # templates can raise errors whose text they choose
_CONTENT_IS_NONE = re.compile(r"""content(["']\])?\s*(is(\s+not)?|==|!=)\s*none""", re.IGNORECASE)
REASONING = ("reasoning", "reasoning_content")  # names of the same field of a message; a template uses one of them


class ChatTemplate:
    """One compiled template. `variables` are the names that it reads, `constants` the values passed at each rendering.

    `roles`: the roles that the template names, and further roles of the model.
    """

    def __init__(self, source: str, constants: Mapping[str, Any] = NOTHING, further_roles: Iterable[str] = ()) -> None:
        """`further_roles`: roles that are valid even if the source does not name them.

        Raises ModelError if the source does not compile.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            self.roles = named_roles(parsed).union(further_roles)  # read before compiling folds constants in place
            self.variables = frozenset(meta.find_undeclared_variables(parsed))
        except (TemplateError, *TEMPLATE_FAULTS) as error:
            why = str(error)[:MAX_ERROR_NUM_CHARS]
            raise ModelError(f"the chat template does not compile: {why}") from None
        self.source = source
        self._constants = constants

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = NOTHING,
        continue_final_message: bool = False,
    ) -> str:
        """Returns the prompt. With `continue_final_message` it ends where the last message's content ends.

        Raises RequestError if the template rejects the messages.
        """
        mark = ""
        if continue_final_message:
            mark = secrets.token_hex(8) + " "  # the space disappears if the template trims the content
            messages = [*messages[:-1], {**messages[-1], "content": _with_mark(messages[-1]["content"], mark)}]
        defaults = {"tools": None, "documents": None}  # transformers always passes these, so templates test for None
        own = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = str(self._template.render({**defaults, **self._constants, **variables, **own}))
        except (TemplateError, *TEMPLATE_FAULTS) as error:
            why = str(error)[:MAX_ERROR_NUM_CHARS]
            raise RequestError(f"the chat template rejects these messages: {why}", param="messages") from None
        return _cut_at(text, mark) if mark else text


def _with_mark(content: str | list[dict[str, str]], mark: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content + mark
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]


def _cut_at(text: str, mark: str) -> str:
    """Returns the text before the mark. If the mark's space was trimmed, so is the end of the text."""
    before, found, _ = text.rpartition(mark)
    if found:
        return before
    before, found, _ = text.rpartition(mark.rstrip())
    if not found:
        raise RequestError(
            "continue_final_message: the chat template leaves out the last message's content, so there is nothing to "
            "continue",
            param="continue_final_message",
        )
    return before.rstrip()


def checks_none(source: str) -> bool:
    """Returns whether a template tests if a message's content is None."""
    return _CONTENT_IS_NONE.search(source) is not None


def with_both_reasonings(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message with its reasoning under both names."""
    for one, other in (REASONING, REASONING[::-1]):
        if one in message and other not in message:
            return {**message, other: message[one]}
    return message


class GenerationBlock(Extension):
    """The `{% generation %}` block, which marks the model's text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
