"""Choices, logprobs, prompt logprobs and usage in whole and streamed HTTP answers, from scripted tokens."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from pd_cluster.api.middleware.error_responses import install_error_handlers
from pd_cluster.api.routes.generate_routes import legacy_routes
from pd_cluster.api.routes.openai_routes import openai_routes
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.routing.router import Router
from pd_cluster.service.text_service import TextService
from pd_cluster.types import FinishReason, Logprobs, PromptOutput, RequestSpec, TokenOutput
from tests.support.checkpoints import EOS_ID, make_tokenizer, text_checkpoint
from tests.support.service_configs import service_config

RUST = make_tokenizer()
A, B, C, D, E = RUST.encode("abcde").ids
HALF_1, HALF_2 = RUST.encode("é").ids


class Script:
    """A router that returns the scripted tokens: (index, token id, finish reason, logprobs)."""

    def __init__(self) -> None:
        self.membership = SimpleNamespace(instances=[])
        self.stats = RequestStats()
        self.lines: list[tuple[int, int, FinishReason | None, Logprobs | None]] = []
        self.prompt = PromptOutput("r", 0, 4)

    async def serve(self, order: RequestSpec, routed: Any, prompted: Any, *origin: Any) -> AsyncIterator[TokenOutput]:
        sampling = order.sampling
        stopped: set[int] = set()
        instances = [SimpleNamespace(name=name) for name in ("p", "d")]
        inbox = SimpleNamespace(put=None)
        stop = lambda index, _: stopped.add(index)  # noqa: E731
        routed(SimpleNamespace(prefill=instances[0], decode=instances[1], stop=stop, inbox=inbox, weight_marks=[]))
        prompted(self.prompt)
        positions = [0] * sampling.n
        for index, token_id, reason, logprobs in self.lines:
            if index not in stopped:
                known = logprobs if sampling.logprobs is not None else None
                yield TokenOutput("r", 0, index, positions[index], token_id, reason, known)
                positions[index] += 1


Post = Callable[..., httpx.Response]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def post(tmp_path: Path, script: Script) -> Post:
    """Returns `post(route, **fields)`, which sends a request to a server whose model is the script."""
    checkpoint = text_checkpoint(tmp_path, RUST)
    service = TextService(cast(Router, script), checkpoint, service_config(max_model_len=1000))
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(openai_routes(service))
    app.include_router(legacy_routes(service))

    def ask(route: str, **fields: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
                return await client.post(route, json=fields)

        answer = asyncio.run(send())
        assert answer.status_code == 200, answer.text
        return answer

    return ask


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def logprobs(logprob: float, rank: int, *top: tuple[int, float]) -> Logprobs:
    return Logprobs(logprob, rank, list(top))


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
TWO: list[tuple[int, int, FinishReason | None, Logprobs | None]] = [
    (0, A, None, None),
    (1, C, None, None),
    (1, D, "stop", None),
    (0, B, None, None),
    (0, E, "length", None),
]


# ---- several choices


def test_choices_of_a_chat_whole_and_streamed(post: Post, script: Script) -> None:
    """Each choice has its role once, first, and its finish_reason once, last; the id is constant; usage comes last."""
    script.lines = TWO
    data = post("/v1/chat/completions", **CHAT, n=2, stop_token_ids=[D]).json()
    assert data["choices"] == [
        {
            "index": index,
            "message": {"role": "assistant", "content": content},
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": stop,
        }
        for index, content, reason, stop in ((0, "abe", "length", None), (1, "c", "stop", D))
    ]
    num_prompt = len("<|user|>hi<|assistant|>")
    assert data["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 5,
        "total_tokens": num_prompt + 5,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    *chunks, last = chunks_of(post("/v1/chat/completions", **CHAT, n=2, **USAGE))
    assert len({(c["id"], c["created"]) for c in [*chunks, last]}) == 1
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    for index, text, reason in ((0, "abe", "length"), (1, "c", "stop")):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [choice["delta"].get("role") for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + [reason]


def test_choices_of_completions(post: Post, script: Script) -> None:
    script.lines = TWO
    fields: dict[str, Any] = {**COMPLETION, "n": 2, "echo": True, "return_token_ids": True}
    choices = post("/v1/completions", **fields).json()["choices"]
    assert [(c["index"], c["text"], c["finish_reason"], c["token_ids"]) for c in choices] == [
        (0, "hiabe", "length", [A, B, E]),
        (1, "hic", "stop", [C, D]),
    ]
    chunks = [c["choices"][0] for c in chunks_of(post("/v1/completions", **fields, stream=True))]
    for index in (0, 1):
        mine = [choice for choice in chunks if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == choices[index]["text"]
        assert [i for choice in mine for i in choice.get("token_ids", [])] == choices[index]["token_ids"]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == [
            choices[index]["finish_reason"]
        ]


def test_choices_of_the_plain_api(post: Post, script: Script) -> None:
    script.lines = TWO
    assert post("/generate", **COMPLETION, n=2).json() == {"text": ["hiabe", "hic"]}
    *frames, end = post("/generate", **COMPLETION, n=2, stream=True).content.split(b"\0")
    assert end == b""
    texts = [json.loads(frame)["text"] for frame in frames]
    assert [*map("|".join, texts)] == ["hia|hi", "hia|hic", "hia|hic", "hiab|hic", "hiabe|hic"]


def test_the_best_are_numbered_anew(post: Post, script: Script) -> None:
    script.lines = [
        (0, A, "length", logprobs(-3.0, 4)),
        (1, B, "length", logprobs(-1.0, 1)),
        (2, C, "length", logprobs(-2.0, 2)),
    ]
    data = post("/v1/completions", **COMPLETION, n=2, best_of=3).json()
    assert [(c["index"], c["text"], c["logprobs"]) for c in data["choices"]] == [(0, "b", None), (1, "c", None)]
    assert data["usage"]["completion_tokens"] == 2
    assert post("/generate", **COMPLETION, n=2, best_of=3).json() == {"text": ["hib", "hic"]}


# ---- logprobs

LINES: list[tuple[int, int, FinishReason | None, Logprobs | None]] = [
    (0, A, None, logprobs(-0.5, 1, (A, -0.5), (B, -1.0))),
    (0, HALF_1, None, logprobs(-3.0, 9, (B, -0.1), (C, -math.inf))),
    (0, HALF_2, None, logprobs(-0.25, 1, (HALF_2, -0.25), (HALF_1, -2.0))),
    (0, EOS_ID, "stop", logprobs(-math.inf, 320, (D, -0.01), (E, -5.0))),
]


def shown(raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


CHAT_CONTENT: list[dict[str, Any]] = [
    {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw), "top_logprobs": top}
    for raw, logprob, top in (
        (b"a", -0.5, [shown(b"a", -0.5), shown(b"b", -1.0)]),
        (b"\xc3", -3.0, [shown(b"b", -0.1), shown(b"c", -9999.0)]),
        (b"\xa9", -0.25, [shown(b"\xa9", -0.25), shown(b"\xc3", -2.0)]),
        (b"<eos>", -9999.0, [shown(b"d", -0.01), shown(b"e", -5.0)]),
    )
]
COMPLETION_LOGPROBS: dict[str, list[Any]] = {
    "tokens": ["a", "\ufffd", "\ufffd", "<eos>"],
    "token_logprobs": [-0.5, -3.0, -0.25, -9999.0],
    "top_logprobs": [
        {"a": -0.5, "b": -1.0},
        {"\ufffd": -3.0, "b": -0.1, "c": -9999.0},
        {"\ufffd": -0.25},
        {"<eos>": -9999.0, "d": -0.01, "e": -5.0},
    ],
    "text_offset": [0, 1, 1, 2],
}


def test_logprobs_of_a_chat(post: Post, script: Script) -> None:
    script.lines = LINES
    (choice,) = post("/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=2).json()["choices"]
    assert choice["message"]["content"] == "aé"
    assert choice["logprobs"] == {"content": CHAT_CONTENT}
    chunks = chunks_of(post("/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=2, stream=True))
    told = [c["choices"][0]["logprobs"] for c in chunks]
    assert [entry for each in told if each is not None for entry in each["content"]] == CHAT_CONTENT
    assert told[0] is None
    assert [len(each["content"]) for each in told if each is not None] == [1, 2, 1], "logprobs must go with their text"


def test_logprobs_of_a_completion(post: Post, script: Script) -> None:
    script.lines = LINES
    (choice,) = post("/v1/completions", **COMPLETION, logprobs=2).json()["choices"]
    assert choice["logprobs"] == COMPLETION_LOGPROBS
    chunks = chunks_of(post("/v1/completions", **COMPLETION, logprobs=2, stream=True))
    told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"] is not None]
    assert {name: [x for each in told for x in each[name]] for name in COMPLETION_LOGPROBS} == COMPLETION_LOGPROBS
    fields: dict[str, Any] = {**COMPLETION, "logprobs": 2, "return_tokens_as_token_ids": True}
    found = post("/v1/completions", **fields).json()["choices"][0]["logprobs"]
    assert found["tokens"][1:3] == [f"token_id:{HALF_1}", f"token_id:{HALF_2}"]
    assert found["top_logprobs"][2] == {f"token_id:{HALF_2}": -0.25, f"token_id:{HALF_1}": -2.0}


def test_logprobs_of_the_plain_api(post: Post, script: Script) -> None:
    script.lines = LINES
    data = post("/generate", **COMPLETION, logprobs=2).json()
    in_text = COMPLETION_LOGPROBS | {"text_offset": [2, 3, 3, 4]}  # offsets include the echoed prompt
    assert data == {"text": ["hiaé"], "logprobs": [in_text]}
    *frames, _ = post("/generate", **COMPLETION, logprobs=2, stream=True).content.split(b"\0")
    assert json.loads(frames[-1]) == data
    assert all("logprobs" not in json.loads(frame) for frame in frames[:-1])


# ---- logprobs of prompts


def test_logprobs_of_an_echo(post: Post, script: Script) -> None:
    script.lines = LINES
    h, i = RUST.encode("hi").ids
    script.prompt = PromptOutput("r", 0, 0, [None, logprobs(-7.0, 3, (h, -0.5), (A, -1.0))])
    whole = post("/v1/completions", **COMPLETION, logprobs=2, echo=True).json()["choices"][0]
    assert whole["text"] == "hiaé"
    assert whole["logprobs"] == {
        "tokens": ["h", "i", *COMPLETION_LOGPROBS["tokens"]],
        "token_logprobs": [None, -7.0, *COMPLETION_LOGPROBS["token_logprobs"]],
        "top_logprobs": [None, {"i": -7.0, "h": -0.5, "a": -1.0}, *COMPLETION_LOGPROBS["top_logprobs"]],
        "text_offset": [0, 1, 2, 3, 3, 4],
    }
    assert "prompt_logprobs" not in whole
    chunks = chunks_of(post("/v1/completions", **COMPLETION, logprobs=2, echo=True, stream=True))
    told = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"] is not None]
    assert {name: [x for each in told for x in each[name]] for name in COMPLETION_LOGPROBS} == whole["logprobs"]
    script.lines = [(0, A, "length", None)]
    alone = post("/v1/completions", **COMPLETION, logprobs=2, echo=True, max_tokens=0).json()["choices"][0]
    assert (alone["text"], alone["logprobs"]["tokens"]) == ("hi", ["h", "i"])
    assert i != h


def test_prompt_logprobs(post: Post, script: Script) -> None:
    """Completions have them in each choice, chats in the answer; the token itself precedes the most likely ones."""
    script.lines = TWO
    h, i = RUST.encode("hi").ids
    script.prompt = PromptOutput("r", 0, 0, [None, logprobs(-math.inf, 3, (h, -0.5), (HALF_1, -1.0))])
    expected = [
        None,
        {
            str(i): {"logprob": -9999.0, "rank": 3, "decoded_token": "i"},
            str(h): {"logprob": -0.5, "rank": 1, "decoded_token": "h"},
            str(HALF_1): {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
        },
    ]
    data = post("/v1/completions", **COMPLETION, prompt_logprobs=2, n=2).json()
    assert [choice["prompt_logprobs"] for choice in data["choices"]] == [expected, expected]
    assert [choice["logprobs"] for choice in data["choices"]] == [None, None]
    data = post("/v1/chat/completions", **CHAT, prompt_logprobs=2, n=2).json()
    assert data["prompt_logprobs"][0] is None
    assert all("prompt_logprobs" not in choice for choice in data["choices"])
    assert post("/generate", **COMPLETION, prompt_logprobs=2, n=2).json()["prompt_logprobs"] == expected
    script.prompt = PromptOutput("r", 0, 0, [None, logprobs(-0.5, 1, (i, -0.5), (h, -1.0))])
    (_, found) = post("/generate", **COMPLETION, prompt_logprobs=2, n=2).json()["prompt_logprobs"]
    assert {key: value["rank"] for key, value in found.items()} == {str(i): 1, str(h): 2}, "the token is listed once"
