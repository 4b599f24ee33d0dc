"""Answers from steps with drafts: one event per step, ends within a step, and reports on drafts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import pytest
from fastapi import FastAPI

from pd_cluster import wire
from pd_cluster.api.middleware.error_responses import install_error_handlers
from pd_cluster.api.routes.openai_routes import openai_routes
from pd_cluster.cluster.routing.router import Router
from pd_cluster.cluster.streams.stream_records import KeptStream
from pd_cluster.service.answers.answer_metrics import AnswerMetrics, drafts_of, with_drafts
from pd_cluster.service.answers.reply_blocks import BlockReader
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.service.text_service import TextService
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.request_settings import ChatConfig, DraftMetrics
from pd_cluster.settings.speculation import Speculation
from pd_cluster.types import DraftReport
from tests.support.checkpoints import make_tokenizer, text_checkpoint
from tests.support.playback import Playback
from tests.support.resume_values import DIGEST
from tests.support.service_configs import service_config

RUST = make_tokenizer()
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    "/v1/completions": {"prompt": "hi", "logprobs": 0},
}
PREDICTION = {"type": "content", "content": "x"}


class Server:
    """A model that generates `text`: one token, then `num_together` per step."""

    def __init__(self, folder: Path, text: str, num_together: int = 1, metrics: DraftMetrics = "none", **more: Any):
        self.router = Playback(RUST.encode(text, add_special_tokens=False).ids)
        self.router.logprobs = {0: -0.5, 1: -0.5}
        self.router.num_together, self.router.drafts = num_together, True
        engine = EngineConfig(model="/models/x", speculation=Speculation(num_speculative_tokens=3))
        config = service_config(engine=engine, spec_decode_metrics=metrics, **more)
        self.service = TextService(cast(Router, self.router), text_checkpoint(folder, RUST), config)
        self.app = FastAPI()
        install_error_handlers(self.app)
        self.app.include_router(openai_routes(self.service))

    def report(self, *of_steps: tuple[int, DraftReport]) -> None:
        """Attaches reports to the tokens at these positions."""
        self.router.changes = {(0, at): {"drafts": report} for at, report in of_steps}

    def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        return cast(dict[str, Any], self._post(path, fields).json())

    def chunks(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        *events, done, _ = self._post(path, {**usage, **fields}).text.split("\n\n")
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def _post(self, path: str, fields: dict[str, Any]) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://x") as client:
                return await client.post(path, json={**ASKED[path], **fields})

        answer = asyncio.run(send())
        assert answer.status_code == 200, answer.text
        return answer


def texts_of(chunks: list[dict[str, Any]]) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [text for each in choices if (text := each["text"] if "text" in each else each["delta"].get("content"))]


def logprobs_of(chunks: list[dict[str, Any]]) -> list[Any]:
    """Returns the logprobs of all tokens; for completions, field by field."""
    told = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    if all("content" in each for each in told):
        return [entry for each in told for entry in each["content"]]
    return [[entry for each in told for entry in each[name]] for name in told[0]]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("text", ["abcdefghij", "aé日é日bc"])
def test_a_step_is_one_event_and_the_answer_is_the_same(tmp_path: Path, path: str, text: str) -> None:
    plain, drafting = Server(tmp_path, text), Server(tmp_path, text, 4)
    one_by_one, together = plain.chunks(path), drafting.chunks(path)
    num_steps = 1 + -(-(len(plain.router.token_ids) - 1) // 4)
    assert len(texts_of(together)) == num_steps < len(texts_of(one_by_one))
    assert "".join(texts_of(together)) == "".join(texts_of(one_by_one)) == text
    assert logprobs_of(together) == logprobs_of(one_by_one)
    assert together[-1]["usage"] == one_by_one[-1]["usage"]
    for server in (plain, drafting):
        answer = server.ask(path)
        assert logprobs_of([answer]) == logprobs_of(one_by_one)
        assert answer["usage"] == one_by_one[-1]["usage"]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("text", ["abcdefghij", "abcde"], ids=["within the answer", "in its last step"])
def test_what_a_step_gave_behind_a_stop_string_is_dropped(tmp_path: Path, path: str, text: str) -> None:
    """Tokens after a stop string are in no text, logprobs, usage or count; of three accepted predictions, two count."""
    server = Server(tmp_path, text, 4)
    server.report((4, DraftReport(3, 1)))
    asked = {"stop": "bc", "prediction": PREDICTION}
    chunks = server.chunks(path, **asked)
    server.router.stopped.clear()
    whole = server.ask(path, **asked)
    for answer in (chunks, [whole]):
        assert [c["finish_reason"] for each in answer for c in each["choices"] if c["finish_reason"]] == ["stop"]
        usage = answer[-1]["usage"]
        assert usage["completion_tokens"] == 3
        details = usage["completion_tokens_details"]
        assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (2, 1)
        found = logprobs_of(answer)
        assert len(found) == 3 if "chat" in path else all(len(each) == 3 for each in found)
    assert texts_of(chunks) == ["a"]
    assert (server.router.stopped, server.router.num_dropped) == ({0}, 2 * 2)


@pytest.mark.parametrize("stop", [None, "ef"])
def test_a_stream_that_may_resume_has_a_piece_for_each_token(tmp_path: Path, stop: str | None) -> None:
    """Events are numbered, and a resuming reader, which reads tokens one by one, must count the same events."""

    async def pieces(num_together: int) -> list[Any]:
        server = Server(tmp_path, "abcdefgh", num_together)
        server.report((4, DraftReport(3, 0)), (7, DraftReport(2, 1)))
        request = CompletionRequest(prompt="hi", stop=stop, prediction=PREDICTION)
        generation = await server.service.completion(request, "hi")
        generation.kept = KeptStream(wire.Keep(DIGEST, 9.0, 9999, b""))
        found = [(each.text, each.token_ids, each.finish_reason) async for each in server.service.stream(generation)]
        return [*found, generation.usage, server.router.num_dropped]

    *one_by_one, usage, none = asyncio.run(pieces(1))
    *together, same_usage, num_dropped = asyncio.run(pieces(4))
    assert together == one_by_one
    assert len(together) > 4
    assert (none, num_dropped) == (0, 2 if stop else 0)
    assert same_usage == usage


def test_reasoning_has_as_many_tokens_as_without_drafts(tmp_path: Path) -> None:
    """The count stays right when one step has the last reasoning tokens and the first one after them."""
    text = "<think>\nhm, so be it\n</think>\n\nabcdefghijklmnop"

    async def read(num_together: int) -> tuple[int, str, int]:
        server = Server(tmp_path, text, num_together, chat=ChatConfig(reasoning_parser="qwen3"))
        messages: Any = [{"role": "user", "content": "hi"}]
        generation = await server.service.chat(ChatCompletionRequest(messages=messages))
        reader, num_grown = BlockReader(generation), 0
        async for piece in server.service.stream(generation):
            num_grown += "grows" in [change.what for change in reader.read(piece)]
        return reader.num_reasoning_tokens, reader.blocks[-1].text, num_grown

    num_tokens, shown, num_grown = asyncio.run(read(1))
    for num_together in range(2, 9):
        found = asyncio.run(read(num_together))
        assert found[:2] == (num_tokens, shown)
        assert found[2] < num_grown


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("level", ["none", "summary", "detailed"])
def test_answers_tell_of_drafts_where_it_is_wanted(
    tmp_path: Path, path: str, level: Literal["none", "summary", "detailed"]
) -> None:
    server = Server(tmp_path, "abcdefgh", 4, level)
    server.report((4, DraftReport(0, 0, ((3, 3),))), (7, DraftReport(0, 0, ((2, 0), (3, 1)))))
    told: dict[str, Any] = {
        "mean_acceptance_length": pytest.approx(1 + 4 / 3),
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 0, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 8,
        "num_spec_tokens": 3,
    }
    if level == "detailed":
        told |= {"per_step_accepted": [3, 0, 1], "per_step_drafted": [3, 2, 3]}
    expected = {} if level == "none" else {"metrics": {"speculative_decoding": told}}
    chunks, whole = server.chunks(path), server.ask(path)
    for answer in (chunks[-1], whole):
        assert {name: value for name, value in answer.items() if name == "metrics"} == expected
    assert not any("metrics" in chunk for chunk in chunks[:-1])
    assert not any("metrics" in chunk for chunk in server.chunks(path, stream_options=None))
    assert [order.reports_drafts for order in server.router.orders] == [level != "none"] * 3
    several = server.ask(path, n=2, seed=1)
    assert several.get("metrics", "no such field") == ("no such field" if level == "none" else None)
    assert not server.router.orders[-1].reports_drafts


def test_the_summary_of_drafts(tmp_path: Path) -> None:
    none = drafts_of([], 2, is_detailed=True)
    assert (none.mean_acceptance_length, none.draft_acceptance_rate, none.acceptance_histogram) == (1.0, 0.0, [0, 0, 0])
    assert (none.per_step_accepted, none.per_step_drafted) == ([], [])
    more = drafts_of([(5, 4)], 2, is_detailed=False)  # from an instance that drafts more than this process expects
    assert (more.acceptance_histogram, more.num_spec_tokens) == ([0, 0, 0, 0, 1, 0], 2)

    async def beside_times() -> AnswerMetrics | None:
        server = Server(tmp_path, "abc", metrics="summary")
        generation = await server.service.completion(CompletionRequest(prompt="hi"), "hi")
        return with_drafts(AnswerMetrics(generation_time_ms=5.0), [generation], 2, is_detailed=False)

    found = asyncio.run(beside_times())
    assert found is not None
    assert found.generation_time_ms == 5.0
    assert found.speculative_decoding
