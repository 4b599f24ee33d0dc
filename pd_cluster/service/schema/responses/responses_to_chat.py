"""Converts a request to /v1/responses to a chat. Every refusal is a RequestError that names the item.

Knows nothing of templates, tokens or answers.
"""

from __future__ import annotations

from pd_cluster.errors import RequestError
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.request_parsing import checked
from pd_cluster.service.schema.responses.responses_item_types import (
    ITEMS,
    FunctionCallItem,
    FunctionOutputItem,
    MessageItem,
    ReasoningItem,
    kind_of,
)
from pd_cluster.service.schema.responses.responses_items import Json, items_of, parts_of, text_parts
from pd_cluster.service.schema.responses.responses_protocol import LOGPROBS, ResponsesRequest, ResponseToolChoice
from pd_cluster.service.schema.responses.responses_tools import functions_of, known_as
from pd_cluster.service.schema.tagged_types import read_as

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
SAME = (
    *("temperature", "top_p", "stream", "parallel_tool_calls", "prompt_cache_key", "user"),
    "prompt_cache_retention",
    *("top_k", "min_p", "seed", "stop", "ignore_eos", "cache_salt", "priority", "request_id", "session_id"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens", "structured_outputs", "mm_processor_kwargs", "speculative"),
    "vllm_xargs",
)
FIELD_NAMES = {  # a chat's field names -> this API's
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "messages": "input",
}


def chat_of(request: ResponsesRequest, earlier: list[Json], variables: frozenset[str]) -> ChatCompletionRequest:
    """Returns the chat. `earlier`: the items before the request's. `variables`: the chat template's variables.

    Raises RequestError; a field that chats also have is named as in chats: see `with_field_names`.
    """
    messages = [{"role": "system", "content": text_parts(request.instructions)}] if request.instructions else []
    _add_messages(earlier, "previous_response_id", messages)
    _add_messages(items_of(request), "input", messages)
    chat: Json = {
        **{name: value for name in SAME if (value := getattr(request, name)) is not None},
        "model": request.model,
        "messages": messages,
        "chat_template_kwargs": {**(request.chat_template_kwargs or {}), **_effort(request, variables)},
        **_tools(request),
    }
    if request.max_output_tokens is not None:
        chat["max_tokens"] = request.max_output_tokens
    if request.wants_logprobs:
        chat |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    elif request.top_logprobs:
        raise RequestError(f'top_logprobs: needs include: ["{LOGPROBS}"]', param="top_logprobs")
    form = request.text.format if request.text is not None else None
    if form is not None and form.type == "json_schema":
        inner = {"name": form.name or "output", "schema": form.form, "strict": form.strict}
        chat["response_format"] = {"type": "json_schema", "json_schema": inner}
    elif form is not None:
        chat["response_format"] = {"type": form.type}
    return checked(chat, ChatCompletionRequest)


def _add_messages(items: list[Json], name: str, found: list[Json]) -> None:
    """Appends the items' messages to `found`. Consecutive items from the model become one message."""
    for at, item in enumerate(items):
        place = f"{name}[{at}]"
        match read_as(ITEMS.check(kind_of(item), place), item, place):
            case MessageItem() as message:
                _add_message(message, place, found)
            case ReasoningItem(content=content, summary=summary, encrypted_content=hidden) as reasoning:
                if content or summary or not hidden:
                    found.append(_reasoning(reasoning, place))
            case FunctionCallItem() as call:
                _add_call(call, found)
            case FunctionOutputItem() as answer:
                content = parts_of(answer.output, f"{place}.output", takes_images=True)
                found.append({"role": "tool", "tool_call_id": answer.call_id, "content": content})


def _add_message(item: MessageItem, place: str, found: list[Json]) -> None:
    role, last = ROLES[item.role], found[-1] if found else {}
    content = parts_of(item.content, f"{place}.content", takes_images=role == "user")
    follows_reasoning = role == "assistant" and "reasoning_content" in last and not last["content"]
    if last.get("role") == role and not last.get("tool_calls") and (role == "system" or follows_reasoning):
        last["content"] += content
    else:
        found.append({"role": role, "content": content})


def _reasoning(item: ReasoningItem, place: str) -> Json:
    name = "content" if item.content else "summary"
    text = "".join(part["text"] for part in parts_of(getattr(item, name) or [], f"{place}.{name}"))
    return {"role": "assistant", "content": [], "reasoning_content": text}


def _add_call(item: FunctionCallItem, found: list[Json]) -> None:
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": []})
    function = {"name": known_as(item.name, item.namespace), "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    found[-1].setdefault("tool_calls", []).append(call)


def _tools(request: ResponsesRequest) -> Json:
    tools, choice = functions_of(request), request.tool_choice
    found: Json = {}
    if isinstance(choice, ResponseToolChoice) and choice.type == "allowed_tools":
        names = {tool.get("name") if tool.get("type") == "function" else None for tool in choice.tools or []}
        if choice.tools is None or not names <= {tool["function"]["name"] for tool in tools}:
            raise RequestError("tool_choice.tools: must be functions, all of them in tools", param="tool_choice")
        allowed = [{"type": "function", "function": {"name": name}} for name in sorted(names, key=str)]
        inner = {"mode": choice.mode or "auto", "tools": allowed}
        found["tool_choice"] = {"type": "allowed_tools", "allowed_tools": inner}
    elif isinstance(choice, ResponseToolChoice):
        if choice.name is None:
            raise RequestError("tool_choice.name: missing; give the function's name", param="tool_choice")
        found["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        found["tool_choice"] = choice
    if tools:
        found["tools"] = tools
    return found


def _effort(request: ResponsesRequest, variables: frozenset[str]) -> Json:
    """Returns the effort as a variable of the template, if the template has such a variable."""
    effort = request.reasoning.effort if request.reasoning is not None else None
    if effort is None:
        return {}
    if "reasoning_effort" in variables:
        return {"reasoning_effort": effort}
    return {"enable_thinking": effort != "none"} if "enable_thinking" in variables else {}
