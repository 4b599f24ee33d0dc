"""`LLM` over a router that plays back tokens: inputs and outputs, their order, and who is to blame for an error."""

from __future__ import annotations

import inspect
import io
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import pd_cluster
from pd_cluster import LLM, RequestOutput, SamplingParams
from pd_cluster.errors import InstanceLost, RequestError
from pd_cluster.offline.lora import LoRARequest
from pd_cluster.offline.outputs import CompletionOutput, CompletionOutputs
from pd_cluster.offline.progress import Progress
from pd_cluster.types import Logprobs, Order, PromptOutput, TokenOutput
from tests.support.checkpoints import EOS_ID, make_tokenizer
from tests.support.offline import LIMIT, MakeLLM, make_fake_llm

USER: dict[str, Any] = {"role": "user", "content": "hello"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "be kind"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.jpg"}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    build, made = make_fake_llm(tmp_path, monkeypatch)
    yield build
    for offline in made:
        offline.close()


def ids(text: str) -> list[int]:
    found: list[int] = make_tokenizer().encode(text).ids
    return found


# ---- importing


def test_the_package_has_the_names_and_stays_light() -> None:
    """Processes that need none of them import none of what they need."""
    code = (
        "import sys, pd_cluster; before = len(sys.modules)\n"
        "names = [name for name in sys.modules if name.startswith('pd_cluster')]\n"
        "assert names == ['pd_cluster'], names\n"
        "heavy = {'torch', 'transformers', 'pydantic', 'fastapi', 'msgspec', 'tqdm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from pd_cluster import SamplingParams\n"
        "assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)\n"
        "from pd_cluster import LLM\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_every_exported_name_is_there_and_no_other() -> None:
    for name in pd_cluster.__all__:
        assert getattr(pd_cluster, name).__name__ == name
        assert name in dir(pd_cluster)
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        pd_cluster.LLMs  # noqa: B018


# ---- inputs of generate


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (((5, 6), (7,)), [[5, 6], [7]]),
        ({"prompt": "ab"}, ["ab"]),
        ({"prompt_token_ids": [5, 6]}, [[5, 6]]),
        ({"prompt": "ab", "multimodal_data": None}, ["ab"]),
        ([{"prompt": "ab"}, {"prompt_token_ids": [7]}], ["ab", [7]]),
    ],
)
@pytest.mark.parametrize("name", ["prompts", "inputs", "positional"])
def test_prompts_in_every_shape(make: MakeLLM, prompts: Any, wanted: list[Any], name: str) -> None:
    llm, _ = make("xyz")
    args, named = ((prompts,), {}) if name == "positional" else ((), {name: prompts})
    outputs = llm.generate(*args, use_tqdm=False, **named)
    assert [output.prompt for output in outputs] == [each if isinstance(each, str) else None for each in wanted]
    assert [output.prompt_token_ids for output in outputs] == [
        ids(each) if isinstance(each, str) else each for each in wanted
    ]


