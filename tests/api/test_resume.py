"""Resumable streams at one scheduler: the same events byte for byte, only for their own client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.client.streaming_client import Sample, make_client, measure
from tests.api.test_tools import ASKED, WEATHER
from tests.support.cluster import LiveCluster
from tests.support.resuming import TOKEN_HEADER, EventReader, cutting, data_of, id_of, resuming
from tests.support.scripted_scenarios import FAMILIES

CHAT = "/v1/chat/completions"
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.fixture(scope="module")
def asked(scripted_model: Path) -> dict[str, dict[str, Any]]:
    """Returns path -> kind -> request; the chat reasons, answers and calls a tool."""
    messages = FAMILIES["qwen3"].ask(scripted_model, "reasoning, a call", ASKED, tools=[WEATHER])
    words = {"prompt": "the sky over", "max_tokens": 24, "temperature": 0.9, "logprobs": 2, "ignore_eos": True}
    return {
        CHAT: {"model": "tiny", "messages": messages, "tools": [WEATHER], "temperature": 0, "max_tokens": 200, **USAGE},
        "/v1/completions": {"model": "tiny", "seed": 5, "return_token_ids": True, **words, **USAGE},
    }


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_it_resumes_at_each_index(scripted: LiveCluster, asked: dict[str, dict[str, Any]], path: str) -> None:
    with EventReader(scripted.url, asked[path], path=path) as reader:
        token, events = reader.token, list(reader)
    assert [id_of(event) for event in events] == [f"{token}-{index}" for index in range(len(events))]
    assert len(events) > 12
    assert events[-1].endswith(b"data: [DONE]")
    if path == CHAT:
        assert any(b'"id":"call_' in event for event in events)
        assert any(b"reasoning" in event for event in events)
    else:
        assert sum(b'"logprobs":{' in event for event in events) > 12
    for index, event in enumerate(events):
        with resuming(scripted.url, id_of(event)) as reader:
            assert reader.answer.headers[TOKEN_HEADER] == token
            assert list(reader) == events[index + 1 :], index
    with resuming(scripted.url, "", **{TOKEN_HEADER: token}) as reader:
        assert list(reader) == events
    scripted.assert_home()


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_connection_that_breaks_loses_nothing(
    scripted: LiveCluster, asked: dict[str, dict[str, Any]], path: str
) -> None:
    with EventReader(scripted.url, asked[path], path=path) as reader:
        whole = [data_of(event) for event in reader]
    with EventReader(scripted.url, asked[path], path=path) as reader:
        events = reader.take(1)
    while not events[-1].endswith(b"[DONE]"):
        with resuming(scripted.url, id_of(events[-1])) as reader:
            assert reader.answer.status_code == 200, reader.answer.text
            events += reader.take(3)
    assert [data_of(event) for event in events] == whole
    scripted.assert_home()


def test_wrong_tokens_and_streams_that_are_not_kept(scripted: LiveCluster, asked: dict[str, dict[str, Any]]) -> None:
    told = set()
    for last_id in ("", "-3", "0" * 32 + "-3", "x" * 5000 + "-0"):
        with resuming(scripted.url, last_id) as reader:
            assert reader.answer.status_code == 404
            told.add(reader.answer.content)
    assert len(told) == 1, told
    with resuming(scripted.url, "0-x") as reader:
        assert reader.answer.status_code == 400
    several = {**asked["/v1/completions"], "n": 2}
    with EventReader(scripted.url, several) as reader:
        assert TOKEN_HEADER not in reader.answer.headers
        assert all(event.startswith(b"data: ") for event in reader)


def test_the_chat_commands_client_resumes_by_itself(scripted: LiveCluster, asked: dict[str, dict[str, Any]]) -> None:
    body = {key: value for key, value in asked["/v1/completions"].items() if key != "stream_options"}

    async def read(most_nbytes: int, resumes: bool) -> Sample:
        port = int(scripted.url.rpartition(":")[2])
        async with cutting(port, most_nbytes) as url, make_client() as client:
            return await measure(client, f"{url}/v1/completions", body, resumes=resumes)

    whole, broken = asyncio.run(read(1 << 30, True)), asyncio.run(read(4000, False))
    assert whole.error is None
    assert broken.error is not None
    resumed = asyncio.run(read(4000, True))
    assert (resumed.error, resumed.text, resumed.token_ids) == (None, whole.text, whole.token_ids)
    assert len(broken.token_ids) < len(whole.token_ids) == 24
