"""Text services over workers that play back a text, for tests/unit/test_service*.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer as RustTokenizer

from pd_cluster.checkpoints.sampling_defaults import sampling_defaults
from pd_cluster.cluster.routing.router import Router
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.text_service import TextService
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.request_settings import ChatConfig
from tests.support.checkpoints import make_tokenizer, text_checkpoint
from tests.support.playback import Playback
from tests.support.service_configs import service_config

RUST = make_tokenizer()
LIMIT = 10_000
Services = Callable[..., tuple[TextService, Playback]]


def services_in(folder: Path, rust: RustTokenizer = RUST) -> Services:
    """Returns a function that takes a text and returns a service that generates this text, and its router."""
    plain = text_checkpoint(folder, rust)

    def build(
        text: str = "",
        limit: int = LIMIT,
        generation_config: dict[str, Any] | None = None,
        requires_model: bool = False,
        chat: ChatConfig | None = None,
    ) -> Any:
        router = Playback(rust.encode(text, add_special_tokens=False).ids)
        checkpoint = replace(plain, generation_config=generation_config or {})
        service = TextService(
            cast(Router, router),
            checkpoint,
            service_config(
                max_model_len=limit,
                engine=EngineConfig(model="/models/x", max_num_seqs=99),
                sampling_defaults=sampling_defaults(checkpoint, "auto", {}),
                requires_model=requires_model,
                chat=chat or ChatConfig(),
            ),
        )
        return service, router

    return build


def completion(service: TextService, prompt: Any, **fields: Any) -> Generation:
    return asyncio.run(service.completion(CompletionRequest(prompt=prompt, **fields), prompt))


def chat(service: TextService, content: str, **fields: Any) -> Generation:
    messages: Any = [{"role": "user", "content": content}]
    return asyncio.run(service.chat(ChatCompletionRequest(messages=messages, **fields)))


def whole(service: TextService, generation: Generation) -> list[Piece]:
    return asyncio.run(service.complete([generation]))
