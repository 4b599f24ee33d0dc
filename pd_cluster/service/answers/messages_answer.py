"""The answers of /v1/messages, whole and in events, in Anthropic's shapes."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from pd_cluster.errors import PdClusterError
from pd_cluster.service.answers.blocks import Block, BlockAnswer, BlockChange
from pd_cluster.service.answers.sse import named_event
from pd_cluster.service.generation import Generation
from pd_cluster.service.schema.messages_protocol import MessagesRequest
from pd_cluster.service.status import messages_error_body

SIGNATURE = "unsigned"  # clients send thinking back only with a signature; nothing here checks one
UNREADABLE = "unreadable"  # the key under which a call's input is shown that is no JSON object

Json = dict[str, Any]


class MessagesAnswer(BlockAnswer):
    def __init__(self, request: MessagesRequest, model: str, generation: Generation) -> None:
        thinking = request.thinking
        super().__init__(generation, bool(request.stream), thinking is None or thinking.type != "disabled")
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model = model
        self._omits_thinking = thinking is not None and thinking.display == "omitted"
        self._eager = {tool.name for tool in request.tools or [] if tool.eager_input_streaming}

    @property
    def headers(self) -> dict[str, str]:
        return {"request-id": self.id}

    def whole(self) -> Json:
        content = [self._block(block, block.text) for block in self.reader.blocks]
        return self._message(content) | self._stop()

    def failure(self, error: PdClusterError) -> bytes:
        return named_event(messages_error_body(error))

    def _opening(self) -> bytes:
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
        return named_event({"type": "message_start", "message": message})

    def _change(self, change: BlockChange) -> bytes:
        block, events = change.block, b""
        match change.what:
            case "begins":
                begun = self._block(block, "")
                return named_event({"type": "content_block_start", "index": block.index, "content_block": begun})
            case "grows":
                return self._delta(block, change.text)
            case "ends":
                if block.kind == "call" and block.name not in self._eager:
                    events = self._told(block, "input_json_delta", partial_json=_encoded(_input(block.text)))
                elif block.kind == "reasoning":
                    events = self._told(block, "signature_delta", signature=SIGNATURE)
                return events + named_event({"type": "content_block_stop", "index": block.index})

    def closing(self) -> bytes:
        ends = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return named_event(ends) + named_event({"type": "message_stop"})

    def _delta(self, block: Block, text: str) -> bytes:
        """Returns a block's new text. A call's input is told as a whole, unless its tool is eager: it may be no JSON,
        which clients cannot read.
        """
        if block.kind == "text":
            return self._told(block, "text_delta", text=text)
        if block.kind == "reasoning":
            return b"" if self._omits_thinking else self._told(block, "thinking_delta", thinking=text)
        return self._told(block, "input_json_delta", partial_json=text) if block.name in self._eager else b""

    def _told(self, block: Block, kind: str, **fields: str) -> bytes:
        delta = {"type": kind, **fields}
        return named_event({"type": "content_block_delta", "index": block.index, "delta": delta})

    def _block(self, block: Block, text: str) -> Json:
        """Returns a block with this text; as it begins, without any."""
        if block.kind == "text":
            return {"type": "text", "text": text}
        if block.kind == "reasoning":
            shown = "" if self._omits_thinking else text
            return {"type": "thinking", "thinking": shown, "signature": SIGNATURE if text else ""}
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input(text)}

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": self._usage(),
        }

    def _stop(self) -> Json:
        assert self.last is not None
        reason, sequence = "end_turn", None
        if self.last.finish_reason == "length":
            reason = "max_tokens"
        elif isinstance(self.last.stop_reason, str):
            reason, sequence = "stop_sequence", self.last.stop_reason
        elif self.reader.has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> Json:
        """Counts as the API does: `input_tokens` are those of the prompt that were not cached."""
        usage = self.generation.usage
        num_cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_read_input_tokens": num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.reader.num_reasoning_tokens},
        }


def _input(arguments: str) -> Json:
    """Returns a call's arguments as the object that the API has for them. A model may write something else."""
    try:
        found = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {UNREADABLE: arguments}


def _encoded(value: Json) -> str:
    return msgspec.json.encode(value).decode()
