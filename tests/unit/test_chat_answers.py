"""Chat answers with reasoning and calls are the same whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.cluster.routing.router import Router
from pd_cluster.errors import RequestError
from pd_cluster.service.answers.chat_answer import ChatAnswer
from pd_cluster.service.answers.reply_blocks import BlockReader
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.text_service import TextService
from pd_cluster.settings.request_settings import ChatConfig
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE, make_tokenizer
from tests.support.playback import Playback
from tests.support.service_configs import service_config

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}{{ tools }}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("look", "wait")]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "ä"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=look>\n<parameter=at>\nä\n</parameter>\n</function>\n</tool_call>"
SECOND = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'

THOUGHT = "<think>\nhm\n</think>\n\n"

Service = Callable[..., tuple[TextService, Playback]]
RUST = make_tokenizer()
RUST.add_special_tokens(["<tool_call>", "</tool_call>"])


@pytest.fixture
def make(tmp_path: Path) -> Service:
    RUST.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)

    def build(text: str, tools: str = "hermes", reasoning: str = "qwen3", ids: bool = False, **more: Any) -> Any:
        router = Playback(RUST.encode(text).ids)
        config = {"vocab_size": VOCAB_SIZE + 2, "eos_token_id": EOS_ID}
        chat = ChatConfig(tool_parser=tools, reasoning_parser=reasoning, **more)
        checkpoint = Checkpoint(tmp_path, config, {}, "", tmp_path)
        config = service_config(chat=chat, returns_tokens_as_token_ids=ids)
        service = TextService(cast(Router, router), checkpoint, config)
        return service, router

    return build


async def asked(service: TextService, streams: bool, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns an answer as a list of one, or all chunks of a stream."""
    hello = [{"role": "user", "content": "hello"}]
    request = ChatCompletionRequest(**{"messages": hello, "n": 2, "seed": 1, **fields})
    answer = ChatAnswer(request, "x", service, await service.chat(request))
    if not streams:
        return [msgspec.to_builtins(answer.whole(await service.complete(answer.generations)))]
    events = b"".join([answer.events(piece) async for piece in service.pieces(answer.generations)])
    return [json.loads(line.removeprefix(b"data: ")) for line in events.splitlines() if line]


