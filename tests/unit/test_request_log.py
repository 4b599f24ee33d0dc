"""The log of requests and answers has no prompts or keys, respects the limit, and has each answer once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from pd_cluster.extras.request_log.generation_log import RequestLog
from pd_cluster.service.generation.prompt_generation import Generation
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.settings.request_log_settings import RequestLogSettings
from pd_cluster.settings.serve_options import ServeOptions
from pd_cluster.types import RequestSpec, Sampling

KEY = "sk-abcdefghijklmnop"


def generation() -> Generation:
    sampling = Sampling(max_tokens=9, stop_token_ids=[7], bad_words=["secret"])
    return Generation(RequestSpec([1, 2, 3], sampling), [], 1, client_id="cmpl-a")


def request_log(**settings: int) -> RequestLog:
    return RequestLog(RequestLogSettings(has_requests=True, has_outputs=True, **settings))


async def pieces_of(*texts: str, ends: bool = True) -> AsyncGenerator[Piece, None]:
    for at, text in enumerate(texts):
        yield Piece(0, text, [at], [], "stop" if ends and at == len(texts) - 1 else None)


def logged(
    caplog: pytest.LogCaptureFixture, log: RequestLog, pieces: AsyncGenerator[Piece, None], most: int
) -> list[str]:
    async def read() -> None:
        num = 0
        async with aclosing(log.watched([generation()], pieces)) as watched:
            async for _ in watched:
                num += 1
                if num == most:
                    return

    with caplog.at_level(logging.INFO, "pd_cluster.extras.request_log.generation_log"):
        asyncio.run(read())
    return [record.getMessage() for record in caplog.records]


def test_an_answer_is_logged_once_and_cut(caplog: pytest.LogCaptureFixture) -> None:
    begun, ended = logged(caplog, request_log(most_chars=5), pieces_of("ab\n", "cdef"), 9)
    assert begun == "request cmpl-a: 3 tokens in the prompt, max_tokens 9", "the log must have numbers, not text"
    assert ended == r"request cmpl-a, choice 0: stop after 2 tokens: 'ab\ncd' and 2 characters more"


def test_an_answer_whose_client_leaves_is_logged_as_far_as_it_came(caplog: pytest.LogCaptureFixture) -> None:
    _, ended = logged(caplog, request_log(), pieces_of("ab", "cd", ends=False), 1)
    assert ended == "request cmpl-a, choice 0: broken off after 1 tokens: 'ab'"


@pytest.mark.parametrize("most", [200, len("use ") + 4])  # truncated within the key
def test_keys_are_hidden(caplog: pytest.LogCaptureFixture, most: int) -> None:
    whole = f"use {KEY} here"
    _, ended = logged(caplog, request_log(most_chars=most), pieces_of(whole[:9], whole[9:]), 9)
    assert "[hid" in ended
    assert KEY[:4] not in ended


def test_whole_answers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pd_cluster.extras.request_log.generation_log"):
        request_log().ends([generation()], [Piece(0, "ab", [1, 2], [], "length"), Piece(1, "", [3], [], "stop")])
    assert [record.getMessage() for record in caplog.records] == [
        "request cmpl-a, choice 0: length after 2 tokens: 'ab'",
        "request cmpl-a, choice 1: stop after 1 tokens: ''",
    ]


def test_when_there_is_an_access_log() -> None:
    given: list[tuple[dict[str, object], bool]] = [
        ({}, False),
        ({"access_log": True}, True),
        ({"disable_access_log_for_endpoints": "/health, /ping"}, True),
        ({"disable_access_log_for_endpoints": "/health", "disable_uvicorn_access_log": True}, False),
    ]
    for options, logs in given:
        assert ServeOptions(**options).read(RequestLogSettings).logs_access is logs
