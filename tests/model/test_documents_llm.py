"""The documents' `LLM` with a real engine: prompts in every form, chats, outputs, and each argument."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import LLM, LoRARequest, RequestOutput, SamplingParams
from pd_cluster.devices.device import Device
from pd_cluster.devices.device_kinds import DeviceKind
from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.model.planning.pool_sizing import check_offload
from pd_cluster.text.tokenizer import Tokenizer
from tests.support.checkpoints import make_tokenizer, reference_greedy
from tests.support.copies import copy_of
from tests.support.scripted_scenarios import FAMILIES
from tests.support.watched import watching

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
    """Asserts that outputs are in the prompts' order, each with the reference's answer."""
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
def test_prompts_in_every_shape_are_answered(llm: LLM, path: Path, prompts: Any, wanted: list[Any]) -> None:
    """Prompts are passed by position and by each name, including the older name for token ids."""
    ways: list[tuple[Any, dict[str, Any]]] = [((prompts,), {}), ((), {"prompts": prompts}), ((), {"inputs": prompts})]
    if all(isinstance(each, list) for each in wanted) and isinstance(prompts, list):
        ways.append(((), {"prompt_token_ids": prompts}))
    for args, named in ways:
        outputs = llm.generate(*args, sampling_params=GREEDY, use_tqdm=False, **named)
        assert [output.prompt for output in outputs] == [each if isinstance(each, str) else None for each in wanted]
        assert_answers(outputs, path, [ids(each) if isinstance(each, str) else each for each in wanted])


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
    assert len(drawn) == 3, "without parameters tokens must be sampled"


def test_progress_is_a_bar_on_a_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        llm.generate(["a", "b"], GREEDY)
        terminal.flush()
        shown = ""
        while "2/2" not in shown and wait([ours], 10):  # the output arrives in parts
            shown += os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "100%|" in shown
    assert "2/2" in shown


# ---- chat


def test_a_chat_is_its_templates_prompt(llm: LLM, path: Path) -> None:
    """Uses the folder's template, or the call's with its variables; text parts are joined as text."""
    whole, short = "<|system|>be kind<|user|>hello<|assistant|>", "<|user|>hello<|assistant|>"
    outputs = llm.chat([[SYSTEM, USER], [USER]], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == [whole, short]
    assert_answers(outputs, path, [ids(whole), ids(short)])
    template = "{{ messages[0].content }}{% if loud %}!{% endif %}{% if add_generation_prompt %}?{% endif %}"
    parts = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        ([SYSTEM, USER], {}, whole),
        ([parts], {}, short),
        ([USER], {"add_generation_prompt": False}, "<|user|>hello"),
        ([USER], {"chat_template": template}, "hello?"),
        ([USER], {"chat_template": template, "add_generation_prompt": False}, "hello"),
        ([USER], {"chat_template": template, "chat_template_kwargs": {"loud": True}}, "hello!?"),
    ]
    for messages, options, prompt in cases:
        outputs = llm.chat(messages, GREEDY, use_tqdm=False, **options)
        assert_answers(outputs, path, [ids(prompt)])


def test_parts_that_are_no_text_are_refused(llm: LLM) -> None:
    for part in (IMAGE, VIDEO):
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]: only parts of type 'text'"):
            llm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)
    for kind, said in (("image", r"\[0\]: str; must be a PIL"), ("audio", ": only images and videos are supported")):
        with pytest.raises(RequestError, match=rf"multimodal_data.*{kind}{said}"):
            llm.generate({"prompt": "a", "multimodal_data": {kind: ["x"]}}, GREEDY, use_tqdm=False)
    (answer,) = llm.generate({"prompt": "a", "multimodal_data": {"video": b"x"}}, GREEDY, use_tqdm=False)
    assert answer.error_msg == "multi_modal_data.video[0]: this model takes no images or videos; leave them out"


# ---- outputs


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
    assert one.outputs.send_idx == 5, "expected the last token's index"
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
    for ask, prompt in ((llm.generate, "a"), (llm.chat, [USER])):
        with pytest.raises(RequestError, match=r"^lora_request: 'x': needs LLM\(…, enable_lora=True\)"):
            ask(prompt, GREEDY, use_tqdm=False, lora_request=request)  # type: ignore[arg-type]


@pytest.mark.parametrize("parser", ["qwen3", "ernie-45-vl"])
def test_the_example_of_a_thinking_model(tmp_path: Path, parser: str) -> None:
    """A chat separates reasoning; `generate`, which has no option for it, does not."""
    family = FAMILIES["qwen3"]
    PATH = str(family.make(tmp_path))
    question = [{"role": "user", "content": "Is it sunny?"}]
    with LLM(model=PATH, tensor_parallel_size=1, max_model_len=4096, reasoning_parser=parser) as llm:
        (output,) = llm.chat(messages=family.ask(tmp_path, "reasoning, content", question))
        assert output.outputs.text.strip() == "It shines."
        assert output.outputs.reasoning_content.strip() == "They ask for the sun."
        (continued,) = llm.generate(output.prompt, SamplingParams(max_tokens=400), use_tqdm=False)
        assert continued.outputs.token_ids == output.outputs.token_ids
        assert continued.outputs.reasoning_content is None
        assert output.outputs.reasoning_content in continued.outputs.text
        with pytest.raises(TypeError, match="chat_template_kwargs"):
            llm.generate("a", chat_template_kwargs={"enable_thinking": False})  # type: ignore[call-arg]
        (output,) = llm.chat(
            messages=family.ask(tmp_path, "content", question, enable_thinking=False),
            chat_template_kwargs={"enable_thinking": False},
        )
        assert output.prompt is not None
        assert output.prompt.endswith("<think>\n\n</think>\n\n")
        assert output.outputs.text == "It is sunny in Zürich. ☀"
        assert output.outputs.reasoning_content is None


def test_seeds_make_it_the_same_again(path: Path) -> None:
    def texts(**arguments: Any) -> list[str]:
        with LLM(str(path), max_model_len=128, num_blocks=64, **arguments) as llm:
            outputs = llm.generate([[5, 6], [9]], SamplingParams(n=2), use_tqdm=False)
            return [each.text for output in outputs for each in output.outputs]

    assert texts() == texts(seed=0) != texts(seed=1)


def test_the_metrics_of_a_request_are_in_order(llm: LLM) -> None:
    before_s = time.time()
    (output,) = llm.generate([5, 6, 7, 8], GREEDY, use_tqdm=False)
    metrics, after_s = output.metrics, time.time()
    assert metrics is not None
    begun_s, ended_s, arrived_s = metrics.inference_start_time, metrics.finished_time, metrics.arrival_time
    queue_s, forward_s, execute_s = metrics.time_in_queue, metrics.model_forward_time, metrics.model_execute_time
    assert begun_s is not None
    assert ended_s is not None
    assert metrics.first_token_time is not None
    assert before_s <= arrived_s <= begun_s <= arrived_s + metrics.first_token_time
    assert arrived_s + metrics.first_token_time <= ended_s <= after_s + 0.1  # allows for the drift of two clocks
    assert metrics.first_scheduled_time == begun_s
    assert queue_s is not None
    assert forward_s is not None
    assert queue_s == pytest.approx(begun_s - arrived_s, abs=1e-3)
    assert queue_s + forward_s == pytest.approx(execute_s, abs=1e-3)


# ---- arguments of LLM


def test_the_logged_number_of_blocks_is_the_caches(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It follows from kv_cache_memory, or from gpu_memory_utilization, on a CPU a share of the host's memory."""
    num_tokens = []
    cases: list[dict[str, Any]] = [{"kv_cache_memory": 0.01, "block_size": size} for size in (32, 64)]
    cases += [{"gpu_memory_utilization": share, "block_size": 64} for share in (0.0005, 0.002)]
    for case in cases:
        with (
            caplog.at_level(logging.INFO, "pd_cluster.offline.offline_llm"),
            watching() as made,
            LLM(str(path), max_model_len=MAX_MODEL_LEN, **case) as llm,
        ):
            (output,) = llm.generate(["ab"], GREEDY, use_tqdm=False)
            assert len(output.outputs.token_ids) == 6
            pool = made[0].runner.pool
        assert pool.layout.block_size == case["block_size"]
        assert f"engine: {pool.num_blocks} KV cache blocks of {case['block_size']} tokens" in caplog.messages
        num_tokens.append(pool.num_blocks // (64 // case["block_size"]))
    assert num_tokens[0] == num_tokens[1], "blocks of twice the size must be half as many"
    assert num_tokens[3] == pytest.approx(4 * num_tokens[2], rel=0.4), "other programs may have taken memory meanwhile"


def test_what_changes_nothing_here_leaves_the_answers_as_they_are(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Passes every value that requests nothing, or has no effect on this engine."""
    nothing: dict[str, Any] = {
        "tokenizer_mode": "auto",
        "trust_remote_code": False,
        "quantization": None,
        "swap_space": 0,
    }
    nothing |= {"cpu_offload_gb": 2, "max_context_len_to_capture": 99, "enforce_eager": True, "port": 9001}
    nothing |= {"disable_custom_all_reduce": True, "disable_async_output_proc": True, "metrics_port": 9002}
    with LLM(str(path), max_model_len=MAX_MODEL_LEN, num_blocks=64, **nothing) as llm:
        outputs = llm.generate(["ab"], GREEDY, use_tqdm=False)
    (output,) = outputs
    assert output.outputs.token_ids == reference_greedy(path, output.prompt_token_ids, 6)[:6]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    for said in (
        *("disable_async_output_proc", "disable_custom_all_reduce", "dtype", "metrics_port", "port"),
        "--cpu-offload-gb 2 changes nothing: on CPUs all weights are in host memory",
        "max_context_len_to_capture is the older name of max_seq_len_to_capture, which takes precedence",
    ):
        assert len([message for message in told if message.startswith(said + " ") or message == said]) == 1, told


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_cpu_offload_gb_is_refused_on_accelerators(kind: DeviceKind) -> None:
    with pytest.raises(ConfigError, match="--cpu-offload-gb 2: weights stay on the device; remove it, and give"):
        check_offload(2, Device(kind))


def test_arguments_of_the_engine_act(path: Path) -> None:
    """Arguments limit a step's sequences and tokens, size the pool, and switch the prefix cache."""
    prompts = [list(range(5 * at, 5 * at + 40)) for at in range(6)]
    wanted = [reference_greedy(path, prompt, 6)[:6] for prompt in prompts]
    for caches in (True, False):
        sizes: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 50, "num_gpu_blocks_override": 70}
        sizes |= {"block_size": 8, "enable_prefix_caching": caches, "max_model_len": 200, "max_logprobs": 2}
        with watching() as made, LLM(str(path), **sizes) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                assert [output.outputs.token_ids for output in outputs] == wanted
            assert {output.num_cached_tokens for output in outputs} == {32 if caches else 0}
            (output,) = llm.generate(["a"], SamplingParams(logprobs=3), use_tqdm=False)
            assert (output.error_msg or "").startswith("logprobs: 3 is more than this server's 2")
            (output,) = llm.generate([7] * 198, SamplingParams(ignore_eos=True, max_tokens=9), use_tqdm=False)
            assert len(output.outputs.token_ids) == 2, "max_model_len must limit it"
            pool = made[0].runner.pool
        assert (max(made[0].num_seqs), max(made[0].num_tokens)) == (3, 50)
        assert (pool.layout.block_size, pool.num_blocks) == (8, 70)
        assert (made[0].scheduler.num_prefix_hit_tokens > 0) == caches


def test_swap_space_holds_requests_with_several_candidates(path: Path) -> None:
    """In a too small pool, preemption_mode "swap" moves candidates out; without it swap space 0 suffices."""
    params = SamplingParams(n=2, best_of=4, seed=3, max_tokens=40, ignore_eos=True)
    answers, num_moves, room = [], [], []
    for swap_space, mode in ((0.001, "swap"), (0.002, "swap"), (0, "recompute")):
        sizes: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_model_len": 100}
        with watching() as made, LLM(str(path), swap_space=swap_space, preemption_mode=mode, **sizes) as llm:
            outputs = llm.generate([[5] * 20, [6] * 20], params, use_tqdm=False)
            (one,) = llm.generate([[7]], GREEDY, use_tqdm=False)
            room.append(made[0].runner.swap.num_blocks)
        assert one.outputs.token_ids == reference_greedy(path, [7], 6)[:6]
        answers.append([each.token_ids for output in outputs for each in output.outputs])
        num_moves.append(sum(made[0].num_moves))
    assert answers[0] == answers[1] == answers[2]
    assert room[0] > 0
    assert room[1] == pytest.approx(2 * room[0], abs=1)
    assert room[2] == 0
    assert num_moves[0] > num_moves[2], "forks must move blocks, too"


ENGINE_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"quantization": "int3"}, "quantization 'int3': expected one of awq, gptq"),
    ({"cpu_offload_gb": -2}, "cpu_offload_gb -2"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization 1.5: must be in 0 to 1"),
    ({"enable_mm": True}, "enable_mm: "),
    ({"kv_cache_ratio": 0.6}, "kv_cache_ratio 0.6: blocks are not divided between prompts and answers"),
    ({"max_model_length": 9}, "max_model_length: unknown argument; did you mean max_model_len?"),
    ({"structured_outputs_config": {"no": 1}}, "structured_outputs_config: "),
]


