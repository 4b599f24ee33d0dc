"""What LMDeploy's calls take as prompts, sorted and checked before any work, and turned into token ids.

Every refusal is a RequestError that names the prompt. Knows nothing of what becomes of the answer.
"""

from __future__ import annotations

import asyncio
import reprlib
from typing import Any, NamedTuple

import msgspec

from pd_cluster.api.chat_prompt import rendered
from pd_cluster.api.chat_protocol import ChatFields
from pd_cluster.api.conversation import conversation_of
from pd_cluster.api.guarded_prompt import Guard
from pd_cluster.api.parse import parse
from pd_cluster.errors import RequestError
from pd_cluster.offline.lmdeploy.messages import check_text
from pd_cluster.offline.lmdeploy.templates import Way
from pd_cluster.text import Tokenizer

Message = dict[str, Any]
Prompt = str | list[Message] | list[int]  # a text, a conversation, or token ids


class Prompts(NamedTuple):
    """`is_one`: it did not come in a list, and so its response does not leave in one."""

    items: list[Prompt]
    is_one: bool

    @property
    def places(self) -> list[str]:
        """What errors call each of them."""
        return ["prompts"] if self.is_one else [f"prompts[{at}]" for at in range(len(self.items))]


def prompts_of(given: Any) -> Prompts:
    """Raises RequestError."""
    if isinstance(given, str):
        return Prompts([given], True)
    if isinstance(given, tuple):
        raise _wrong("prompts", given)
    if not isinstance(given, list):
        raise RequestError(
            f"prompts: {reprlib.repr(given)}; expected a text, a conversation, or a list of either", param="prompts"
        )
    if not given:
        raise RequestError("prompts: empty; give at least one text or conversation", param="prompts")
    if all(isinstance(item, dict) for item in given):
        return Prompts([_checked("prompts", given)], True)
    for at, item in enumerate(given):
        place = f"prompts[{at}]"
        if not isinstance(item, str | list):
            raise _wrong(place, item)
        if isinstance(item, str) != isinstance(given[0], str):
            raise RequestError(f"{place}: texts and conversations do not go into one list; call twice", param="prompts")
        _checked(place, item)
    return Prompts(list(given), False)


def prompt_of(given: Any) -> Prompt:
    """One, as `generate` takes it: token ids too. Raises RequestError."""
    if isinstance(given, list) and given and all(type(item) is int for item in given):
        return list(given)
    found = prompts_of(given)
    if not found.is_one:
        raise RequestError("messages: one text or one conversation; for several use batch_infer", param="messages")
    return found.items[0]


def _checked(place: str, item: Any) -> Any:
    if isinstance(item, str):
        return item
    if not item:
        raise RequestError(f"{place}: an empty conversation; give at least one message", param="prompts")
    for at, message in enumerate(item):
        if not isinstance(message, dict):
            raise _wrong(f"{place}[{at}]", message)
    return item


def _wrong(place: str, item: Any) -> RequestError:
    if isinstance(item, tuple):
        return RequestError(f"{place}: images and the like are not supported; give texts alone", param="prompts")
    return RequestError(
        f'{place}: {reprlib.repr(item)} is neither a text nor a message; messages are {{"role": …, "content": …}}',
        param="prompts",
    )


async def token_ids_of(
    tokenizer: Tokenizer, prompt: Prompt, way: Way, special: bool = True, guard: Guard | None = None
) -> list[int]:
    """They may be more than a context holds. `special`: a text begins a sequence. Raises RequestError.

    `guard`: keeps control tokens out of messages, as over HTTP.
    """
    if isinstance(prompt, str):
        return await asyncio.to_thread(tokenizer.encode, prompt, special)
    if isinstance(prompt[0], int):
        return [token_id for token_id in prompt if isinstance(token_id, int)]
    template = way.template or tokenizer.template
    assert template is not None  # else the way would be plain
    try:
        request = parse(msgspec.json.encode({"messages": prompt}), ChatFields)
    except (TypeError, ValueError) as error:  # what JSON has no word for
        raise RequestError(f"messages: {error}", param="messages") from None
    conversation = conversation_of(request, template.variables)
    text = await asyncio.to_thread(rendered, conversation, template, guard)
    special = way.template is not None  # a folder's own template writes what begins a sequence, LMDeploy's do not
    if guard is None:
        return await asyncio.to_thread(tokenizer.encode, text.text, special)
    return await asyncio.to_thread(tokenizer.encode_prompt, text, guard.control, special)


def as_prompt(given: Prompt, way: Way, do_preprocess: bool, place: str) -> Prompt:
    """A text is a user's message, unless it shall go to the model as it is. Raises RequestError."""
    is_plain = way.is_plain or not do_preprocess
    if isinstance(given, str):
        check_text(place, given)
        return given if is_plain else [{"role": "user", "content": given}]
    if is_plain and not isinstance(given[0], int):
        why = "do_preprocess is False" if not do_preprocess else "there is none (see model_name, chat_template_config)"
        raise RequestError(
            f"{place}: a conversation needs a chat template, and {why}; give a text", param=place.partition("[")[0]
        )
    return given