@pytest.mark.parametrize(("given", "wanted"), [([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])])
def test_token_ids_under_their_older_name(make: MakeLLM, given: Any, wanted: list[list[int]]) -> None:
    llm, _ = make("xyz")
    assert [o.prompt_token_ids for o in llm.generate(prompt_token_ids=given, use_tqdm=False)] == wanted


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "prompts: nothing to continue; give prompts, or prompt_token_ids"),
        ({"prompts": ["a", "b"], "prompt_token_ids": [1]}, "prompt_token_ids: 1 for 2 prompts; give as many"),
        ({"prompts": [[1]], "prompt_token_ids": [[1]]}, "prompts[0]: beside prompt_token_ids it must be a text"),
        ({"prompts": "a", "inputs": "b"}, "prompts: 'a': inputs are given too"),
        ({"prompts": []}, "prompts: empty"),
        ({"prompts": ["a", 1]}, "prompts: ints in the list; give a string, a list of token ids, a dict"),
        ({"prompts": ["a", [1], None]}, "prompts: NoneTypes in the list"),
        ({"prompts": [1, "a"]}, "prompts[1]: 'a' is not a token id"),
        ({"prompts": [1, True]}, "prompts[1]: True is not a token id"),
        ({"prompts": [[1], [1.5]]}, "prompts[1][0]: 1.5 is not a token id"),
        ({"prompts": 5}, "prompts: int; must be a string, a list of token ids, a dict"),
        ({"prompts": [1.0, 2.0]}, "prompts: floats in the list; give a string, a list of token ids, a dict"),
        ({"prompts": {None: "a"}}, "prompts.None: not known"),
        ({"prompts": ["a", "\ud800"]}, "prompts[1]: '\\ud800': half a character"),
        ({"prompts": {"prompt": "\ud800"}}, "prompts.prompt: '\\ud800': half a character"),
        ({"prompts": "a", "sampling_params": {"n": 1}}, "sampling_params: dict; must be SamplingParams, or a list"),
        ({"prompts": {"promt": "a"}}, "prompts.promt: not known; did you mean prompt?"),
        ({"prompts": [{}]}, "prompts[0]: must have one of prompt and prompt_token_ids"),
        ({"prompts": {"prompt": 5}}, "prompts.prompt: int; must be a list"),
        (
            {"prompts": {"prompt": "a", "multimodal_data": {"image": ["…"], "video": []}}},
            "prompts.multimodal_data.image[0]: str; must be a PIL.Image.Image",
        ),
        ({"prompts": "a", "lora_request": "x"}, "lora_request: 'x'; expected a LoRARequest, or a list"),
        ({"prompts": ["a"], "lora_request": ["x"]}, "lora_request[0]: 'x'; expected a LoRARequest, or None"),
        ({"prompts": ["a"], "lora_request": [None] * 2}, "lora_request: 2 for 1 prompts; give one for all"),
        ({"prompts": "a", "lora_request": LoRARequest("a", 0, "/a")}, "lora_request.lora_int_id: 0; must be"),
        ({"prompts": "a", "lora_request": LoRARequest("a", 1)}, "lora_request.lora_path: none"),
        (
            {"prompts": "a", "prompt_adapter_request": "x"},
            "prompt_adapter_request: 'x'; expected a PromptAdapterRequest, or a list",
        ),
        ({"prompts": "a", "guided_options_request": {}}, "guided_options_request: asks for nothing"),
        ({"prompts": ["a", "b"], "sampling_params": [SamplingParams()]}, "sampling_params: 1 for 2 prompts"),
        ({"prompts": ["a"], "sampling_params": [{"n": 1}]}, "sampling_params[0]: dict; must be SamplingParams"),
    ],
)
def test_wrong_input_is_an_error_before_any_work(make: MakeLLM, arguments: dict[str, Any], error: str) -> None:
    llm, offline = make("xyz")
    with pytest.raises(RequestError) as caught:
        llm.generate(**arguments)
    assert str(caught.value).startswith(error)
    assert offline.router.requests == []


def test_the_parameters_of_the_documents_and_no_switch_for_thinking() -> None:
    names = list(inspect.signature(LLM.generate).parameters)[1:]
    assert names[:7] == [
        *("prompts", "sampling_params", "prompt_token_ids", "use_tqdm", "lora_request"),
        *("prompt_adapter_request", "guided_options_request"),
    ]
    assert "chat_template_kwargs" not in names
    names = list(inspect.signature(LLM.chat).parameters)[1:]
    assert names[:6] == [
        *("messages", "sampling_params", "use_tqdm", "lora_request", "chat_template", "add_generation_prompt")
    ]


# ---- parameters beside prompts


