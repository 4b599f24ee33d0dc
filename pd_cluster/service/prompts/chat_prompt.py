"""Renders chat requests to prompts, with the server's template or, if this is allowed, the request's own.

Knows nothing of token ids; guarded_prompt.py finds the template's own control tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import cast

import msgspec

from pd_cluster.errors import RequestError
from pd_cluster.service.concurrency.child_pool import ChildCrashed, ChildPool, ChildTimeout
from pd_cluster.service.prompts.conversation import AS_GIVEN, Conversation, conversation_of
from pd_cluster.service.prompts.guarded_prompt import ControlTokenGuard
from pd_cluster.service.prompts.template_child import Rendered, RenderJob
from pd_cluster.service.schema.chat_protocol import ChatFields
from pd_cluster.settings.request_settings import ChatConfig
from pd_cluster.text.chat_template import ChatTemplate, checks_none
from pd_cluster.text.control_tokens import PromptText

MANY_MESSAGES = 256  # more messages are prepared on another thread, too
LONG_NBYTES = 4096  # longer conversations are rendered on another thread, so that no stream waits for them

Rendering = Generator[Conversation, str, PromptText]  # yields a conversation to render, and receives the text


class ChatPrompts:
    """Renders prompts. `children` render the templates of requests; None: such templates are refused."""

    def __init__(
        self,
        template: ChatTemplate | None,
        children: ChildPool | None,
        config: ChatConfig = AS_GIVEN,
        takes_images: bool = False,
    ) -> None:
        self._template = template
        self._children = children
        self._config = config
        self._takes_images = takes_images

    @classmethod
    def make(
        cls,
        template: ChatTemplate | None,
        constants: dict[str, str],
        timeout_s: float,
        config: ChatConfig = AS_GIVEN,
        takes_images: bool = False,
    ) -> ChatPrompts:
        """Makes the renderer of a process. `timeout_s`: the limit for requests' templates, if they are allowed."""
        settings = msgspec.json.encode(constants)
        module = "pd_cluster.service.prompts.template_child"
        children = ChildPool(module, settings, timeout_s, "template") if config.trusts_request_templates else None
        return cls(template, children, config, takes_images)

    async def render(
        self,
        request: ChatFields,
        check: Callable[[int], None] = lambda num_chars: None,
        guard: ControlTokenGuard | None = None,
    ) -> PromptText:
        """Returns the prompt. `check` is called, before any work, with a lower bound of the prompt's number of
        characters.

        Without a `guard`, clients' texts may contain control tokens. Raises RequestError.
        """
        if request.chat_template is not None:
            return await self._render_own(request.chat_template, request, check, guard)
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        template = self._template
        conversation = await self._conversation(request, template.variables, template.source, template.roles)
        check(conversation.num_chars)
        if conversation.nbytes <= LONG_NBYTES:
            return rendered(conversation, self._template, guard)
        return await asyncio.to_thread(rendered, conversation, self._template, guard)

    async def close(self) -> None:
        if self._children is not None:
            await self._children.close()

    async def _render_own(
        self,
        source: str,
        request: ChatFields,
        check: Callable[[int], None],
        guard: ControlTokenGuard | None,
    ) -> PromptText:
        if self._children is None:
            raise RequestError(
                "chat_template: this server takes no templates from requests (--trust-request-chat-template)",
                param="chat_template",
            )
        reads = await self._ask(self._children, source)
        conversation = await self._conversation(request, reads.variables, source, reads.roles)
        check(conversation.num_chars)
        rendering = _steps(conversation, guard)
        wanted = next(rendering)
        while True:
            text = (await self._ask(self._children, source, wanted)).text
            try:
                wanted = rendering.send(text)
            except StopIteration as ended:
                return cast(PromptText, ended.value)

    async def _conversation(
        self, request: ChatFields, variables: frozenset[str], source: str, roles: frozenset[str]
    ) -> Conversation:
        def work() -> Conversation:
            return conversation_of(request, variables, self._config, self._takes_images, checks_none(source), roles)

        return work() if len(request.messages) <= MANY_MESSAGES else await asyncio.to_thread(work)

    async def _ask(self, children: ChildPool, source: str, conversation: Conversation | None = None) -> Rendered:
        """Renders the template in a child process. Raises RequestError."""
        try:
            answer = await children.ask(msgspec.json.encode(RenderJob(source, conversation)))
        except ChildTimeout as error:
            raise RequestError(f"chat_template: {error}; make it simpler", param="chat_template") from None
        except ChildCrashed:
            raise RequestError("chat_template: it takes too much memory", param="chat_template") from None
        rendered = msgspec.json.decode(answer, type=Rendered)
        if rendered.error:
            raise RequestError(rendered.error, param=rendered.param)
        return rendered


def rendered(conversation: Conversation, template: ChatTemplate, guard: ControlTokenGuard | None) -> PromptText:
    """Renders the prompt in the calling thread. Raises RequestError."""
    rendering = _steps(conversation, guard)
    wanted = next(rendering)
    while True:
        text = wanted.render(template)
        try:
            wanted = rendering.send(text)
        except StopIteration as ended:
            return cast(PromptText, ended.value)


def _steps(conversation: Conversation, guard: ControlTokenGuard | None) -> Rendering:
    return guard.prompt(conversation) if guard is not None else _as_written(conversation)


def _as_written(conversation: Conversation) -> Rendering:
    return PromptText((yield conversation))
