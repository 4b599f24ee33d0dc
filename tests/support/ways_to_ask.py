"""Asks an offline engine in every documented way of giving sampling parameters, under one set of names.

A way takes one text, a number of answers and options under `SamplingParams`' names, and returns each answer's tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from pd_cluster import LLM, SamplingParams
from pd_cluster.messages import GenerationConfig
from pd_cluster.offline.lmdeploy.async_engine import AsyncEngine

PLAIN = "{{ messages[0].content }}"  # a chat whose prompt is the text itself

CONFIG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "random_seed"}
KEYWORD_NAMES = {"max_tokens": "request_output_len"}
KEYWORDS = frozenset({"max_tokens", "top_k", "top_p", "temperature", "repetition_penalty", "ignore_eos"})


class Engines(NamedTuple):
    llm: LLM
    pipe: AsyncEngine


Ask = Callable[..., list[list[int]]]


class Way(NamedTuple):
    """`takes` holds the options that the way has; None stands for all of them."""

    name: str
    ask: Callable[[Engines, str, int, dict[str, Any]], list[list[int]]]
    takes: frozenset[str] | None = None


def _params(num: int, options: dict[str, Any]) -> list[SamplingParams]:
    """Returns one for each answer; unless the options have a seed, each has its own."""
    return [SamplingParams(**({"seed": at} | options)) for at in range(num)]


def _generate(engines: Engines, text: str, num: int, options: dict[str, Any]) -> list[list[int]]:
    outputs = engines.llm.generate([text] * num, _params(num, options), use_tqdm=False)
    return [output.outputs.token_ids for output in outputs]


def _chat(engines: Engines, text: str, num: int, options: dict[str, Any]) -> list[list[int]]:
    talks = [[{"role": "user", "content": text}]] * num
    outputs = engines.llm.chat(talks, _params(num, options), use_tqdm=False, chat_template=PLAIN)
    return [output.outputs.token_ids for output in outputs]


def _configs(num: int, options: dict[str, Any]) -> list[GenerationConfig]:
    named = {CONFIG_NAMES.get(name, name): value for name, value in options.items()}
    return [GenerationConfig(**({"random_seed": at} | named)) for at in range(num)]


def _by_config(method: str) -> Callable[[Engines, str, int, dict[str, Any]], list[list[int]]]:
    def ask(engines: Engines, text: str, num: int, options: dict[str, Any]) -> list[list[int]]:
        call = getattr(engines.pipe, method)
        found = call([text] * num, gen_config=_configs(num, options), do_preprocess=False)
        return [response.token_ids for response in found]

    return ask


def _by_keywords(method: str) -> Callable[[Engines, str, int, dict[str, Any]], list[list[int]]]:
    def ask(engines: Engines, text: str, num: int, options: dict[str, Any]) -> list[list[int]]:
        named = {KEYWORD_NAMES.get(name, name): value for name, value in options.items()}
        with pytest.warns(FutureWarning, match=rf"^{', '.join(sorted(named, key=_place))}: will go away; use gen_co"):
            found = getattr(engines.pipe, method)([text] * num, do_preprocess=False, **named)
        return [response.token_ids for response in found]

    return ask


def _place(name: str) -> int:
    order = ("request_output_len", "top_k", "top_p", "temperature", "repetition_penalty", "ignore_eos")
    return order.index(name)


def _turns(engines: Engines, text: str, given: list[dict[str, Any]]) -> list[list[int]]:
    """Answers one session for each of `given`, all at the same time."""

    async def turn(session_id: int, options: dict[str, Any]) -> list[int]:
        steps = engines.pipe.generate(text, session_id, do_preprocess=False, stream_response=False, **options)
        (out,) = [out async for out in steps]
        return list(out.token_ids)

    async def run() -> list[list[int]]:
        return await asyncio.gather(*[turn(at, options) for at, options in enumerate(given)])

    return asyncio.run(run())


def _session_by_config(engines: Engines, text: str, num: int, options: dict[str, Any]) -> list[list[int]]:
    return _turns(engines, text, [{"gen_config": config} for config in _configs(num, options)])


def _session_by_keywords(engines: Engines, text: str, num: int, options: dict[str, Any]) -> list[list[int]]:
    named = {KEYWORD_NAMES.get(name, name): value for name, value in options.items()}
    with pytest.warns(FutureWarning, match="will go away; use gen_config"):
        return _turns(engines, text, [named] * num)


WAYS = (
    Way("LLM.generate", _generate),
    Way("LLM.chat", _chat),
    Way("GenerationConfig, called", _by_config("__call__")),
    Way("GenerationConfig, batch_infer", _by_config("batch_infer")),
    Way("GenerationConfig, generate", _session_by_config),
    Way("keywords, called", _by_keywords("__call__"), KEYWORDS),
    Way("keywords, batch_infer", _by_keywords("batch_infer"), KEYWORDS),
    Way("keywords, generate", _session_by_keywords, KEYWORDS),
)
LLM_WAYS = WAYS[:2]
