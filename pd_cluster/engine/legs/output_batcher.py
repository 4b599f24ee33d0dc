"""Collects a worker's outputs for its schedulers and sends each scheduler one message per step.

Tokens wait longer if the client does not read them one by one. Knows nothing of legs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from pd_cluster import wire
from pd_cluster.engine.handover.links.link_ends import Post
from pd_cluster.engine.leg_trace import Tracer
from pd_cluster.types import MAX_UNSENT, LegEnd, PooledOutput, PromptOutput, Request, TokenOutput

NOBODY = ""  # takes the place of a connection when the stream has no reader
# The most logprobs in a message, whose size is limited. The logprobs of one token always stay in one message.
MAX_MESSAGE_LOGPROBS = 1 << 18


class OutputBatcher:
    """A `client` is a scheduler's connection, or NOBODY, whose messages are dropped."""

    def __init__(self, post: Post, tracer: Tracer, clock: Callable[[], float]) -> None:
        self._post = post
        self._tracer = tracer
        self._clock = clock
        self._tokens: dict[str, list[TokenOutput]] = defaultdict(list)
        self._ended: dict[str, list[LegEnd]] = defaultdict(list)
        self._prompts: dict[str, list[PromptOutput]] = defaultdict(list)
        self._pooled: dict[str, list[PooledOutput]] = defaultdict(list)
        self._events: dict[str, list[wire.TraceEvent]] = {}  # for every connected scheduler
        self._events_due = False

    def opened(self, client: str) -> None:
        self._events[client] = []

    def closed(self, client: str) -> None:
        self._events.pop(client, None)

    def add_token(self, request: Request, token: TokenOutput) -> None:
        """Adds a sequence's next token.

        If the sequence gathers tokens, its first token is sent at once, and later tokens are sent in groups.
        """
        if request.gathers and token.position:
            num_unsent = request.num_unsent
            if token.finish_reason is None and num_unsent < MAX_UNSENT:
                request.num_unsent = num_unsent + 1
                return
            request.num_unsent = 0
            earlier = tuple(request.output_token_ids[token.position - num_unsent : token.position])
            token = msgspec.structs.replace(token, earlier=earlier)
        self._add(request, token)

    def add_group(self, request: Request, tokens: Sequence[TokenOutput]) -> None:
        """Adds the tokens that a sequence got in one step. They are sent together."""
        if request.gathers:
            for token in tokens:
                self.add_token(request, token)
            return
        for first in range(0, len(tokens), MAX_UNSENT + 1):
            *before, last = tokens[first : first + MAX_UNSENT + 1]
            told = tuple(token.logprobs for token in before if token.logprobs is not None)
            earlier = tuple(token.token_id for token in before)
            self._add(request, msgspec.structs.replace(last, earlier=earlier, earlier_logprobs=told))

    def _add(self, request: Request, token: TokenOutput) -> None:
        if request.draft_report is not None:
            token = msgspec.structs.replace(token, drafts=request.draft_report)
            request.draft_report = None
        self._tokens[request.client].append(token)

    def add_tokens(self, client: str, tokens: list[TokenOutput]) -> None:
        self._tokens[client] += tokens

    def add_prompt(self, client: str, prompt: PromptOutput) -> None:
        self._prompts[client].append(prompt)

    def add_pooled(self, client: str, pooled: PooledOutput) -> None:
        self._pooled[client].append(pooled)

    def add_end(self, client: str, end: LegEnd) -> None:
        self._ended[client].append(end)

    def send(self, client: str, body: wire.Body) -> None:
        """Sends everything that was added before, and then a message."""
        self.flush()
        self._post.send(client, body)

    def tick(self) -> None:
        """Makes the next flush send events even if there are no outputs."""
        self._events_due = True

    def flush(self) -> None:
        """Sends each scheduler one message with its waiting outputs, and one more message for each large output."""
        clients = {*self._tokens, *self._ended, *self._prompts, *self._pooled}
        if clients or self._events_due:
            self._collect_events()
            clients |= {client for client, events in self._events.items() if events and self._events_due}
            self._events_due = False
        if NOBODY in clients:
            clients.discard(NOBODY)
            for waiting in (self._tokens, self._ended, self._prompts, self._pooled):
                waiting.pop(NOBODY, None)
        for client in clients:
            prompts = self._prompts.pop(client, [])
            for prompt in [p for p in prompts if p.logprobs]:  # these outputs are large, so each has its own message
                self._post.send(client, wire.Outputs(prompts=[prompt]))
            brief = [p for p in prompts if not p.logprobs]
            tokens, *more = _parts(self._tokens.pop(client, []))
            ended, events = self._ended.pop(client, []), self._events.get(client, [])
            if client in self._events:
                self._events[client] = []
            self._post.send(client, wire.Outputs(tokens, [] if more else ended, brief, events, self._clock()))
            for at, part in enumerate(more, 1):
                self._post.send(client, wire.Outputs(part, ended if at == len(more) else []))
            for pooled in self._pooled.pop(client, []):  # these outputs are large too
                self._post.send(client, wire.Outputs(pooled=[pooled]))

    def _collect_events(self) -> None:
        """Copies new events for every scheduler, because this worker does not know whose transfers they concern."""
        if events := self._tracer.drain():
            for known in self._events.values():
                known += events


def _parts(tokens: list[TokenOutput]) -> list[list[TokenOutput]]:
    """Splits the tokens into the fewest messages that their logprobs allow, at least one."""
    sizes = [sum(len(told.top) for told in (token.logprobs, *token.earlier_logprobs) if told) for token in tokens]
    if sum(sizes) <= MAX_MESSAGE_LOGPROBS:
        return [tokens]
    parts: list[list[TokenOutput]] = [[]]
    room = MAX_MESSAGE_LOGPROBS
    for token, size in zip(tokens, sizes, strict=True):
        if size > room and parts[-1]:
            parts.append([])
            room = MAX_MESSAGE_LOGPROBS
        parts[-1].append(token)
        room -= size
    return parts