@pytest.mark.parametrize(("arguments", "error"), ENGINE_ARGUMENTS)
def test_a_real_model_is_refused_what_it_cannot_have(path: Path, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(path), **arguments)
    assert str(caught.value).startswith(error)


def test_no_code_of_a_model_folder_is_run(path: Path, tmp_path: Path) -> None:
    """Code in a model folder is not run, even if the config requests it."""
    own = {"auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}}
    folder = copy_of(path, tmp_path, {"config.json": own})
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')")
    for trusts in (False, True):
        with LLM(str(folder), trust_remote_code=trusts, max_model_len=64, num_blocks=16) as llm:
            (output,) = llm.generate([9], GREEDY, use_tqdm=False)
        assert output.outputs.token_ids == reference_greedy(path, [9], 6)[:6]
    assert not (tmp_path / "was run").exists()


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_compact_json_and_variables_of_the_template(path: Path) -> None:
    tokenizer = Tokenizer(path)
    with LLM(
        model=str(path),
        max_model_len=256,
        num_blocks=64,
        chat_template="{{ mood | default('no mood') }}:{{ messages[0].content }}",
        default_chat_template_kwargs={"mood": "glad"},
        structured_outputs_config={"disable_any_whitespace": True},
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=60)
        guided = llm.generate(["a"], params, use_tqdm=False, guided_options_request={"guided_json": SCHEMA})
        assert guided[0].outputs[0].text in ('{"a":1,"b":3}', '{"a":2,"b":3}')
        message = [{"role": "user", "content": "Hi"}]
        for variables, text in ((None, "glad:Hi"), ({"mood": "sad"}, "sad:Hi")):
            (answer,) = llm.chat(message, params, use_tqdm=False, chat_template_kwargs=variables)
            assert answer.prompt_token_ids is not None
            shown = tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=True)
            assert shown.removesuffix("\n").endswith(text)