@pytest.mark.parametrize("is_chat", [False, True])
def test_one_parameter_for_all_or_one_for_each(make: MakeLLM, is_chat: bool) -> None:
    llm, offline = make("xyz", chat_template="{{ messages[0].content }}")
    several: Any = [[USER]] * 3 if is_chat else ["hello"] * 3
    ask: Any = llm.chat if is_chat else llm.generate
    ask(several, SamplingParams(top_k=5), use_tqdm=False)
    assert [sampling.top_k for sampling in offline.router.requests] == [5, 5, 5]
    offline.router.requests.clear()
    ask(several, [SamplingParams(top_k=k) for k in (1, 2, 3)], use_tqdm=False)
    assert [sampling.top_k for sampling in offline.router.requests] == [1, 2, 3]
    offline.router.requests.clear()
    ask(several, use_tqdm=False)
    wanted = (1.0, 1.0, LIMIT - 5 if is_chat else 16)
    assert [(s.temperature, s.top_p, s.max_tokens) for s in offline.router.requests] == [wanted] * 3


def test_the_same_script_draws_the_same_seeds(make: MakeLLM) -> None:
    def seeds(**arguments: Any) -> list[int]:
        llm, offline = make("xyz", **arguments)
        llm.generate(["a", "b"], use_tqdm=False)
        llm.chat([USER], use_tqdm=False)
        llm.generate(["c"], SamplingParams(seed=-1), use_tqdm=False)
        llm.generate(["d"], SamplingParams(seed=77), use_tqdm=False)
        return [sampling.seed for sampling in offline.router.requests]

    assert seeds() == seeds(seed=0) != seeds(seed=1)
    assert len(set(seeds())) == 5
    assert seeds()[-1] == 77
    assert seeds(seed=None)[:4] != seeds(seed=None)[:4]


# ---- what comes out


