"""Shows `LLM` of the documents with a real engine: prompts in every shape, chats, and their outputs."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import LLM, LoRARequest, RequestOutput, SamplingParams
from pd_cluster.errors import RequestError
from tests.support.checkpoints import make_tokenizer, reference_greedy
from tests.support.scripted_scenarios import FAMILIES

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
USER: dict[str, Any] = {"role": "user", "content": "hello"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "be kind"}
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.jpg"}}
VIDEO = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
MAX_MODEL_LEN = 256

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(model=str(path), max_model_len=MAX_MODEL_LEN, block_size=16, num_blocks=128) as made:
        yield made


def ids(text: str) -> list[int]:
    found: list[int] = make_tokenizer().encode(text).ids
    return found


def assert_answers(outputs: list[RequestOutput], path: Path, prompts: list[list[int]]) -> None:
    """Asserts that the outputs are the prompts', in order, each with the reference's answer."""
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs.token_ids for output in outputs] == [reference_greedy(path, each, 6)[:6] for each in prompts]


# ---- generate


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ("ab", ["ab"]),
        (["ab", "c", "ab"], ["ab", "c", "ab"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ({"prompt": "ab"}, ["ab"]),
        ({"prompt_token_ids": [5, 6]}, [[5, 6]]),
        ([{"prompt": "ab"}, {"prompt_token_ids": [7]}], ["ab", [7]]),
        (["ab", {"prompt": "c"}, [7]], ["ab", "c", [7]]),
    ],
)
@pytest.mark.parametrize("name", ["prompts", "inputs", "positional"])
def test_prompts_in_every_shape_are_answered(llm: LLM, path: Path, prompts: Any, wanted: list[Any], name: str) -> None:
    args, named = ((prompts,), {}) if name == "positional" else ((), {name: prompts})
    outputs = llm.generate(*args, sampling_params=GREEDY, use_tqdm=False, **named)
    assert [output.prompt for output in outputs] == [each if isinstance(each, str) else None for each in wanted]
    assert_answers(outputs, path, [ids(each) if isinstance(each, str) else each for each in wanted])


@pytest.mark.parametrize(("given", "wanted"), [([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])])
def test_token_ids_under_their_older_name_are_answered(llm: LLM, path: Path, given: Any, wanted: Any) -> None:
    assert_answers(llm.generate(prompt_token_ids=given, sampling_params=GREEDY, use_tqdm=False), path, wanted)


@pytest.mark.parametrize("is_chat", [False, True])
def test_one_parameter_for_all_or_one_for_each_is_honoured(llm: LLM, is_chat: bool) -> None:
    several: Any = [[USER]] * 3 if is_chat else ["hello"] * 3
    ask: Any = llm.chat if is_chat else llm.generate

    def lengths(params: Any) -> list[int]:
        return [len(output.outputs.token_ids) for output in ask(several, params, use_tqdm=False)]

    assert lengths(GREEDY) == [6, 6, 6]
    assert lengths([SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]) == [1, 2, 3]
    with pytest.raises(RequestError, match="sampling_params: 2 for 3 prompts"):
        lengths([GREEDY] * 2)
    drawn = {tuple(output.outputs.token_ids) for output in ask(several, None, use_tqdm=False)}
    assert len(drawn) == 3, "without parameters tokens are drawn"


def test_progress_is_a_bar_on_a_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        llm.generate(["a", "b"], GREEDY)
        terminal.flush()
        shown = ""
        while "2/2" not in shown and wait([ours], 10):  # it comes in parts
            shown += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "100%|" in shown
    assert "2/2" in shown


# ---- chat


def test_a_chat_is_its_templates_prompt(llm: LLM, path: Path) -> None:
    whole, short = "<|system|>be kind<|user|>hello<|assistant|>", "<|user|>hello<|assistant|>"
    (alone,) = outputs = llm.chat([SYSTEM, USER], GREEDY, use_tqdm=False)
    assert alone.prompt == whole
    assert_answers(outputs, path, [ids(whole)])
    outputs = llm.chat([[SYSTEM, USER], [USER]], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [whole, short]
    assert_answers(outputs, path, [ids(whole), ids(short)])


def test_parts_of_text_are_answered_and_others_refused(llm: LLM, path: Path) -> None:
    text = {"type": "text", "text": "hello"}
    outputs = llm.chat([{"role": "user", "content": [text]}], GREEDY, use_tqdm=False)
    assert_answers(outputs, path, [ids("<|user|>hello<|assistant|>")])
    for part in (IMAGE, VIDEO):
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]: only parts of type 'text'"):
            llm.chat([{"role": "user", "content": [part, text]}], GREEDY, use_tqdm=False)
    for data, said in (
        ({"image": ["x"]}, r"image\[0\]: str; must be a PIL"),
        ({"video": ["x"]}, r"video\[0\]: str; must be bytes of a file"),
        ({"audio": ["x"]}, "audio: only images and videos are supported"),
    ):
        with pytest.raises(RequestError, match=rf"multimodal_data.*{said}"):
            llm.generate({"prompt": "a", "multimodal_data": data}, GREEDY, use_tqdm=False)
    (answer,) = llm.generate({"prompt": "a", "multimodal_data": {"video": b"x"}}, GREEDY, use_tqdm=False)
    assert answer.error_msg == "multi_modal_data.video[0]: this model takes no images or videos; leave them out"


def test_a_template_of_the_call_and_its_variables(llm: LLM, path: Path) -> None:
    template = "{{ messages[0].content }}{% if loud %}!{% endif %}{% if add_generation_prompt %}?{% endif %}"
    for options, prompt in (
        ({"add_generation_prompt": False}, "<|user|>hello"),
        ({"chat_template": template}, "hello?"),
        ({"chat_template": template, "add_generation_prompt": False}, "hello"),
        ({"chat_template": template, "chat_template_kwargs": {"loud": True}}, "hello!?"),
    ):
        outputs = llm.chat([USER], GREEDY, use_tqdm=False, **options)  # type: ignore[arg-type]
        assert_answers(outputs, path, [ids(prompt)])


def test_generate_thinks_as_the_model_does(tmp_path: Path) -> None:
    """`generate` splits no reasoning off and has no switch for it; a chat of the same model splits it off."""
    family = FAMILIES["qwen3"]
    model = str(family.make(tmp_path))
    talk = family.ask(tmp_path, "reasoning, content", [USER])
    with LLM(model, max_model_len=4096, reasoning_parser="qwen3") as llm:
        (chatted,) = llm.chat(talk, use_tqdm=False)
        assert chatted.outputs.reasoning_content
        params = SamplingParams(max_tokens=400)
        (continued,) = llm.generate(chatted.prompt, params, use_tqdm=False)
        assert continued.outputs.token_ids == chatted.outputs.token_ids
        assert continued.outputs.reasoning_content is None
        assert chatted.outputs.reasoning_content in continued.outputs.text
        with pytest.raises(TypeError, match="chat_template_kwargs"):
            llm.generate("a", chat_template_kwargs={"enable_thinking": False})  # type: ignore[call-arg]


# ---- what comes out


def test_the_fields_of_an_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, allowed_token_ids=ids("abcdefgh"))
    one, two = llm.generate(["hi", "ho"], params, use_tqdm=False)
    assert (one.prompt, one.prompt_token_ids, one.finished) == ("hi", ids("hi"), True)
    assert one.request_id
    assert one.request_id != two.request_id
    assert (one.error_code, one.error_msg) == (200, None)
    assert len(one.outputs.text) == 6
    assert ids(one.outputs.text) == one.outputs.token_ids == one.outputs[0].token_ids
    assert one.outputs.text == one.outputs[0].text
    assert one.outputs.send_idx == 5, "that of the last token, from 0"
    assert one.outputs.reasoning_content is None
    (several,) = llm.generate(["hi"], SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    assert [each.index for each in several.outputs] == [0, 1, 2]


def test_an_error_is_its_own_prompts(llm: LLM, path: Path) -> None:
    prompts = [[1], [1] * MAX_MODEL_LEN, [5000], [2]]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.error_code for output in outputs] == [200, 400, 400, 200]
    assert all(output.finished for output in outputs)
    assert f"maximum context length is {MAX_MODEL_LEN}" in (outputs[1].error_msg or "")
    assert "token ids must be in 0 to 319" in (outputs[2].error_msg or "")
    assert [output.outputs.finish_reason for output in outputs[1:3]] == ["error", "error"]
    assert_answers([outputs[0], outputs[3]], path, [[1], [2]])


def test_an_engine_without_adapters_refuses_one(llm: LLM) -> None:
    request = LoRARequest("x", 1, "/x")
    with pytest.raises(RequestError, match=r"^lora_request: 'x': needs LLM\(…, enable_lora=True\)"):
        llm.generate("a", GREEDY, use_tqdm=False, lora_request=request)
    with pytest.raises(RequestError, match=r"^lora_request: 'x': needs LLM\(…, enable_lora=True\)"):
        llm.chat([USER], GREEDY, use_tqdm=False, lora_request=request)
