"""Reads prompts, conversations and parameters in all accepted forms, and returns a list of each.

Every refusal is a RequestError, before any work.
"""

from __future__ import annotations

import difflib
import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pd_cluster.errors import RequestError
from pd_cluster.media.processor_options import ReadOptions
from pd_cluster.media.video_inputs import MediaWithOptions
from pd_cluster.offline.llm_media import check_picture, videos_of
from pd_cluster.offline.llm_sampling import HALF, SamplingParams, is_text
from pd_cluster.service.media.media_preparation import GIVEN


class Known(list[int]):
    """Token ids with a known text: the ids are computed, the text is reported."""

    def __init__(self, token_ids: list[int], text: str) -> None:
        super().__init__(token_ids)
        self.text = text


class IllustratedText(str):
    """A text with a placeholder for each of the `pictures`."""

    pictures: tuple[Any, ...] = ()


class IllustratedIds(list[int]):
    """Token ids with a placeholder for each of the `pictures`."""

    pictures: tuple[Any, ...] = ()


Prompt = str | list[int]
MEDIA = ("multi_modal_data", "multimodal_data")  # vLLM's name and FastDeploy's
OPTIONS = "mm_processor_kwargs"
MULTIMODAL = (*MEDIA, OPTIONS, "multi_modal_uuids")
IMAGES, VIDEOS = ("image", "images"), ("video", "videos")
PICTURE_PART = "image_pil"  # vLLM's type of a message part with an image
KINDS = "a string, a list of token ids, a dict, or a list of these"


def read_prompts(prompts: Any, prompt_token_ids: Any) -> list[Prompt]:
    """Reads both arguments of `generate`. If both are given, each text has its token ids."""
    if prompts is None and prompt_token_ids is None:
        raise RequestError("prompts: nothing to continue; give prompts, or prompt_token_ids", param="prompts")
    if prompts is not None and prompt_token_ids is not None:
        return _pairs(read_prompts(prompts, None), read_prompts(None, prompt_token_ids))
    name, given = ("prompts", prompts) if prompts is not None else ("prompt_token_ids", prompt_token_ids)
    if isinstance(given, str | Mapping):
        return [_prompt(name, given)]
    several = _listed(name, given, KINDS)
    if not several:
        raise RequestError(f"{name}: empty; give {KINDS}", param=name)
    if _is_id(several[0]):
        return [_token_ids(name, several)]
    kinds = {_kind(each) for each in several}
    if wrong := sorted(kinds - {"strings", "dicts", "lists"}):
        raise RequestError(f"{name}: {' and '.join(wrong)} in the list; give {KINDS}", param=name)
    return [_prompt(f"{name}[{at}]", each) for at, each in enumerate(several)]


def _pairs(texts: list[Prompt], ids: list[Prompt]) -> list[Prompt]:
    if len(texts) != len(ids):
        raise RequestError(
            f"prompt_token_ids: {len(ids)} for {len(texts)} prompts; give as many, or only one of the two arguments",
            param="prompt_token_ids",
        )
    found: list[Prompt] = []
    for at, (text, token_ids) in enumerate(zip(texts, ids, strict=True)):
        if not isinstance(text, str) or isinstance(token_ids, str):
            raise RequestError(f"prompts[{at}]: with prompt_token_ids it must be a text", param="prompts")
        found.append(Known(token_ids, text))
    return found


def read_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """Reads one conversation or a list of them."""
    several = _listed("messages", messages)
    if not several:
        raise RequestError("messages: empty; give a conversation, or a list of them", param="messages")
    if all(isinstance(each, Mapping) for each in several):
        return [several]
    if not all(isinstance(each, list | tuple) for each in several):
        raise RequestError(
            f"messages: {' and '.join(sorted({_kind(each) for each in several}))} in one list; give a list of "
            f"messages, or a list of such lists",
            param="messages",
        )
    return [list(each) for each in several]


