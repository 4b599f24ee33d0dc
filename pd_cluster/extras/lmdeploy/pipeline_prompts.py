"""Sorts and checks prompts of LMDeploy's calls before any work, and converts them to token ids.

Each RequestError names the prompt. Knows nothing of answers.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.extras.lmdeploy.generation_config import check_text
from pd_cluster.extras.lmdeploy.prompt_templates import PromptStyle
from pd_cluster.media.video_inputs import AskedVideo
from pd_cluster.offline.llm_media import check_picture
from pd_cluster.offline.llm_prompts import PICTURE_PART, named_pictures
from pd_cluster.service.media.media_preparation import GIVEN
from pd_cluster.service.prompts.chat_prompt import rendered
from pd_cluster.service.prompts.conversation import conversation_of
from pd_cluster.service.prompts.guarded_prompt import ControlTokenGuard
from pd_cluster.service.schema.chat_protocol import ChatFields
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.text.chat_template import checks_none
from pd_cluster.text.control_tokens import PromptText
from pd_cluster.text.tokenizer import Tokenizer

Message = dict[str, Any]
Prompt = str | list[Message] | list[int]  # a text, a conversation, or token ids


IMAGE_TOKEN = "<IMAGE_TOKEN>"


class Encoded(NamedTuple):
    """A prompt's tokens, with a placeholder for each image, and the images as objects or URLs."""

    token_ids: list[int]
    pictures: tuple[Any, ...] = ()


class Prompts(NamedTuple):
    """`is_one`: the caller gave a single prompt outside of a list, and gets its response in the same form."""

    items: list[Prompt]
    is_one: bool

    @property
    def places(self) -> list[str]:
        """The prompts' names in errors."""
        return ["prompts"] if self.is_one else [f"prompts[{at}]" for at in range(len(self.items))]


def prompts_of(given: Any, takes_images: bool = False) -> Prompts:
    """Sorts the prompts. A tuple has a text, and an image or a list of images. Raises RequestError."""
    if isinstance(given, str):
        return Prompts([given], True)
    if isinstance(given, tuple):
        return Prompts([_illustrated("prompts", given, takes_images)], True)
    if not isinstance(given, list):
        raise RequestError(
            f"prompts: {reprlib.repr(given)}; expected a text, a conversation, or a list of either", param="prompts"
        )
    if not given:
        raise RequestError("prompts: empty; give at least one text or conversation", param="prompts")
    if all(isinstance(item, dict) for item in given):
        return Prompts([_checked("prompts", given)], True)
    items = [
        _illustrated(f"prompts[{at}]", item, takes_images) if isinstance(item, tuple) else item
        for at, item in enumerate(given)
    ]
    for at, item in enumerate(items):
        place = f"prompts[{at}]"
        if not isinstance(item, str | list):
            raise _wrong(place, item)
        if isinstance(item, str) != isinstance(items[0], str):
            raise RequestError(f"{place}: a list cannot mix texts and conversations; call twice", param="prompts")
        _checked(place, item)
    return Prompts(items, False)


def prompt_of(given: Any, takes_images: bool = False) -> Prompt:
    """Returns one prompt for `generate`, which may also be token ids. Raises RequestError."""
    if isinstance(given, list) and given and all(type(item) is int for item in given):
        return list(given)
    found = prompts_of(given, takes_images)
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


