"""The answers of /v1/responses, whole and in events: OpenAI's response objects and their items."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pd_cluster.errors import PdClusterError
from pd_cluster.service.answers.blocks import Block, BlockAnswer, BlockChange
from pd_cluster.service.answers.logprobs import Entries, LogprobsFormat
from pd_cluster.service.answers.sse import named_event
from pd_cluster.service.generation import Generation
from pd_cluster.service.schema.responses_protocol import NamespaceTool, ResponsesRequest, ResponseTool
from pd_cluster.service.schema.responses_tools import names_of
from pd_cluster.service.sequence import TokenLogprobs
from pd_cluster.text.tokenizer import Tokenizer

Json = dict[str, Any]
ID_NUM_BYTES = 24
PREFIX = "resp_"
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
PARTS = {"text": "output_text", "reasoning": "reasoning_text"}  # also the middle of their events' names


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
        self._logprobs = LogprobsFormat(tokenizer)
        self.id = f"{PREFIX}{secrets.token_hex(ID_NUM_BYTES)}"
        self._own_name = request.request_id
        self._names = names_of(request)
        self._head = self._echo(request, model) | {"store": is_stored}
        self._item_ids: dict[int, str] = {}
        self._entries: defaultdict[int, Entries] = defaultdict(lambda: Entries([], []))  # of each text block
        self._num_events = 0
        self._completed_s: float | None = None

    @property
    def name(self) -> str:
        """The request's own, with a response's prefix. The id, by which a response is kept, stays random."""
        return self.id if self._own_name is None else PREFIX + self._own_name.removeprefix(PREFIX)

    @property
    def status(self) -> str:
        if self.last is None:
            return "in_progress"
        return "incomplete" if self.last.finish_reason == "length" else "completed"

    @property
    def output(self) -> list[Json]:
        return [self._item(block, block.text, self._status_of(block)) for block in self.reader.blocks]

    def is_not_stored(self) -> None:
        """Says so in what is sent from now on."""
        self._head["store"] = False

    def whole(self) -> Json:
        if self._completed_s is None:
            self._completed_s = time.time()
        is_cut = self.status == "incomplete"
        return self._head | {
            "status": self.status,
            "completed_at": None if is_cut else self._completed_s,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self.output,
            "usage": self._usage(),
        }

    def failure(self, error: PdClusterError) -> bytes:
        told = {"code": "server_error", "message": str(error)}
        response = self._head | {"status": "failed", "error": told, "output": self.output, "usage": self._usage()}
        return self._event("response.failed", response=response)

    def _opening(self) -> bytes:
        response = self._head | {"status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
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
            item["content"] = []
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return added
        return added + self._event("response.content_part.added", **self._place(block), part=self._part(block, ""))

    def _grows(self, block: Block, text: str, tokens: Sequence[TokenLogprobs]) -> bytes:
        if block.kind == "call":
            place = {"item_id": self._id_of(block), "output_index": block.index}
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        more: Json = {}
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
            more: Json = {"logprobs": self._entries_of(block).brief} if block.kind == "text" else {}
            events = self._event(f"response.{PARTS[block.kind]}.done", **self._place(block), text=block.text, **more)
            part = self._part(block, block.text)
            events += self._event("response.content_part.done", **self._place(block), part=part)
        item = self._item(block, block.text, self._status_of(block))
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event({"type": kind, "sequence_number": number, **fields})

    def _place(self, block: Block) -> Json:
        return {"item_id": self._id_of(block), "output_index": block.index, "content_index": 0}

    def _id_of(self, block: Block) -> str:
        if block.index not in self._item_ids:
            self._item_ids[block.index] = f"{PREFIXES[block.kind]}_{secrets.token_hex(ID_NUM_BYTES)}"
        return self._item_ids[block.index]

    def _status_of(self, block: Block) -> str:
        """An answer that was cut ends in an item that was."""
        return "incomplete" if self.status == "incomplete" and block is self.reader.blocks[-1] else "completed"

    def _item(self, block: Block, text: str, status: str) -> Json:
        item_id = self._id_of(block)
        if block.kind == "call":
            named = self._names.get(block.name, {"name": block.name})
            call = {"call_id": block.call_id, **named, "arguments": text}
            return {"type": "function_call", "id": item_id, "status": status, **call}
        content = [self._part(block, text)]
        if block.kind == "reasoning":
            return {"type": "reasoning", "id": item_id, "status": status, "summary": [], "content": content}
        return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": content}

    def _part(self, block: Block, text: str) -> Json:
        """Returns the part with this text: all of the block's, or none of it."""
        more: Json = {}
        if block.kind == "text":
            more = {"annotations": [], "logprobs": self._entries_of(block).full if text else []}
        return {"type": PARTS[block.kind], "text": text, **more}

    def _entries_of(self, block: Block) -> Entries:
        """Returns the logprobs of all its tokens; those of an answer that is sent whole were not encoded before."""
        entries = self._entries[block.index]
        self._logprobs.encode(block.tokens[len(entries.full) :], entries)
        return entries

    def _usage(self) -> Json:
        usage = self.generation.usage
        num_cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reader.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _echo(self, request: ResponsesRequest, model: str) -> Json:
        """Returns the fields that the response object repeats of its request."""
        sampling = self.generation.sampling
        tools = [_told(tool) for tool in request.tools or []]
        choice = request.tool_choice
        text = request.text.model_dump(exclude_none=True) if request.text is not None else {}
        reasoning = request.reasoning
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": model,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {
                "effort": reasoning.effort if reasoning is not None else None,
                "summary": reasoning.summary if reasoning is not None else None,
            },
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": "auto"
            if choice is None
            else choice
            if isinstance(choice, str)
            else choice.model_dump(exclude_none=True),
            "tools": tools,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": request.user,
        }


def _told(tool: ResponseTool | NamespaceTool) -> Json:
    """Returns a tool as the response object repeats it."""
    told = tool.model_dump(exclude_none=True)
    return told if isinstance(tool, NamespaceTool) else {"strict": None, "parameters": None, **told}