def paired(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Returns the parameters of each prompt."""
    name = "sampling_params"
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    several = _listed(name, params, "SamplingParams, or a list of them")
    for at, each in enumerate(several):
        if not isinstance(each, SamplingParams):
            raise RequestError(f"{name}[{at}]: {type(each).__name__}; must be SamplingParams", param=name)
    if len(several) != num_prompts:
        raise RequestError(
            f"{name}: {len(several)} for {num_prompts} prompts; give one for all, or one for each", param=name
        )
    return several


def refuse(given: Mapping[str, Any], why: str) -> None:
    """Raises RequestError for an argument that is not None."""
    for name, value in given.items():
        if value is not None:
            raise RequestError(f"{name}: {reprlib.repr(value)}: {why}; leave it out", param=name)


def _prompt(name: str, given: Any) -> Prompt:
    if isinstance(given, Mapping):
        return _from_mapping(name, given)
    return _text(name, given) if isinstance(given, str) else _token_ids(name, given)


def pictures_of(prompt: Prompt | None) -> tuple[Any, ...]:
    """Returns the images for a prompt's placeholders."""
    found: tuple[Any, ...] = getattr(prompt, "pictures", ())
    return found


def _from_mapping(name: str, given: Mapping[str, Any]) -> Prompt:
    pictures = _pictures(name, given)
    prompt = _alone(name, given)
    if not pictures:
        return prompt
    illustrated = IllustratedText(prompt) if isinstance(prompt, str) else IllustratedIds(prompt)
    illustrated.pictures = pictures
    return illustrated


def _pictures(name: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns a prompt's images. Raises RequestError for other media and other objects."""
    for key in MULTIMODAL:
        if key not in (*MEDIA, OPTIONS) and _has_any(given.get(key)):
            raise RequestError(f"{name}.{key}: not supported; leave it out", param=key)
    found: list[Any] = []
    for key in MEDIA:
        media = given.get(key)
        if not _has_any(media):
            continue
        if not isinstance(media, Mapping):
            raise RequestError(f"{name}.{key}: {type(media).__name__}; must be a dict of images and videos", param=key)
        for kind, items in media.items():
            place = f"{name}.{key}.{kind}"
            if kind in VIDEOS and _has_any(items):
                found += videos_of(items, place)
            elif kind in IMAGES:
                for at, item in enumerate(items if isinstance(items, list | tuple) else [items]):
                    check_picture(item, f"{place}[{at}]")
                    found.append(item)
            elif _has_any(items):
                raise RequestError(f"{place}: only images and videos are supported; leave it out", param=key)
    options = given.get(OPTIONS) or {}
    if not isinstance(options, Mapping):
        raise RequestError(f"{name}.{OPTIONS}: {type(options).__name__}; must be a dict", param=OPTIONS)
    ReadOptions.of(options, f"{name}.{OPTIONS}")
    return tuple(MediaWithOptions(each, options) for each in found) if options else tuple(found)


def named_pictures(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns the images, and the messages with a number in place of each image, because JSON cannot express images."""
    pictures: list[Any] = []

    def named(part: Any, place: str) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != PICTURE_PART:
            return part
        check_picture(part.get(PICTURE_PART), f"{place}.{PICTURE_PART}")
        pictures.append(part[PICTURE_PART])
        return {"type": "image_url", "image_url": {"url": f"{GIVEN}{len(pictures) - 1}"}}

    found = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            parts = [named(part, f"messages[{index}].content[{at}]") for at, part in enumerate(content)]
            message = {**message, "content": parts}
        found.append(message)
    return found, pictures


def _alone(name: str, given: Mapping[str, Any]) -> Prompt:
    """Returns the prompt that a mapping has, without its images."""
    known = ("prompt", "prompt_token_ids")
    for key in given:
        if key not in (*known, *MULTIMODAL):
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise RequestError(f"{name}.{reprlib.repr(str(key))[1:-1]}: not known{hint}", param="prompts")
    found = [key for key in known if given.get(key) is not None]
    text = given.get("prompt")
    if len(found) == 2 and isinstance(text, str):
        return Known(_token_ids(f"{name}.prompt_token_ids", given["prompt_token_ids"]), _text(f"{name}.prompt", text))
    if len(found) != 1:
        raise RequestError(f"{name}: must have one of {' and '.join(known)}", param="prompts")
    value = given[found[0]]
    if isinstance(value, str) and found == ["prompt"]:
        return _text(f"{name}.prompt", value)
    return _token_ids(f"{name}.{found[0]}", value)


def _has_any(value: Any) -> bool:
    """Whether there is any image or video; lists may be empty."""
    if isinstance(value, Mapping):
        return any(map(_has_any, value.values()))
    return len(value) > 0 if hasattr(value, "__len__") else value is not None


def _text(name: str, given: str) -> str:
    if not is_text(given):
        raise RequestError(f"{name}: {reprlib.repr(given)}: {HALF}", param="prompts")
    return given


def _token_ids(name: str, given: Any) -> list[int]:
    ids = _listed(name, given)
    if all(type(each) is int for each in ids):
        return ids
    for at, each in enumerate(ids):
        if not _is_id(each):
            raise RequestError(
                f"{name}[{at}]: {reprlib.repr(each)} is not a token id", param=name.partition("[")[0].partition(".")[0]
            )
    return [operator.index(each) for each in ids]


def _listed(name: str, given: Any, kinds: str = "a list") -> list[Any]:
    """Returns a list, also from a tuple or an object with `tolist`, such as an array."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise RequestError(
            f"{name}: {type(given).__name__}; must be {kinds}", param=name.partition("[")[0].partition(".")[0]
        )
    return list(given)


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "strings"
    if isinstance(value, Mapping):
        return "dicts"
    return "lists" if isinstance(value, Sequence) or hasattr(value, "tolist") else f"{type(value).__name__}s"
