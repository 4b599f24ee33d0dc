"""Makes the answers of /v1/responses, whole or as events: OpenAI's response objects and their items."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace
from pydantic import BaseModel

from pd_cluster.errors import PdClusterError
from pd_cluster.service.answers.answer_logprobs import ChatTokenLogprob, Entries, LogprobsFormat
from pd_cluster.service.answers.answered_weights import OfWeights, weights_of
from pd_cluster.service.answers.openai_answer import UnixTime
from pd_cluster.service.answers.reply_blocks import Block, BlockAnswer, BlockChange
from pd_cluster.service.answers.sse import named_event
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece, TokenLogprobs
from pd_cluster.service.schema.responses.responses_protocol import NamespaceTool, ResponsesRequest, ResponseTool
from pd_cluster.service.schema.responses.responses_tools import names_of
from pd_cluster.text.tokenizer import Tokenizer

ID_NUM_BYTES = 24
RAW: Literal["raw_message_tokens"] = "raw_message_tokens"
PREFIX = "resp_"
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
PARTS = {"text": "output_text", "reasoning": "reasoning_text"}  # also the middle part of event names
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponsePart(Struct, omit_defaults=True):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: Annotated[
        list[ChatTokenLogprob] | None,
        Meta(description="Logprobs of the part's tokens, with include message.output_text.logprobs; otherwise empty."),
    ] = None


class ResponseItem(Struct, omit_defaults=True):
    """A message, reasoning, or a call of a function."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: ItemStatus
    role: Literal["assistant"] | None = None
    summary: Annotated[list[Any] | None, Meta(description="Always empty: `content` has the reasoning itself.")] = None
    content: list[ResponsePart] | None = None
    call_id: Annotated[str | None, Meta(description="The id of the call; the call's output repeats it.")] = None
    name: str | None = None
    namespace: Annotated[str | None, Meta(description="The function's namespace, if it has one.")] = None
    arguments: Annotated[str | None, Meta(description="The model wrote it: check it before use.")] = None


