"""Answer texts in all APIs, with a real engine and a tokenizer that drops a text's first space."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pd_cluster import LLM, SamplingParams
from pd_cluster.api.middleware.error_responses import install_error_handlers
from pd_cluster.api.routes.generate_routes import legacy_routes
from pd_cluster.api.routes.openai_routes import openai_routes
from pd_cluster.extras.lmdeploy.pipeline import pipeline
from pd_cluster.messages import GenerationConfig
from pd_cluster.offline.batch_runner import BatchRunner
from pd_cluster.offline.offline_service import OfflineConfig, OfflineService
from pd_cluster.service.files.batch_lines import entry_of
from pd_cluster.settings.engine_config import EngineConfig
from tests.support.tokenizer_kinds import FIRST_BYTE, llama2

RUST = llama2()
EOS = RUST.token_to_id("</s>")
TEMPLATE = (
    "<s>{% for m in messages %}{{ '[' + m.role + '] ' + m.content }}"
    "{% if not (loop.last and continue_final_message) %} </s>{% endif %}{% endfor %}"
)
Post = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("one_thread")


def id_of(token: str) -> int:
    found = RUST.token_to_id(token)
    assert found is not None
    return int(found)


WORLD = {"allowed_token_ids": [id_of("▁world")], "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def folder(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("strips") / "model"
    shutil.copytree(checkpoint("llama"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "eos_token_id": EOS}))
    (path / "generation_config.json").unlink(missing_ok=True)
    RUST.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def offline(folder: Path) -> Iterator[OfflineService]:
    engine = EngineConfig(model=str(folder), device="cpu", num_blocks=256)
    with OfflineService(OfflineConfig(engine=engine, served_model_names=("tiny",))) as made:
        yield made


@pytest.fixture(scope="module")
def post(offline: OfflineService) -> Post:
    """`post(path, **fields)` returns a JSON answer, or the text of a stream."""
    app = FastAPI()
    install_error_handlers(app)
    for routes in (openai_routes, legacy_routes):
        app.include_router(routes(offline.service))

    def ask(path: str, **fields: Any) -> Any:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
                return await client.post(path, json=fields)

        answer = offline.run(send())
        assert answer.status_code == 200, answer.text
        return answer.text if fields.get("stream") else answer.json()

    return ask


def completed(post: Post, prompt: str | list[int] = "Hello", **fields: Any) -> dict[str, Any]:
    """Returns the single choice, after asserting that the streamed text is equal."""
    asked = WORLD | {"prompt": prompt} | fields
    (choice,) = post("/v1/completions", **asked)["choices"]
    events = post("/v1/completions", **asked, stream=True).split("\n\n")[:-2]
    streamed = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert "".join(each["text"] for each in streamed) == choice["text"]
    return dict(choice)


def test_completions(post: Post) -> None:
    hello, stop = RUST.encode("Hello").ids, {"stop": " world"}
    for prompt, fields, text in (
        ("Hello", {}, " world world"),
        ("Hello", {"echo": True}, "Hello world world"),
        (hello, {"echo": True}, "Hello world world"),
        ("Hello:", {"allowed_token_ids": [id_of("▁▁▁▁")], "max_tokens": 1}, "    "),
        ([1], {}, "world world"),  # a text begins without a space
        ([1], {"skip_special_tokens": False}, " world world"),
        ("Hello", stop, ""),
        ("Hello", {**stop, "include_stop_str_in_output": True}, " world"),
    ):
        assert completed(post, prompt, **fields)["text"] == text  # type: ignore[arg-type]
    answer = post("/generate", prompt="Hello", **WORLD, logprobs=0)
    assert answer["text"] == ["Hello world world"]
    assert answer["logprobs"][0]["text_offset"] == [5, 11]
    last = json.loads(post("/generate", prompt="Hello", **WORLD, stream=True).split("\0")[-2])
    assert last == {"text": ["Hello world world"]}


@pytest.mark.parametrize("guide", [{"choice": [" world"]}, {"grammar": 'root ::= " world"'}], ids=str)
def test_guides_with_a_space(post: Post, guide: dict[str, Any]) -> None:
    choice = completed(post, allowed_token_ids=None, max_tokens=20, structured_outputs=guide)
    assert (choice["text"], choice["finish_reason"]) == (" world", "stop")


@pytest.mark.parametrize("prompt", ["Hello", "<s>Hello", "Hello if", [1, 2, id_of("▁Hello")]])
def test_each_offset_is_that_of_its_token(post: Post, prompt: Any) -> None:
    choice = post("/v1/completions", prompt=prompt, **WORLD, echo=True, logprobs=0)["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    assert text.endswith(" world world")
    assert logprobs["text_offset"][-2:] == [len(text) - 12, len(text) - 6]
    for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[start:].startswith(token) or text[start:].startswith(token.lstrip()) or token in ("<s>", "</s>")
    behind = completed(post, prompt, logprobs=0)["logprobs"]
    assert behind["text_offset"] == [0, 6]


def test_a_prompt_that_ends_inside_a_character(post: Post) -> None:
    first, second, third = (FIRST_BYTE + byte for byte in "日".encode())
    prompt = [*RUST.encode("Hello").ids, first, second]
    asked = {"allowed_token_ids": [third], "max_tokens": 1}
    assert completed(post, prompt, **asked)["text"] == "日"
    assert completed(post, prompt, **asked, echo=True)["text"] == "Hello日"
    assert completed(post, prompt, max_tokens=0, echo=True)["text"] == RUST.decode(prompt)
    assert completed(post, prompt, max_tokens=1, echo=True)["text"] == "Hello\ufffd\ufffd world"
    assert completed(post, "Hello\ufffd", echo=True)["text"] == "Hello\ufffd world world"


def test_chats(post: Post) -> None:
    talk = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "He"}]
    for messages, expected in ((talk[:1], " world world"), (talk, "He world world")):
        goes_on = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
        asked = {"messages": messages, **WORLD, **(goes_on if len(messages) > 1 else {})}
        assert post("/v1/chat/completions", **asked)["choices"][0]["message"]["content"] == expected
        events = post("/v1/chat/completions", **asked, stream=True).split("\n\n")[:-2]
        deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == expected


def test_offline(offline: OfflineService, folder: Path) -> None:
    with LLM(model=str(folder), num_blocks=64) as llm:
        params = SamplingParams(allowed_token_ids=WORLD["allowed_token_ids"], max_tokens=2, temperature=0)
        (output,) = llm.generate("Hello", params, use_tqdm=False)
        assert output.outputs[0].text == " world world"
    with pipeline(str(folder)) as pipe:
        others = [i for i in range(320) if i != id_of("▁world")]
        config = GenerationConfig(max_new_tokens=2, bad_token_ids=others, skip_special_tokens=False)
        assert pipe("Hello", gen_config=config, do_preprocess=False).text == " world world"
        assert "".join(each.text for each in pipe.stream_infer("Hello", gen_config=config)) == " world world"
        others = [i for i in range(320) if i != EOS]
        config = GenerationConfig(max_new_tokens=3, bad_token_ids=others, skip_special_tokens=False)
        response = pipe("Hello", gen_config=config)
        assert (response.text, response.finish_reason) == ("", "stop"), "end tokens must not be shown"
    body = {"model": "tiny", "prompt": "Hello", **WORLD}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    written: list[bytes] = []
    offline.run(BatchRunner(offline.service, written.append, 1).run(iter([entry_of(1, json.dumps(line).encode())])))
    assert json.loads(written[0])["response"]["body"]["choices"][0]["text"] == " world world"


ENDS = {"allowed_token_ids": [EOS], "max_tokens": 3, "temperature": 0, "skip_special_tokens": False}


@pytest.mark.parametrize(("include", "end"), [(False, ""), (True, "</s>")])
def test_the_token_that_ends_an_answer_is_shown_only_when_asked_for(post: Post, include: bool, end: str) -> None:
    asked = {**ENDS, "include_stop_str_in_output": include}
    choice = completed(post, **asked)
    assert (choice["text"], choice["finish_reason"]) == (end, "stop")
    by_id = completed(post, **{**asked, **WORLD}, stop_token_ids=WORLD["allowed_token_ids"])
    assert (by_id["text"], by_id["finish_reason"]) == (" world" if include else "", "stop")
    chat = post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], **asked)
    assert chat["choices"][0]["message"]["content"] == end
    assert post("/generate", prompt="Hello", **asked)["text"] == ["Hello" + end]