def answers(service: TextService, **fields: Any) -> list[dict[str, Any]]:
    """Returns the choices, after comparing the whole answer with the streamed one."""

    async def both() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        found = await asked(service, False, fields), await asked(service, True, fields)
        await service.close()
        return found

    (whole,), chunks = asyncio.run(both())
    found: list[dict[str, Any]] = whole["choices"]
    assert [accumulated(chunks, choice["index"]) for choice in found] == [plain(choice) for choice in found]
    return found


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns a choice without the fields that differ between answers."""
    message = {name: value for name, value in choice["message"].items() if value is not None or name == "content"}
    calls = [call["function"] for call in message.pop("tool_calls", [])]
    logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
    return {**message, "calls": calls, "reason": choice["finish_reason"], "num_logprobs": len(logprobs)}


def accumulated(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    texts: dict[str, str] = {}
    calls: list[dict[str, str]] = []
    reason, num_logprobs = None, 0
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        assert reason is None
        reason = choice["finish_reason"]
        num_logprobs += len((choice["logprobs"] or {"content": []})["content"])
        delta = dict(choice["delta"])
        for call in delta.pop("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["type"] == "function"
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        for name, text in delta.items():
            texts[name] = texts.get(name, "") + text
    if calls and not texts["content"]:
        texts["content"] = cast(str, None)
    return {**texts, "calls": calls, "reason": reason, "num_logprobs": num_logprobs}


def test_calls_are_read_after_reasoning_and_content(make: Service) -> None:
    """The markers are special tokens, so they are omitted; the text between them is shown."""
    service, router = make(THOUGHT + "Let me see." + CALL + "\n" + SECOND + "<eos>")
    router.last_reason, router.logprobs = "stop", {0: -1.0, 1: -1.0}
    for choice in answers(service, tools=TOOLS, logprobs=True):
        message = choice["message"]
        assert message["reasoning"] == message["reasoning_content"] == "hm"
        assert message["content"] == "Let me see."
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["look", "wait"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"at": "ä"}
        assert choice["finish_reason"] == "tool_calls"
        assert len({call["id"] for call in message["tool_calls"]}) == 2
    service, _ = make(CALL + SECOND)
    (choice,) = answers(service, tools=TOOLS, parallel_tool_calls=False, n=1)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look"]
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        service, router = make(CALL, reasoning="")
        router.last_reason = "stop"
        (choice,) = answers(service, n=1, **fields)
        assert choice["message"]["content"] == '\n{"name": "look", "arguments": {"at": "ä"}}\n'
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(("stop", "reason"), [("at", "stop"), ("</tool_call>", "tool_calls")])
def test_a_call_that_a_stop_cuts_is_none(make: Service, stop: str, reason: str) -> None:
    service, _ = make('<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>')
    fields = {"tools": TOOLS, "tool_choice": "required", "stop": [stop], "n": 1}
    (answer,) = asyncio.run(asked(service, False, fields))
    assert answer["choices"][0]["finish_reason"] == reason


def test_text_among_a_call_s_arguments_follows_it_as_a_block(make: Service) -> None:
    parameter = "<parameter=at>1</parameter>"
    service, router = make(
        f"<function=look>so{parameter}and</function>.<function=wait></function>", tools="qwen3_coder"
    )
    router.num_together = 3

    async def blocks() -> list[tuple[str, str]]:
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "hello"}], tools=TOOLS)  # type: ignore[list-item,arg-type]
        generation = await service.chat(request)
        reader = BlockReader(generation)
        changes = [change async for piece in service.pieces([generation]) for change in reader.read(piece)]
        assert [change.what for change in changes if change.what != "grows"] == ["begins", "ends"] * len(reader.blocks)
        return [(block.kind, block.text) for block in reader.blocks]

    assert asyncio.run(blocks()) == [("call", '{"at": 1}'), ("text", "soand."), ("call", "{}")]


def test_kimi_s_calls_count_over_the_conversation(make: Service) -> None:
    text = "".join(
        f"<|tool_call_begin|>functions.{name}:7<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        for name in ("look", "wait")
    )
    service, _ = make(text, tools="kimi_k2", reasoning="")
    (choice,) = answers(service, tools=TOOLS, n=1)
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["functions.look:0", "functions.wait:1"]
    earlier = {"role": "assistant", "tool_calls": choice["message"]["tool_calls"]}
    (choice,) = answers(service, tools=TOOLS, n=1, messages=[{"role": "user", "content": "hello"}, earlier])
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["functions.look:2", "functions.wait:3"]


def test_usage_in_every_chunk_begins_at_none(make: Service) -> None:
    service, _ = make("abc")

    def counts(**more: Any) -> list[Any]:
        usages = [each.get("usage") for each in asyncio.run(asked(service, True, {"n": 1, "stream": True, **more}))]
        return [usage and usage["completion_tokens"] for usage in usages]

    found = counts(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert found[0] == 0
    assert found[1:] == sorted({*found[1:]} - {0, None})
    assert not any(counts())


@pytest.mark.parametrize("reasoning", ["qwen3", "openai_gptoss"])
def test_tokens_of_hidden_reasoning_are_hidden(make: Service, reasoning: str) -> None:
    """With token ids, logprobs or both, whole and streamed, only the tokens of shown content are returned."""
    secret, shown = "see crêt\nof it", "So … <b> it is."
    text = f"<think>\n{secret}\n</think>\n\n{shown}"
    if reasoning == "openai_gptoss":
        channel = "<|channel|>{}<|message|>{}"
        text = f"{channel.format('analysis', secret)}<|end|><|start|>assistant{channel.format('final', shown)}"
    for body in (text, text + CALL * (reasoning == "qwen3"), f"{text}<eos>"):
        for fields in ({"return_token_ids": True}, {"logprobs": True}, {"return_token_ids": True, "logprobs": True}):
            service, router = make(body, "openai" if reasoning == "openai_gptoss" else "hermes", reasoning)
            router.logprobs = {0: -1.0, 1: -1.0}
            router.last_reason = "stop" if body.endswith("<eos>") else "length"
            for streams in (False, True):
                lists = listed(service, streams, tools=TOOLS, include_reasoning=False, **fields)
                assert {RUST.decode(token_ids) for token_ids in lists} == {shown}
    service, router = make(text, "openai" if reasoning == "openai_gptoss" else "hermes", reasoning)
    (ids,) = listed(service, False, return_token_ids=True, n=1)
    assert ids == RUST.encode(text).ids


def listed(service: TextService, streams: bool, **fields: Any) -> list[list[int]]:
    """Returns all token lists in the choices: the ids, and those given by the texts of logprobs."""
    found: dict[tuple[int, str], list[int]] = {}
    by_bytes = {service.tokenizer.token_bytes(at): at for at in range(VOCAB_SIZE)}
    parts = asyncio.run(asked(service, streams, fields))
    for choice in (choice for part in parts for choice in part["choices"]):
        if "token_ids" in choice and choice["token_ids"] is not None:
            found.setdefault((choice["index"], "ids"), []).extend(choice["token_ids"])
        if choice["logprobs"] is not None:
            raw = [bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]]
            found.setdefault((choice["index"], "logprobs"), []).extend(by_bytes[each] for each in raw)
    return list(found.values())


@pytest.mark.parametrize(
    ("generation_prompt", "reasoning", "is_reasoning"),
    [
        ("<|a|><think>\n</think>\nAnswer: ", "qwen3", False),
        ("<|a|><think>\n\n</think>\n\n", "deepseek_r1", False),
        ("<think>Be brief.\n", "qwen3", True),
        ("<|a|><think>" + "Be brief. " * 20, "deepseek_r1", True),
        ("<|a|>", "qwen3", False),
    ],
)
def test_the_last_mark_of_the_generation_prompt_counts(
    make: Service, generation_prompt: str, reasoning: str, is_reasoning: bool
) -> None:
    """Text after the marker in the template, and markers in messages, make no difference."""
    ends = "{% if add_generation_prompt %}" + generation_prompt + "{% else %}<|end|>{% endif %}"
    service, _ = make("aaa</think>bbb", reasoning=reasoning, template="{{ messages[0].content }} " + ends)
    (choice,) = answers(service, n=1, messages=[{"role": "user", "content": "a </think> <think> b"}])
    assert choice["message"]["reasoning"] == ("aaa" if is_reasoning else None)
    assert choice["message"]["content"] == ("bbb" if is_reasoning else "aaabbb")


@pytest.mark.parametrize(("mark", "kind"), [("<think>Be brief.\n", "reply"), ("<think></think>\nAnswer: ", "regex")])
def test_a_guide_begins_behind_the_reasoning_that_the_prompt_began(make: Service, mark: str, kind: str) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}" + mark + "{% endif %}"
    service, router = make("aaa</think>bbb", template=template)
    answers(service, n=1, structured_outputs={"regex": "b+"})
    assert {sampling.guide.kind for sampling in router.requests if sampling.guide is not None} == {kind}


@pytest.mark.parametrize(("parser", "call"), [("hermes", CALL), ("qwen3_coder", XML_CALL)])
def test_a_call_in_reasoning_that_is_never_closed(make: Service, parser: str, call: str) -> None:
    for choice in ("auto", "required"):
        service, router = make(f"<think>\nhm\n{call}", parser)
        router.last_reason = "stop"
        (found,) = answers(service, tools=TOOLS, tool_choice=choice, n=1)
        assert found["message"]["reasoning"] == "hm"
        (one,) = (each["function"] for each in found["message"]["tool_calls"])
        assert (one["name"], json.loads(one["arguments"])) == ("look", {"at": "ä"})
        assert found["finish_reason"] == "tool_calls"
        service, _ = make(f"<think>\nhm\n{call}</think>so", parser)
        (found,) = answers(service, tools=TOOLS, tool_choice=choice, n=1)
        assert (found["message"]["content"], "tool_calls" in found["message"]) == ("so", False)


def test_thinking_that_was_switched_off(make: Service) -> None:
    service, _ = make("<think>is content</think>")
    (choice,) = answers(service, n=1, chat_template_kwargs={"enable_thinking": False})
    assert choice["message"]["content"] == "<think>is content</think>"


@pytest.mark.parametrize(("started", "is_reasoning"), [("<think>hm", True), ("<think>hm</think>So", False)])
def test_thinking_that_goes_on(make: Service, started: str, is_reasoning: bool) -> None:
    service, _ = make("and</think>so")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": started}]
    (choice,) = answers(service, n=1, messages=messages, continue_final_message=True)
    assert choice["message"]["content"] == ("so" if is_reasoning else "andso")


def test_what_an_answer_must_look_like_is_told_to_the_engine(make: Service) -> None:
    def kind_of(reasoning: str = "qwen3", **fields: Any) -> str:
        service, router = make("x" + CALL, reasoning=reasoning)
        answers(service, n=1, **fields)
        return router.requests[0].guide.kind if router.requests[0].guide else ""

    assert kind_of(tools=TOOLS) == ""
    assert kind_of(tools=TOOLS, tool_choice="required") == "reply"
    strict = [{"type": "function", "function": {"name": "look", "strict": True}}]
    assert kind_of(tools=strict, tool_choice="auto") == "reply"
    wanted = {"type": "json_object"}
    assert (kind_of(response_format=wanted), kind_of("", response_format=wanted)) == ("reply", "json_object")


def test_without_a_parser_only_what_is_constrained_can_be_read(make: Service) -> None:
    service, _ = make('[{"name": "look", "parameters": {"at": 1}}]', tools="", reasoning="")
    (choice,) = answers(service, tools=TOOLS, tool_choice="required", n=1)
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look"]
    service, router = make('[{"name": "look", "parameters": {"at": 1}}]', tools="", reasoning="")
    router.last_reason = "stop"
    (choice,) = answers(service, tools=TOOLS, tool_choice=TOOLS[0], n=1)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert choice["finish_reason"] == "stop"
    service, _ = make("x")
    with pytest.raises(RequestError, match="structured_outputs"):
        answers(service, tools=TOOLS, tool_choice="required", structured_outputs={"regex": "a+"})


def test_the_servers_own_role_and_template(make: Service) -> None:
    service, _ = make("hi", response_role="bot", template="{{ messages[0].content }}!")
    (choice,) = answers(service, n=1)
    assert choice["message"]["role"] == "bot"
    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hello"}]})
    assert service.tokenizer.decode(asyncio.run(service.chat_token_ids(request))) == "hello!"


def test_tokens_are_shown_as_ids_where_the_server_says_so_and_the_request_does_not(make: Service) -> None:
    def token(is_servers: bool, **fields: Any) -> str:
        service, router = make("a", ids=is_servers)
        router.logprobs = {0: -1.0}
        (choice,) = answers(service, n=1, logprobs=True, **fields)
        return str(choice["logprobs"]["content"][0]["token"])

    as_id = f"token_id:{RUST.encode('a').ids[0]}"
    assert (token(True), token(False)) == (as_id, "a")
    assert token(True, return_tokens_as_token_ids=False) == "a"
    assert token(False, return_tokens_as_token_ids=True) == as_id
