"""Makes the answers of /v1/messages, whole or as events, in Anthropic's format."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from pd_cluster.errors import PdClusterError
from pd_cluster.service.answers.answered_weights import OfWeights, weights_of
from pd_cluster.service.answers.reply_blocks import Block, BlockAnswer, BlockChange
from pd_cluster.service.answers.sse import named_event
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.schema.error_bodies import MessageErrorDetails, messages_error_body
from pd_cluster.service.schema.messages.messages_protocol import MessagesRequest

SIGNATURE = "unsigned"  # clients return thinking only if it has a signature, which is not checked
SHORT_S = 300.0  # the shorter `ttl` of cache_control
UNREADABLE = "unreadable"  # the key for a call's input that is not a JSON object
Ending = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
EventKind = Literal[
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "error",
]


class MessageBlock(Struct, omit_defaults=True):
    """Text, thinking, or a call of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: Annotated[str | None, Meta(description="Not checked when the block is sent back.")] = None
    id: Annotated[str | None, Meta(description="The id of a call; the call's result repeats it.")] = None
    name: str | None = None
    input: Annotated[
        dict[str, Any] | None,
        Meta(description="The model wrote it. Text that is not a JSON object is shown under the key `unreadable`."),
    ] = None


class OutputTokensDetails(Struct):
    thinking_tokens: int


class CacheCreation(Struct):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Struct):
    input_tokens: Annotated[int, Meta(description="Prompt tokens that no cache field counts.")]
    cache_read_input_tokens: Annotated[int, Meta(description="Prompt tokens that were cached.")]
    cache_creation_input_tokens: Annotated[
        int, Meta(description="Prompt tokens up to the last cache_control that were not cached.")
    ]
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageAnswer(Struct, omit_defaults=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    usage: MessageUsage
    stop_reason: Ending | None
    stop_sequence: str | None
    weight_versions: OfWeights = None


class MessageDelta(Struct, omit_defaults=True):
    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: Ending | None = None
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(Struct, omit_defaults=True):
    """One event of a stream, whose name is its `type`."""

    type: EventKind
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: MessageBlock | None = None
    delta: MessageDelta | None = None
    usage: MessageUsage | None = None
    weight_versions: OfWeights = None
    error: MessageErrorDetails | None = None
    request_id: UnsetType | None = UNSET


class CacheEnds(NamedTuple):
    """The prompt tokens up to the last cache_control of any `ttl`, and up to the last one of 1h."""

    num_tokens: int = 0
    num_long: int = 0


NOT_MARKED = CacheEnds()


class MessagesAnswer(BlockAnswer):
    def __init__(
        self, request: MessagesRequest, model: str, generation: Generation, cache_ends: CacheEnds = NOT_MARKED
    ) -> None:
        thinking = request.thinking
        super().__init__(generation, bool(request.stream), thinking is None or thinking.type != "disabled")
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model, self._cache_ends = model, cache_ends
        self._tells_weights = bool(request.return_weight_versions)
        self._omits_thinking = thinking is not None and thinking.display == "omitted"
        self._eager = {tool.name for tool in request.tools or [] if tool.eager_input_streaming}

    @property
    def headers(self) -> dict[str, str]:
        return {"request-id": self.id}

    def whole(self) -> MessageAnswer:
        blocks = [self._block(block, block.text) for block in self.reader.blocks]
        return replace(self._message(blocks, *self._ending()), weight_versions=self._weights())

    def failure(self, error: PdClusterError) -> bytes:
        return _event("error", error=messages_error_body(error).error, request_id=None)

    def _opening(self) -> bytes:
        return _event("message_start", message=self._message([]))

    def _change(self, change: BlockChange) -> bytes:
        block, events = change.block, b""
        match change.what:
            case "begins":
                return _event("content_block_start", index=block.index, content_block=self._block(block, ""))
            case "grows":
                return self._delta(block, change.text)
            case "ends":
                if block.kind == "call" and block.name not in self._eager:
                    whole = msgspec.json.encode(_input(block.text)).decode()
                    events = _told(block, MessageDelta("input_json_delta", partial_json=whole))
                elif block.kind == "reasoning":
                    events = _told(block, MessageDelta("signature_delta", signature=SIGNATURE))
                return events + _event("content_block_stop", index=block.index)

    def closing(self) -> bytes:
        reason, sequence = self._ending()
        delta = MessageDelta(stop_reason=reason, stop_sequence=sequence)
        told = _event("message_delta", delta=delta, usage=self._usage(), weight_versions=self._weights())
        return told + _event("message_stop")

    def _weights(self) -> OfWeights:
        return weights_of(self.generation, self._tells_weights, tells_tokens=False)

    def _delta(self, block: Block, text: str) -> bytes:
        """Returns the event with a block's new text. Unless its tool is eager, a call's input is sent whole, because
        clients cannot read a part of a JSON object.
        """
        if block.kind == "text":
            return _told(block, MessageDelta("text_delta", text=text))
        if block.kind == "reasoning":
            return b"" if self._omits_thinking else _told(block, MessageDelta("thinking_delta", thinking=text))
        is_eager = block.name in self._eager
        return _told(block, MessageDelta("input_json_delta", partial_json=text)) if is_eager else b""

    def _block(self, block: Block, text: str) -> MessageBlock:
        """Returns a block with this text; "" for the start of a block."""
        if block.kind == "text":
            return MessageBlock("text", text)
        if block.kind == "reasoning":
            shown = "" if self._omits_thinking else text
            return MessageBlock("thinking", thinking=shown, signature=SIGNATURE if text else "")
        return MessageBlock("tool_use", id=block.call_id, name=block.name, input=_input(text))

    def _message(
        self, content: list[MessageBlock], reason: Ending | None = None, sequence: str | None = None
    ) -> MessageAnswer:
        usage = self._usage()
        return MessageAnswer(self.id, "message", "assistant", self._model, content, usage, reason, sequence)

    def _ending(self) -> tuple[Ending, str | None]:
        """Returns the stop_reason and the stop_sequence."""
        assert self.last is not None
        if self.last.finish_reason == "length":
            return "max_tokens", None
        if isinstance(self.last.stop_reason, str):
            return "stop_sequence", self.last.stop_reason
        return "tool_use" if self.reader.has_calls else "end_turn", None

    def _usage(self) -> MessageUsage:
        """Counts tokens as Anthropic's API does: `input_tokens` are the tokens after the last cache_control that were
        not cached.
        """
        usage, num_cached = self.generation.usage, self.generation.num_cached_tokens
        num_written, num_long = (max(0, end - num_cached) for end in self._cache_ends)
        if self.generation.order.retention_s <= SHORT_S:  # then the server retains no block for longer than that
            num_long = 0
        return MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached - num_written,
            cache_read_input_tokens=num_cached,
            cache_creation_input_tokens=num_written,
            cache_creation=CacheCreation(num_written - num_long, num_long),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(self.reader.num_reasoning_tokens),
        )


def _event(kind: EventKind, **fields: Any) -> bytes:
    return named_event(kind, MessageEvent(kind, **fields))


def _told(block: Block, delta: MessageDelta) -> bytes:
    kind: EventKind = "content_block_delta"
    return named_event(kind, MessageEvent(kind, None, block.index, None, delta))


def _input(arguments: str) -> dict[str, Any]:
    """Returns a call's arguments as an object, as the API requires; a model may have written other text."""
    try:
        found = msgspec.json.decode(arguments) if arguments else {}
    except (msgspec.DecodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {UNREADABLE: arguments}
