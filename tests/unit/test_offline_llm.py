"""`LLM` over a router that plays back tokens: inputs, outputs, their order, and the attribution of errors."""

from __future__ import annotations

import inspect
import io
import logging
import subprocess
import sys
from typing import Any

import pytest

import pd_cluster
from pd_cluster import LLM, SamplingParams
from pd_cluster.errors import InstanceLost, RequestError
from pd_cluster.offline.llm_adapters import LoRARequest
from pd_cluster.types import Logprobs, PromptOutput
from tests.support.checkpoints import EOS_ID, make_tokenizer
from tests.support.offline import LIMIT, MakeLLM, fake_llms

USER: dict[str, Any] = {"role": "user", "content": "hello"}


make = pytest.fixture(fake_llms)


def ids(text: str) -> list[int]:
    found: list[int] = make_tokenizer().encode(text).ids
    return found


# ---- importing


def test_the_package_has_the_names_and_stays_light() -> None:
    """The package exports the names lazily, so processes that do not use them do not import their dependencies."""
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


def test_wrong_input_is_an_error_before_any_work(make: MakeLLM) -> None:
    llm, offline = make("xyz")
    for arguments, error in (
        ({}, "prompts: "),
        ({"prompts": "a", "inputs": "b"}, "prompts: 'a': inputs are also given"),
        ({"prompts": ["a", 1]}, "prompts: ints in the list"),
        ({"prompts": [1, True]}, "prompts[1]: True "),
        ({"prompts": 5}, "prompts: int; "),
        ({"prompts": ["a", "\ud800"]}, "prompts[1]: '\\ud800': half a character"),
        ({"prompts": {"prompt": 5}}, "prompts.prompt: int; "),
        ({"prompts": "a", "lora_request": "x"}, "lora_request: 'x'; "),
        ({"prompts": "a", "lora_request": LoRARequest("a", 0, "/a")}, "lora_request.lora_int_id: 0; "),
        ({"prompts": "a", "prompt_adapter_request": "x"}, "prompt_adapter_request: 'x'; "),
        ({"prompts": ["a"], "sampling_params": [{"n": 1}]}, "sampling_params[0]: dict; "),
    ):
        with pytest.raises(RequestError) as caught:
            llm.generate(**arguments)
        assert str(caught.value).startswith(error)
    assert offline.router.requests == []


def test_the_parameters_of_the_documents_and_no_switch_for_thinking() -> None:
    found = " ".join(inspect.signature(LLM.generate).parameters)
    documented = "self prompts sampling_params prompt_token_ids use_tqdm lora_request prompt_adapter_request"
    assert found.startswith(f"{documented} guided_options_request ")
    assert "chat_template_kwargs" not in found
    found = " ".join(inspect.signature(LLM.chat).parameters)
    assert found.startswith("self messages sampling_params use_tqdm lora_request chat_template add_generation_prompt ")


# ---- parameters beside prompts


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


# ---- outputs


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


# ---- attribution of errors


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
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"3 of 5 requests failed: {outputs[1].error_msg}"
    ]


def test_a_guide_that_cannot_be_followed_hurts_its_own_prompt_only(make: MakeLLM) -> None:
    llm, _ = make("xyz")
    params = [SamplingParams(), SamplingParams(guided_decoding={"regex": "a("}), SamplingParams()]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [(output.error_code, output.outputs.text) for output in outputs] == [(200, "xyz"), (400, ""), (200, "xyz")]
    assert (outputs[1].error_msg or "").startswith("guided_regex: ")


def test_a_request_that_fails_on_its_way_hurts_only_itself(
    make: MakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers an expected failure and an unexpected exception."""
    llm, offline = make("xyz")
    complete = offline.service.complete
    failures = {2: InstanceLost("decode-0 died"), 3: KeyError("bug")}

    async def failing(generations: list[Any]) -> Any:
        found = await complete(generations)
        if failure := failures.get(generations[0].prompt_token_ids[0]):
            raise failure
        return found

    monkeypatch.setattr(offline.service, "complete", failing)
    outputs = llm.generate([[1], [2], [3], [4]], use_tqdm=False)
    assert [(o.error_code, o.error_msg) for o in outputs] == [
        *((200, None), (500, "decode-0 died"), (500, "KeyError: 'bug'"), (200, None))
    ]
    assert outputs[1].prompt_token_ids == [2]
    assert any(record.exc_info for record in caplog.records), "the log must have the traceback"


# ---- chat


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


def test_a_wrong_chat_is_an_error_before_any_work(make: MakeLLM) -> None:
    llm, offline = make("xyz")
    tools = [{"type": "function", "function": {"name": "f"}}]
    for arguments, error in (
        ({"messages": []}, "messages: empty"),
        ({"messages": [USER, [USER]]}, "messages: dicts and lists in one list"),
        ({"messages": [[USER], []]}, "messages: "),
        ({"messages": [{"role": "", "content": "a"}]}, "messages.0.role: ''"),
        ({"messages": [[USER]] * 2, "sampling_params": [SamplingParams()] * 3}, "sampling_params: 3 for 2 prompts"),
        ({"messages": [USER], "tools": tools}, 'tools: tool_choice "auto" '),
    ):
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


# ---- progress


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
    """Covers a closed stderr, as a daemon's, and a pipe whose reader has gone."""
    llm, _ = make("xyz")
    monkeypatch.setattr(sys, "stderr", stderr)
    assert [output.outputs.text for output in llm.generate(["a", "b"])] == ["xyz", "xyz"]
