"""Converts a chat request to its template's input. Every refusal is a RequestError that names the field.

Knows nothing of tokens or of answers.
"""

from __future__ import annotations

import reprlib
from typing import Any

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.chat_protocol import ROLES, ChatFields
from pd_cluster.settings.request_settings import OWN_VARIABLES, ChatConfig
from pd_cluster.text.chat_template import ChatTemplate, with_both_reasonings


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content or () if "text" in part]


class Conversation(msgspec.Struct, frozen=True):
    """The input of a template, and the settings for tokenizing the rendered text."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def num_chars(self) -> int:
        """A lower bound of the number of the prompt's characters."""
        return sum(len(text) for message in self.messages for text in _texts(message.get("content")))

    @property
    def nbytes(self) -> int:
        """The size of all texts that a template may write."""
        return len(msgspec.json.encode(self)) if self.variables else self.num_chars

    def render(self, template: ChatTemplate) -> str:
        """Renders the template. Raises RequestError."""
        return template.render(self.messages, self.add_generation_prompt, self.variables, self.continue_final_message)


AS_GIVEN = ChatConfig()


def conversation_of(
    request: ChatFields,
    known: frozenset[str],
    config: ChatConfig = AS_GIVEN,
    takes_images: bool = False,
    checks_none: bool = False,
    roles: frozenset[str] = frozenset(),
) -> Conversation:
    """Makes the template's input. `known`: the template's variables; fields that have no variable are refused.

    `checks_none`: the template expects None as the content of messages with calls; other templates get "".
    `roles`: the template's roles, in addition to the API's. Raises RequestError.
    """
    _check_roles(request, roles | {config.response_role})
    in_parts = config.content_format == "openai"
    continues = bool(request.continue_final_message)
    given_messages = enumerate(request.messages)
    messages = [_for_template(message.to_template(at, takes_images, in_parts), at) for at, message in given_messages]
    if not checks_none:
        messages = [
            {**each, "content": [] if in_parts else ""} if each["content"] is None else each for each in messages
        ]
    if continues and request.opens_answer:
        raise RequestError(
            "continue_final_message: an answer cannot both continue the last message and start a new one; leave out "
            "add_generation_prompt",
            param="continue_final_message",
        )
    if continues and not _ends_in_text(messages[-1].get("content")):
        raise RequestError(
            "continue_final_message: the last message has no text to continue", param="continue_final_message"
        )
    variables = {**config.template_kwargs, **(request.chat_template_kwargs or {})}
    for name in (name for name in OWN_VARIABLES if name in variables):
        raise RequestError(f"chat_template_kwargs.{name}: send it as a field of its own", param="chat_template_kwargs")
    given: dict[str, Any] = {"documents": request.documents}
    if (tools := request.offered_tools) and _shows_tools(request, known, config):
        given["tools"] = [tool.model_dump(exclude_unset=True) for tool in tools]
    for name, value in given.items():
        if value and name not in known:
            raise RequestError(f"{name}: this model's chat template does not use them; leave them out", param=name)
    variables |= {name: value for name, value in given.items() if value}
    variables |= _effort(request.reasoning_effort, known)
    if in_parts:
        messages = [_in_parts(message) for message in messages]
    return Conversation(messages, variables, request.opens_answer, continues)


def _check_roles(request: ChatFields, named: frozenset[str]) -> None:
    """Rejects unknown roles: templates write roles between control tokens, where any text could begin a turn."""
    for at, message in enumerate(request.messages):
        if message.role not in ROLES and message.role not in named:
            known = ", ".join([*ROLES, *sorted(named.difference(ROLES))])
            raise RequestError(
                f"messages[{at}].role: {reprlib.repr(message.role)} is not a role of this model; give one of {known}",
                param="messages",
            )


def _shows_tools(request: ChatFields, known: frozenset[str], config: ChatConfig) -> bool:
    """Whether the prompt shows the tools. Even tools that the answer must not call are shown, so that a conversation's
    prompts share a prefix, unless the config excludes them or the template does not use tools.
    """
    return request.tool_choice != "none" or ("tools" in known and not config.excludes_barred_tools)


def _ends_in_text(content: Any) -> bool:
    return bool(content) and (isinstance(content, str) or "text" in content[-1])


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _effort(effort: str | None, known: frozenset[str]) -> dict[str, Any]:
    """Maps an effort to the template's variable for efforts, or to its switch for thinking.

    Clients send efforts to every model, so an effort is ignored if the template has neither.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    return {"enable_thinking": False} if "enable_thinking" in known and effort == "none" else {}


def _for_template(message: dict[str, Any], at: int) -> dict[str, Any]:
    """Decodes the arguments of calls to objects, as templates expect, and gives reasoning both of its names."""
    message = with_both_reasonings(message)
    calls = message.get("tool_calls")
    if not calls:  # an empty list is removed, too: templates only test whether the key exists
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(calls, list):
        raise _wrong_call(at, "", "must be a list")
    return {**message, "tool_calls": [_call(call, at, f"[{index}]") for index, call in enumerate(calls)]}


def _call(call: Any, at: int, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong_call(at, place, 'must be {"id", "type": "function", "function": {"name", "arguments"}}')
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str | dict):
        raise _wrong_call(at, f"{place}.function.arguments", f"{reprlib.repr(arguments)} is not a JSON object")
    decoded = _decoded(arguments) if isinstance(arguments, str) else arguments
    return {"type": "function", **call, "function": {**function, "arguments": decoded}}


def _decoded(arguments: str) -> Any:
    """Decodes arguments, or returns them unchanged, because a model's text may not be JSON."""
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def _wrong_call(at: int, place: str, why: str) -> RequestError:
    return RequestError(f"messages[{at}].tool_calls{place}: {why}", param="messages")