def test_both_spellings_of_an_answer(make: MakeLLM) -> None:
    llm, offline = make("xyz")
    offline.router.told = PromptOutput("r", 0, num_cached_tokens=1)
    (output,) = llm.generate(["hi"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert isinstance(output, RequestOutput)
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("hi", ids("hi"), True)
    assert output.outputs[0].text == output.outputs.text == "xyz"
    assert output.outputs[0].token_ids == output.outputs.token_ids == ids("xyz")
    assert (output.outputs[0].index, output.outputs.index, output.outputs.send_idx) == (0, 0, 2)
    assert (output.outputs.finish_reason, output.outputs.stop_reason) == ("length", None)
    assert (output.outputs.reasoning_content, output.outputs.tool_calls) == (None, [])
    assert (output.outputs.logprobs, output.outputs.cumulative_logprob, output.prompt_logprobs) == (None, None, None)
    assert (output.num_cached_tokens, output.error_code, output.error_msg) == (1, 200, None)
    assert output.request_id.startswith("cmpl-")


def test_outputs_are_a_list_with_the_first_ones_attributes() -> None:
    outputs = CompletionOutputs([CompletionOutput(index=0, text="a"), CompletionOutput(index=1, text="b")])
    assert [each.text for each in outputs] == ["a", "b"]
    assert len(outputs) == 2
    assert outputs.text == "a"
    with pytest.raises(AttributeError, match="txt"):
        _ = outputs.txt


def test_several_answers_of_a_prompt(make: MakeLLM) -> None:
    llm, _ = make("xyz")
    one, two = llm.generate(["a", "b"], SamplingParams(n=3), use_tqdm=False)
    assert [each.index for each in one.outputs] == [each.index for each in two.outputs] == [0, 1, 2]
    assert one.request_id != two.request_id


def test_answers_come_in_the_order_of_the_input(make: MakeLLM) -> None:
    """The first to end is the last that was asked."""
    llm, offline = make("xyz")
    serve, ended = offline.router.serve, []
    gates: dict[int, Any] = {}

    async def last_first(order: Order, *args: Any, **origin: Any) -> AsyncIterator[TokenOutput]:
        import asyncio

        prompt = order.prompt_token_ids
        gates[prompt[0]] = asyncio.Event()
        if len(gates) == 5:
            gates[5].set()
        await asyncio.wait_for(gates[prompt[0]].wait(), 30)
        async for token in serve(order, *args, **origin):
            yield token
        ended.append(prompt[0])
        if prompt[0] > 1:
            gates[prompt[0] - 1].set()

    offline.router.serve = last_first  # type: ignore[method-assign, assignment]
    outputs = llm.generate([[n] for n in range(1, 6)], use_tqdm=False)
    assert ended == [5, 4, 3, 2, 1]
    assert [output.prompt_token_ids for output in outputs] == [[1], [2], [3], [4], [5]]


def test_logprobs_in_vllms_shape(make: MakeLLM) -> None:
    llm, offline = make("xy")
    offline.router.logprobs = {0: -0.5}
    offline.router.told = PromptOutput("r", 0, 0, [None, Logprobs(-1.5, 2, [(ids("z")[0], -0.25)])])
    params = SamplingParams(logprobs=1, prompt_logprobs=1)
    for output in (
        llm.generate("ab", params, use_tqdm=False)[0],
        llm.chat([USER], params, use_tqdm=False)[0],
    ):
        first = output.outputs.logprobs[0][ids("x")[0]]
        assert (first.logprob, first.rank, first.decoded_token) == (-0.5, 1, "x")
        assert output.outputs.cumulative_logprob == -1.0
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        second = output.prompt_logprobs[1]
        assert second is not None
        assert [(lp.logprob, lp.rank) for lp in second.values()] == [(-1.5, 2), (-0.25, 1)]
        assert second[ids("z")[0]].decoded_token == "z"


# ---- whose error is whose


def test_one_prompt_that_cannot_be_served_leaves_the_others_whole(
    make: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    llm, _ = make("xyz")
    prompts = [[1], [1] * LIMIT, [5000], [2], []]
    outputs = llm.generate(prompts, use_tqdm=False)
    assert [output.error_code for output in outputs] == [200, 400, 400, 200, 400]
    assert [output.outputs.text for output in outputs] == ["xyz", "", "", "xyz", ""]
    assert [output.outputs.finish_reason for output in outputs] == ["length", "error", "error", "length", "error"]
    assert all(output.finished for output in outputs)
    assert outputs[0].error_msg is None
    assert outputs[1].prompt_token_ids == prompts[1]
    for at, message in ((1, "maximum context length is 1000"), (2, "token ids must be in 0 to 319"), (4, "no tokens")):
        assert message in (outputs[at].error_msg or "")
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"3 of 5 requests failed: {outputs[1].error_msg}"
    ]


def test_a_guide_that_cannot_be_followed_hurts_its_own_prompt_only(make: MakeLLM) -> None:
    llm, _ = make("xyz")
    params = [SamplingParams(), SamplingParams(guided_decoding={"regex": "a("}), SamplingParams()]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [(output.error_code, output.outputs.text) for output in outputs] == [(200, "xyz"), (400, ""), (200, "xyz")]
    assert (outputs[1].error_msg or "").startswith("guided_regex: ")


def test_a_request_that_fails_on_its_way_hurts_only_itself(make: MakeLLM) -> None:
    llm, offline = make("xyz")
    serve = offline.router.serve

    async def failing(order: Order, *args: Any, **origin: Any) -> AsyncIterator[TokenOutput]:
        async for token in serve(order, *args, **origin):
            yield token
            if order.prompt_token_ids == [2]:
                raise InstanceLost("decode-0 died")

    offline.router.serve = failing  # type: ignore[method-assign, assignment]
    outputs = llm.generate([[1], [2], [3]], use_tqdm=False)
    assert [(o.error_code, o.error_msg) for o in outputs] == [(200, None), (500, "decode-0 died"), (200, None)]
    assert outputs[1].prompt_token_ids == [2]


def test_an_error_that_nobody_has_thought_of_hurts_only_its_request(
    make: MakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm, offline = make("xyz")
    complete = offline.service.complete

    async def failing(generations: list[Any]) -> Any:
        if generations[0].prompt_token_ids == [2]:
            raise KeyError("bug")
        return await complete(generations)

    monkeypatch.setattr(offline.service, "complete", failing)
    outputs = llm.generate([[1], [2], [3]], use_tqdm=False)
    assert [(o.error_code, o.error_msg) for o in outputs] == [(200, None), (500, "KeyError: 'bug'"), (200, None)]
    assert any(record.exc_info for record in caplog.records), "its place is told"


# ---- chat


def test_one_conversation_or_several(make: MakeLLM) -> None:
    llm, _ = make("xyz")
    (alone,) = llm.chat([SYSTEM, USER], use_tqdm=False)
    assert alone.prompt == "<|system|>be kind<|user|>hello<|assistant|>"
    assert alone.prompt_token_ids == ids(alone.prompt)
    assert (alone.outputs.text, alone.outputs[0].text) == ("xyz", "xyz")
    outputs = llm.chat([[SYSTEM, USER], [USER]], use_tqdm=False)
    assert [output.prompt for output in outputs] == [alone.prompt, "<|user|>hello<|assistant|>"]


def test_a_chats_own_template_and_its_switches(make: MakeLLM) -> None:
    llm, _ = make("xyz")
    (output,) = llm.chat([USER], use_tqdm=False, add_generation_prompt=False)
    assert output.prompt == "<|user|>hello"
    template = "{{ messages[0].content }}{% if enable_thinking %}!{% endif %}{% if add_generation_prompt %}?{% endif %}"
    for kwargs, wanted in (
        (None, "hello?"),
        ({"enable_thinking": True}, "hello!?"),
        ({"enable_thinking": 0}, "hello?"),
    ):
        (output,) = llm.chat([USER], use_tqdm=False, chat_template=template, chat_template_kwargs=kwargs)
        assert output.prompt == wanted
    messages = [USER, {"role": "assistant", "content": "well"}]
    (output,) = llm.chat(messages, use_tqdm=False, continue_final_message=True)
    assert output.prompt == "<|user|>hello<|assistant|>well"


@pytest.mark.parametrize(
    ("arguments", "chat", "num_ends"),
    [
        ({}, {}, 0),
        ({}, {"allow_control_tokens": True}, 1),
        ({"allow_control_tokens": True}, {}, 1),
        ({"allow_control_tokens": True}, {"allow_control_tokens": False}, 0),
    ],
)
def test_control_tokens_in_messages(
    make: MakeLLM, arguments: dict[str, Any], chat: dict[str, Any], num_ends: int
) -> None:
    llm, _ = make("xyz", **arguments)
    (output,) = llm.chat([{"role": "user", "content": "a<eos>b"}], use_tqdm=False, **chat)
    assert output.prompt == "<|user|>a<eos>b<|assistant|>"
    assert output.prompt_token_ids.count(EOS_ID) == num_ends
    (rendered,) = llm.generate("a<eos>b", use_tqdm=False)
    assert rendered.prompt_token_ids == ids("a<eos>b")


def test_parts_of_text_are_read_and_others_refused_by_name(make: MakeLLM) -> None:
    llm, offline = make("xyz")
    text = {"type": "text", "text": "hello"}
    (output,) = llm.chat([{"role": "user", "content": [text]}], use_tqdm=False)
    assert output.prompt == "<|user|>hello<|assistant|>"
    offline.router.requests.clear()
    for part in (IMAGE, VIDEO):
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]: only parts of type 'text'"):
            llm.chat([[USER], [{"role": "user", "content": [part, text]}]])
    assert offline.router.requests == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"messages": []}, "messages: empty"),
        ({"messages": [USER, [USER]]}, "messages: dicts and lists in one list"),
        ({"messages": "hello"}, "messages: str; must be a list"),
        ({"messages": [[USER], []]}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "", "content": "a"}]}, "messages.0.role: ''"),
        ({"messages": [USER], "lora_request": "x"}, "lora_request: 'x'; expected a LoRARequest"),
        ({"messages": [[USER]] * 2, "sampling_params": [SamplingParams()] * 3}, "sampling_params: 3 for 2 prompts"),
        (
            {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]},
            'tools: tool_choice "auto" needs a server that was started with --tool-call-parser',
        ),
    ],
)
def test_a_wrong_chat_is_an_error_before_any_work(make: MakeLLM, arguments: dict[str, Any], error: str) -> None:
    llm, offline = make("xyz")
    with pytest.raises(RequestError) as caught:
        llm.chat(**arguments)
    assert str(caught.value).startswith(error)
    assert offline.router.requests == []