def _illustrated(place: str, item: tuple[Any, ...], takes_images: bool) -> list[Message]:
    """Returns a text and its images as a user's message. Raises RequestError.

    Images come before the text, or at LMDeploy's marks in the text.
    """
    if not takes_images:
        raise _wrong(place, item)
    if len(item) != 2 or not isinstance(item[0], str):
        raise RequestError(f"{place}: a tuple must have a text, and a picture or a list of pictures", param="prompts")
    text, given = item
    pictures = list(given) if isinstance(given, list | tuple) else [given]
    for at, picture in enumerate(pictures):
        check_picture(picture, f"{place}[1][{at}]")
    parts = [{"type": PICTURE_PART, PICTURE_PART: picture} for picture in pictures]
    texts = text.split(IMAGE_TOKEN)
    if len(texts) == 1:
        return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    if len(texts) - 1 != len(pictures):
        raise RequestError(
            f"{place}: {len(texts) - 1} times {IMAGE_TOKEN} for {len(pictures)} pictures; write it once for each",
            param="prompts",
        )
    content: list[Message] = []
    for at, piece in enumerate(texts):
        content += [{"type": "text", "text": piece}] if piece else []
        content += parts[at : at + 1]
    return [{"role": "user", "content": content}]


def _wrong(place: str, item: Any) -> RequestError:
    if isinstance(item, tuple):
        return RequestError(f"{place}: images and other media are not supported; give only texts", param="prompts")
    return RequestError(
        f'{place}: {reprlib.repr(item)} is neither a text nor a message; messages are {{"role": …, "content": …}}',
        param="prompts",
    )


async def encoded(
    tokenizer: Tokenizer,
    prompt: Prompt,
    way: PromptStyle,
    special: bool = True,
    guard: ControlTokenGuard | None = None,
    spelled: Callable[[PromptText, Sequence[Any]], PromptText] | None = None,
) -> Encoded:
    """Returns token ids, possibly more than a context holds. `special`: whether a text begins a sequence, and so gets
    the special tokens of a beginning. Raises RequestError.

    `guard`: keeps control tokens out of messages, as over HTTP. `spelled` converts a prompt with images to the form
    that the model's tokenizer expects; None: the model takes no images.
    """
    if isinstance(prompt, str):
        return Encoded(await asyncio.to_thread(tokenizer.encode, prompt, special))
    if isinstance(prompt[0], int):
        return Encoded([token_id for token_id in prompt if isinstance(token_id, int)])
    template = way.template or tokenizer.template
    assert template is not None  # only a plain text has no template
    messages, given = named_pictures([message for message in prompt if isinstance(message, dict)])
    try:
        request = parse(msgspec.json.encode({"messages": messages}), ChatFields)
    except (TypeError, ValueError) as error:  # values that JSON cannot express
        raise RequestError(f"messages: {error}", param="messages") from None
    takes_images = spelled is not None
    media = [medium for message in request.messages for medium in message.media(0)] if takes_images else []
    if media and way.template is not None:
        raise RequestError("messages: images need the chat template of the model's folder", param="messages")
    objects = {f"{GIVEN}{at}": picture for at, picture in enumerate(given)}
    pictures = tuple(
        objects.get(each.url, AskedVideo(each.url) if each.kind == "video" else each.url) for each in media
    )
    conversation = conversation_of(
        request,
        template.variables,
        takes_images=takes_images,
        checks_none=checks_none(template.source),
        roles=template.roles,
    )
    text = await asyncio.to_thread(rendered, conversation, template, guard)
    text = text if spelled is None else spelled(text, pictures)
    special = (
        way.template is not None
    )  # a folder's own template writes the sequence's first token; LMDeploy's templates do not
    if guard is None:
        return Encoded(await asyncio.to_thread(tokenizer.encode, text.text, special), pictures)
    return Encoded(await asyncio.to_thread(tokenizer.encode_prompt, text, guard.control, special), pictures)


def as_prompt(given: Prompt, way: PromptStyle, do_preprocess: bool, place: str) -> Prompt:
    """Converts a text to a user's message, unless the model gets it unchanged. Raises RequestError."""
    is_plain = way.is_plain or not do_preprocess
    if isinstance(given, str):
        check_text(place, given)
        return given if is_plain else [{"role": "user", "content": given}]
    if is_plain and not isinstance(given[0], int):
        why = "do_preprocess is False" if not do_preprocess else "there is none (see model_name, chat_template_config)"
        raise RequestError(
            f"{place}: a conversation needs a chat template, but {why}; give a text", param=place.partition("[")[0]
        )
    return given