class InputTokens(Struct):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokens(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseFailure(Struct):
    code: str
    message: str


class Incomplete(Struct):
    reason: Literal["max_output_tokens"]


class RawMessage(Struct):
    type: Literal["raw_message_tokens"]
    message: Annotated[str, Meta(description="The text of the tokens, special ones included.")]
    tokens: list[int]


OfRaw = Annotated[list[RawMessage] | UnsetType, Meta(description="With enable_response_messages.")]


class ResponseObject(Struct):
    id: str
    object: Literal["response"]
    created_at: UnixTime
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Annotated[bool, Meta(extra_json_schema={"const": False})]
    completed_at: float | None
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    store: bool
    output: list[ResponseItem]
    usage: ResponseUsage | None
    weight_versions: OfWeights | UnsetType = UNSET
    input_messages: OfRaw = UNSET
    output_messages: OfRaw = UNSET


class ResponseEvent(Struct, omit_defaults=True):
    """One event of a stream, whose name is its `type`. The last event has the whole response."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    item: ResponseItem | None = None
    part: ResponsePart | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    logprobs: Annotated[list[dict[str, Any]] | None, Meta(description="As in a part, without bytes.")] = None


class ResponsesAnswer(BlockAnswer):
    def __init__(
        self,
        request: ResponsesRequest,
        model: str,
        tokenizer: Tokenizer,
        generation: Generation,
        is_stored: bool = False,
    ) -> None:
        super().__init__(generation, bool(request.stream), request.include_reasoning is not False)
        self._logprobs, self._tokenizer = LogprobsFormat(tokenizer), tokenizer
        self._raw_token_ids: list[int] | None = [] if request.enable_response_messages else None
        self.id = f"{PREFIX}{secrets.token_hex(ID_NUM_BYTES)}"
        self._own_name, self._tells_weights = request.request_id, bool(request.return_weight_versions)
        self._names = names_of(request)
        self._head = self._opened(request, model, is_stored)
        self._item_ids: dict[int, str] = {}
        self._entries: defaultdict[int, Entries] = defaultdict(lambda: Entries([], []))  # logprobs of each text block
        self._num_events = 0
        self._completed_s: float | None = None

    @property
    def name(self) -> str:
        """The request's own name with a response's prefix. It differs from the id under which a response is stored,
        which is random.
        """
        return self.id if self._own_name is None else PREFIX + self._own_name.removeprefix(PREFIX)

    @property
    def status(self) -> ItemStatus:
        if self.last is None:
            return "in_progress"
        return "incomplete" if self.last.finish_reason == "length" else "completed"

    def is_not_stored(self) -> None:
        """Marks the response as not stored, in all later output."""
        self._head.store = False

    def read(self, piece: Piece) -> list[BlockChange]:
        if self._raw_token_ids is not None:
            self._raw_token_ids += piece.token_ids
        return super().read(piece)

    def whole(self) -> ResponseObject:
        if self._completed_s is None:
            self._completed_s = time.time()
        is_cut = self.status == "incomplete"
        return self._with_output(
            status=self.status,
            completed_at=None if is_cut else self._completed_s,
            incomplete_details=Incomplete("max_output_tokens") if is_cut else None,
            weight_versions=self._weights(),
            **self._raw_messages(),
        )

    def _weights(self) -> OfWeights | UnsetType:
        tells_tokens = self._raw_token_ids is not None or self.generation.sampling.logprobs is not None
        return weights_of(self.generation, self._tells_weights, tells_tokens) or UNSET

    def _raw_messages(self) -> dict[str, list[RawMessage]]:
        """Returns the prompt and the output as the model reads and writes them, if the request asks for that."""
        if self._raw_token_ids is None:
            return {}
        given = {"input_messages": self.generation.prompt_token_ids, "output_messages": self._raw_token_ids}
        return {name: [RawMessage(RAW, self._tokenizer.decode(ids, False), ids)] for name, ids in given.items()}

    def failure(self, error: PdClusterError) -> bytes:
        told = ResponseFailure("server_error", str(error))
        return self._event("response.failed", response=self._with_output(status="failed", error=told))

    def _with_output(self, **fields: Any) -> ResponseObject:
        output = [self._item(block, block.text, self._status_of(block)) for block in self.reader.blocks]
        return replace(self._head, output=output, usage=self._usage(), **fields)

    def _opening(self) -> bytes:
        return self._event("response.created", response=self._head) + self._event(
            "response.in_progress", response=self._head
        )

    def closing(self) -> bytes:
        return self._event(f"response.{self.status}", response=self.whole())

    def _change(self, change: BlockChange) -> bytes:
        block = change.block
        match change.what:
            case "begins":
                return self._begins(block)
            case "grows":
                return self._grows(block, change.text, change.tokens)
            case "ends":
                return self._ends(block)

    def _begins(self, block: Block) -> bytes:
        item = self._item(block, "", "in_progress")
        if block.kind != "call":
            item.content = []
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._event("response.content_part.added", **self._place(block), part=self._part(block, ""))

    def _grows(self, block: Block, text: str, tokens: Sequence[TokenLogprobs]) -> bytes:
        if block.kind == "call":
            place = {"item_id": self._id_of(block), "output_index": block.index}
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        more: dict[str, Any] = {}
        if block.kind == "text":
            entries = self._entries[block.index]
            num_before = len(entries.brief)
            self._logprobs.encode(tokens, entries)
            more["logprobs"] = entries.brief[num_before:]
        return self._event(f"response.{PARTS[block.kind]}.delta", **self._place(block), delta=text, **more)

    def _ends(self, block: Block) -> bytes:
        if block.kind == "call":
            place = {"item_id": self._id_of(block), "output_index": block.index}
            events = self._event("response.function_call_arguments.done", **place, arguments=block.text)
        else:
            more = {"logprobs": self._entries_of(block).brief} if block.kind == "text" else {}
            events = self._event(f"response.{PARTS[block.kind]}.done", **self._place(block), text=block.text, **more)
            part = self._part(block, block.text)
            events += self._event("response.content_part.done", **self._place(block), part=part)
        item = self._item(block, block.text, self._status_of(block))
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, ResponseEvent(kind, number, **fields))

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._id_of(block), "output_index": block.index, "content_index": 0}

    def _id_of(self, block: Block) -> str:
        if block.index not in self._item_ids:
            self._item_ids[block.index] = f"{PREFIXES[block.kind]}_{secrets.token_hex(ID_NUM_BYTES)}"
        return self._item_ids[block.index]

    def _status_of(self, block: Block) -> ItemStatus:
        """Returns an item's status: the last item of an incomplete answer is incomplete."""
        return "incomplete" if self.status == "incomplete" and block is self.reader.blocks[-1] else "completed"

    def _item(self, block: Block, text: str, status: ItemStatus) -> ResponseItem:
        item_id = self._id_of(block)
        if block.kind == "call":
            named = self._names.get(block.name, {"name": block.name})
            return ResponseItem("function_call", item_id, status, call_id=block.call_id, **named, arguments=text)
        content = [self._part(block, text)]
        if block.kind == "reasoning":
            return ResponseItem("reasoning", item_id, status, summary=[], content=content)
        return ResponseItem("message", item_id, status, role="assistant", content=content)

    def _part(self, block: Block, text: str) -> ResponsePart:
        """Returns the part with this text: the block's whole text, or ""."""
        if block.kind == "reasoning":
            return ResponsePart("reasoning_text", text)
        return ResponsePart("output_text", text, [], self._entries_of(block).full if text else [])

    def _entries_of(self, block: Block) -> Entries:
        """Returns the logprobs of all tokens of the block. Encodes the remaining ones: all of them, if the answer is
        sent whole.
        """
        entries = self._entries[block.index]
        self._logprobs.encode(block.tokens[len(entries.full) :], entries)
        return entries

    def _usage(self) -> ResponseUsage:
        usage = self.generation.usage
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokens(self.generation.num_cached_tokens, 0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokens(self.reader.num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )

    def _opened(self, request: ResponsesRequest, model: str, is_stored: bool) -> ResponseObject:
        """Returns the response object before any output; many of its fields repeat the request's."""
        sampling, choice, reasoning = self.generation.sampling, request.tool_choice, request.reasoning
        text = request.text.model_dump(exclude_none=True) if request.text is not None else {}
        return ResponseObject(
            id=self.id,
            object="response",
            created_at=int(time.time()),
            status="in_progress",
            background=False,
            completed_at=None,
            error=None,
            incomplete_details=None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            max_tool_calls=request.max_tool_calls,
            metadata=request.metadata or {},
            model=model,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            prompt_cache_key=request.prompt_cache_key,
            reasoning={
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": reasoning.summary if reasoning is not None else None,
            },
            safety_identifier=request.safety_identifier,
            service_tier="default",
            temperature=sampling.temperature,
            text={"format": {"type": "text"}, **text},
            tool_choice=choice.model_dump(exclude_none=True) if isinstance(choice, BaseModel) else choice or "auto",
            tools=[_echoed(tool) for tool in request.tools or []],
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation="disabled",
            user=request.user,
            store=is_stored,
            output=[],
            usage=None,
        )


def _echoed(tool: ResponseTool | NamespaceTool) -> dict[str, Any]:
    """Returns a tool in the form that the response object repeats."""
    told = tool.model_dump(exclude_none=True)
    return told if isinstance(tool, NamespaceTool) else {"strict": None, "parameters": None, **told}