def test_reasoning_is_told_apart_from_the_answer(make: MakeLLM) -> None:
    said = "<think>hm</think>yes"
    llm, _ = make(said, reasoning_parser="qwen3")
    (output,) = llm.chat([USER], use_tqdm=False)
    assert (output.outputs.text, output.outputs.reasoning_content) == ("yes", "hm")
    llm, _ = make(said)
    (output,) = llm.chat([USER], use_tqdm=False)
    assert (output.outputs.text, output.outputs.reasoning_content) == (said, None)


def test_calls_of_tools(make: MakeLLM) -> None:
    llm, offline = make('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', tool_call_parser="hermes")
    offline.router.last_reason = "stop"
    offline.router.token_ids.append(258)
    template = "{{ tools | length }}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    (output,) = llm.chat([USER], use_tqdm=False, tools=tools, chat_template=template)
    assert output.prompt == "1hello"
    (call,) = output.outputs.tool_calls
    assert (call["function"], output.outputs.text) == ({"name": "f", "arguments": '{"a": 1}'}, "")
    assert output.outputs.finish_reason == "tool_calls"


# ---- without a tokenizer


def test_ids_in_and_ids_out(make: MakeLLM) -> None:
    llm, offline = make("xyz", skip_tokenizer_init=True)
    (output,) = llm.generate(prompt_token_ids=[5, 6], use_tqdm=False)
    assert (output.prompt, output.outputs.text, output.outputs.token_ids) == (None, "", ids("xyz"))
    offline.router.requests.clear()
    with pytest.raises(RequestError, match="prompts: text, with skip_tokenizer_init"):
        llm.generate([{"prompt": "text"}])
    with pytest.raises(RequestError, match="messages: skip_tokenizer_init"):
        llm.chat([USER])
    assert offline.router.requests == []


