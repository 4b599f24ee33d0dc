"""Converts a request in Anthropic's format to a chat. Every refusal is a RequestError.

Knows nothing of templates, tokens or answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.error_bodies import NO_THREADS
from pd_cluster.service.schema.messages.cache_breakpoints import breakpoints_of, longest
from pd_cluster.service.schema.messages.messages_blocks import (
    BLOCKS,
    RESULT_BLOCKS,
    SOURCES,
    Base64Source,
    ImageBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from pd_cluster.service.schema.messages.messages_protocol import MessagesPrompt, MessageTurn
from pd_cluster.service.schema.request_parsing import checked
from pd_cluster.service.schema.tagged_types import TypedFields

Json = dict[str, Any]
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
BLOCK_TYPES: dict[str, tuple[type[TypedFields], ...]] = {  # role -> the types of blocks in a turn
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}
FIELD_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}  # a chat's field names -> this API's


def chat_of(request: MessagesPrompt, variables: frozenset[str], reads_reasoning: bool) -> ChatCompletionRequest:
    """Returns the chat. `variables`: the chat template's variables. `reads_reasoning`: the server can separate the
    model's thinking.

    Raises RequestError; a field that chats also have is named as in chats: see `with_field_names`.
    """
    if request.thread is not None:
        raise RequestError(
            "thread: this server keeps no conversations; leave it out, and send all messages",
            param="thread",
            code=NO_THREADS,
        )
    chat: Json = {"messages": [*_system(request), *_messages(request.messages)], "model": request.model}
    last = chat["messages"][-1]
    if last["role"] == "assistant":
        if last.get("tool_calls") or not last["content"]:
            raise RequestError(
                f"messages[{len(request.messages) - 1}]: the last message is the assistant's, but has no text to "
                "continue; end with a user's message",
                param="messages",
            )
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= _tools(request)
    chat["chat_template_kwargs"] = (request.chat_template_kwargs or {}) | _thinking(request, variables, reads_reasoning)
    if (config := request.output_config) is not None:
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.form}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        if config.effort is not None and "reasoning_effort" in variables:
            chat["chat_template_kwargs"]["reasoning_effort"] = config.effort
    chat["prompt_cache_retention"] = longest(breakpoints_of(request))
    same = ("max_tokens", "temperature", "top_p", "top_k", "stream", "cache_salt", "speculative", "vllm_xargs")
    chat |= {name: getattr(request, name) for name in same} | {"stop": request.stop_sequences}
    return checked(chat, ChatCompletionRequest)


def _system(request: MessagesPrompt) -> list[Json]:
    if not request.system:
        return []
    blocks = [_read(block, f"system[{at}]", (TextBlock,)) for at, block in enumerate(_blocks(request.system))]
    return [{"role": "system", "content": [_text(block) for block in blocks if isinstance(block, TextBlock)]}]


def _messages(turns: list[MessageTurn]) -> list[Json]:
    """Returns the turns as messages. Joins adjacent turns of one role, as the API defines and some chat templates
    require.
    """
    found: list[Json] = []
    for at, turn in enumerate(turns):
        for message in _of_turn(turn, f"messages[{at}]"):
            last = found[-1] if found else {}
            if message["role"] == last.get("role") != "tool" and not last.get("tool_calls"):
                last["content"] += message.pop("content")
                last |= message
            else:
                found.append(message)
    return found


def _of_turn(turn: MessageTurn, place: str) -> Iterator[Json]:
    """Yields the turn's messages; results of tools become separate messages."""
    if not turn.content:
        raise RequestError(f"{place}.content: empty; leave the message out", param="messages")
    texts: list[Json] = []
    message: Json = {"role": turn.role, "content": texts}
    for at, each in enumerate(_blocks(turn.content)):
        where = f"{place}.content[{at}]"
        match _read(each, where, BLOCK_TYPES[turn.role]):
            case ToolResultBlock() as result:
                if texts:
                    yield {"role": turn.role, "content": list(texts)}
                    texts.clear()
                yield _result(result, where)
            case ThinkingBlock(thinking=thinking):
                message["reasoning_content"] = message.get("reasoning_content", "") + thinking
            case ImageBlock() as image:
                texts.append(_image(image, where))
            case ToolUseBlock() as call:
                message.setdefault("tool_calls", []).append(_call(call))
            case TextBlock() as text:
                texts.append(_text(text))
    if texts or turn.role == "assistant":
        yield message


def _read(block: Json, place: str, taken: tuple[type[TypedFields], ...]) -> TypedFields:
    """Returns a block of one of the `taken` types. Raises RequestError."""
    found = BLOCKS.read(block, place)
    if not isinstance(found, taken):
        raise BLOCKS.refusal(block["type"], place, "blocks of this type are not allowed here; send its text")
    return found


def _text(block: TextBlock) -> Json:
    return {"type": "text", "text": block.text}


def _image(block: ImageBlock, place: str) -> Json:
    """Returns an image as a part of a chat. The part keeps `place`, for errors when the image is read."""
    match SOURCES.read(block.source, f"{place}.source"):
        case Base64Source(media_type=kind, data=data):
            url = f"data:{kind};base64,{data}"
        case UrlSource(url=url):
            pass
        case other:
            raise AssertionError(f"{other}: an unknown source of images")
    return {"type": "image_url", "image_url": {"url": url}, "place": place}


def _blocks(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _call(block: ToolUseBlock) -> Json:
    function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResultBlock, place: str) -> Json:
    content = "" if block.content is None else block.content
    is_list = isinstance(content, list) and all(isinstance(each, dict) for each in content)
    if not is_list and not isinstance(content, str):
        raise RequestError(f"{place}.content: must be a string or a list of blocks", param="messages")
    parts = [_part(each, f"{place}.content[{at}]") for at, each in enumerate(_blocks(content))]
    if block.is_error and not any(part.get("text", True) for part in parts):
        parts = [{"type": "text", "text": "error"}]  # otherwise the model would not see that there was an error
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": parts}


def _part(block: Json, place: str) -> Json:
    found = RESULT_BLOCKS.read(block, place)
    if isinstance(found, ImageBlock):
        return _image(found, place)
    assert isinstance(found, TextBlock), f"{found}: an unknown type of block"
    return _text(found)


def _tools(request: MessagesPrompt) -> Json:
    found: Json = {}
    if request.tools:
        found["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "parameters": tool.input_schema,
                    **({"description": tool.description} if tool.description is not None else {}),
                    **({"strict": tool.strict} if tool.strict is not None else {}),
                    **({"input_examples": tool.input_examples} if tool.input_examples else {}),
                },
            }
            for tool in request.tools
        ]
    choice = request.tool_choice
    if choice is None:
        return found
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name: missing; give the tool's name", param="tool_choice")
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        found["tool_choice"] = CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        found["parallel_tool_calls"] = False
    return found


def _thinking(request: MessagesPrompt, variables: frozenset[str], reads_reasoning: bool) -> Json:
    """Returns the template's variables that switch thinking on or off, if it has any."""
    thinking = request.thinking
    if thinking is None or thinking.type == "adaptive":
        return {}
    if thinking.type == "enabled":
        if not reads_reasoning:
            raise RequestError(
                "thinking: this server cannot separate thinking from text (--reasoning-parser); leave it out",
                param="thinking",
            )
        if thinking.budget_tokens is None:
            raise RequestError("thinking.budget_tokens: missing; give it, or the type adaptive", param="thinking")
    return {"enable_thinking": thinking.type == "enabled"} if "enable_thinking" in variables else {}