# ---- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, num_requests: int, is_shown: bool = True) -> str:
    times = iter(range(1000))
    with Progress(num_requests, is_shown, out, lambda: float(next(times))) as progress:
        for _ in range(num_requests):
            progress.add(10, 6)
    return out.getvalue()


def test_a_bar_on_a_terminal() -> None:
    text = shown(Terminal(), 2)
    assert "2/2" in text.splitlines()[-1]
    assert "10.0 tokens/s in, 6.0 tokens/s out" in text


def test_plain_lines_elsewhere() -> None:
    assert shown(io.StringIO(), 2).splitlines() == [
        "Processed prompts: 1/2 [10.0 tokens/s in, 6.0 tokens/s out]",
        "Processed prompts: 2/2 [10.0 tokens/s in, 6.0 tokens/s out]",
    ]
    assert len(shown(io.StringIO(), 95).splitlines()) == 10


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class ClosedTerminal(ClosedPipe):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stderr", [None, ClosedPipe(), ClosedTerminal()])
def test_answers_do_not_need_anybody_who_reads_of_them(
    make: MakeLLM, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO | None
) -> None:
    """A program whose stderr was closed, such as a daemon's, or goes to a pipe that `head` has left."""
    llm, _ = make("xyz")
    monkeypatch.setattr(sys, "stderr", stderr)
    assert [output.outputs.text for output in llm.generate(["a", "b"])] == ["xyz", "xyz"]


def test_progress_only_where_it_is_wanted(make: MakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(Terminal(), 2, is_shown=False) == ""
    llm, _ = make("xyz")
    for ask in (lambda shows: llm.generate(["a"], use_tqdm=shows), lambda shows: llm.chat([USER], use_tqdm=shows)):
        ask(False)
        assert capsys.readouterr().err == ""
        ask(True)
        assert capsys.readouterr().err.startswith("Processed prompts: 1/1 [")
