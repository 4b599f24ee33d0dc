"""`LLM` with a real engine: the documents' examples with another model, and options that involve the engine.

In each example only the import and the model's path are changed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import LLM, SamplingParams
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.devices.kinds import DeviceKind
from pd_cluster.errors import ModelError
from pd_cluster.model import loader
from pd_cluster.model.loader import resolve_dtype
from tests.support.checkpoints import reference_greedy
from tests.support.scripted_scenarios import FAMILIES

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9], list(range(20, 60)), [1, 2]]
SCHEMA = {"type": "object", "properties": {"size": {"type": "integer", "maximum": 99}}, "required": ["size"]}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(checkpoint: Any) -> Path:
    """Long enough for the examples."""
    folder: Path = checkpoint("llama", max_position_embeddings=8192)
    return folder


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(model=str(path), max_model_len=512, block_size=4, num_blocks=600, max_num_seqs=4) as made:
        yield made


# ---- the documents' examples


def test_the_example_of_a_chat(path: Path) -> None:
    PATH = str(path)
    msg1 = [
        {"role": "system", "content": "I'm a helpful AI assistant."},
        {"role": "user", "content": "把李白的静夜思改写为现代诗"},
    ]
    msg2 = [
        {"role": "system", "content": "I'm a helpful AI assistant."},
        {"role": "user", "content": "Write me a poem about large language model."},
    ]
    messages = [msg1, msg2]
    sampling_params = SamplingParams(top_p=0.95, max_tokens=6400)
    llm = LLM(model=PATH, tensor_parallel_size=1, max_model_len=8192)
    outputs = llm.chat(messages, sampling_params)
    assert len(outputs) == 2
    for output, message in zip(outputs, messages, strict=True):
        prompt = output.prompt
        generated_text = output.outputs.text
        assert prompt is not None
        assert message[1]["content"] in prompt
        assert generated_text
        assert output.outputs.finish_reason == "stop", "the checkpoint draws its end of sequence long before 6400"
        assert output.outputs[0].text == generated_text
    llm.close()


def test_the_example_of_a_continuation(path: Path) -> None:
    PATH = str(path)
    prompts = ["User: 帮我写一篇关于深圳文心公园的500字游记和赏析。\nAssistant: 好的。"]
    sampling_params = SamplingParams(top_p=0.95, max_tokens=6400)
    llm = LLM(model=PATH, tensor_parallel_size=1, max_model_len=8192)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs.text
        assert prompt == prompts[0], "nothing was added to it"
        assert output.prompt_token_ids == list(llm._offline.service.tokenizer.encode(prompts[0]))
        assert generated_text
    llm.close()


@pytest.mark.parametrize("parser", ["qwen3", "ernie-45-vl"])
def test_the_example_of_a_thinking_model(tmp_path: Path, parser: str) -> None:
    family = FAMILIES["qwen3"]
    PATH = str(family.make(tmp_path))
    question = [{"role": "user", "content": "Is it sunny?"}]
    with LLM(model=PATH, tensor_parallel_size=1, max_model_len=4096, reasoning_parser=parser) as llm:
        outputs = llm.chat(messages=family.ask(tmp_path, "reasoning, content", question))
        for output in outputs:
            assert output.outputs.text.strip() == "It shines."
            assert output.outputs.reasoning_content.strip() == "They ask for the sun."
        outputs = llm.chat(
            messages=family.ask(tmp_path, "content", question, enable_thinking=False),
            chat_template_kwargs={"enable_thinking": False},
        )
        for output in outputs:
            assert output.prompt is not None
            assert output.prompt.endswith("<think>\n\n</think>\n\n")
            assert output.outputs.text == "It is sunny in Zürich. ☀"
            assert output.outputs.reasoning_content is None


# ---- what the engine has a hand in


def test_greedy_is_what_transformers_generates(llm: LLM, path: Path) -> None:
    """More prompts than the engine has places for: they are put in as others leave."""
    prompts = PROMPTS * 3
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs.token_ids for output in outputs] == [
        reference_greedy(path, prompt, 12)[:12] for prompt in prompts
    ]


def test_seeds_make_it_the_same_again(path: Path) -> None:
    def texts(**arguments: Any) -> list[str]:
        with LLM(str(path), max_model_len=128, num_blocks=64, **arguments) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(n=2), use_tqdm=False)
            return [each.text for output in outputs for each in output.outputs]

    assert texts() == texts(seed=0) != texts(seed=1)


def test_common_beginnings_are_computed_once(llm: LLM) -> None:
    prompt = [7] * 41
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
    assert first.outputs.token_ids == second.outputs.token_ids


def test_nothing_is_cached_where_it_is_not_wanted(path: Path) -> None:
    with LLM(str(path), max_model_len=128, num_blocks=64, enable_prefix_caching=False) as llm:
        outputs = [llm.generate([7] * 41, GREEDY, use_tqdm=False)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]


def test_the_metrics_of_a_request_are_in_order(llm: LLM) -> None:
    before_s = time.time()
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    metrics, after_s = output.metrics, time.time()
    assert metrics is not None
    assert metrics.inference_start_time is not None
    assert metrics.finished_time is not None
    assert metrics.first_token_time is not None
    assert metrics.time_in_queue is not None
    assert metrics.model_forward_time is not None
    assert metrics.model_execute_time is not None
    arrived_s = metrics.arrival_time
    assert before_s <= arrived_s <= metrics.inference_start_time <= arrived_s + metrics.first_token_time
    assert arrived_s + metrics.first_token_time <= metrics.finished_time <= after_s + 0.1  # two clocks' drift
    assert metrics.first_scheduled_time == metrics.inference_start_time
    assert metrics.time_in_queue == pytest.approx(metrics.inference_start_time - arrived_s, abs=1e-3)
    assert metrics.time_in_queue + metrics.model_forward_time == pytest.approx(metrics.model_execute_time, abs=1e-3)


def test_min_tokens_bad_words_and_logprobs(llm: LLM, path: Path) -> None:
    wanted = reference_greedy(path, [9], 4)
    (output,) = llm.generate([9], SamplingParams(temperature=0, max_tokens=4, logprobs=2), use_tqdm=False)
    assert output.outputs.token_ids == wanted
    assert [max(each, key=lambda i, of=each: of[i].logprob) for each in output.outputs.logprobs] == wanted
    letters = llm._offline.service.tokenizer.encode("ab")
    params = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=letters)
    (free,) = llm.generate([9], params, use_tqdm=False)
    params.bad_words = [free.outputs.text[0]]
    (output,) = llm.generate([9], params, use_tqdm=False)
    assert output.outputs.text == 4 * ("b" if free.outputs.text[0] == "a" else "a")
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=20, logit_bias={258: 100})
    (output,) = llm.generate([9], params, use_tqdm=False)
    assert len(output.outputs.token_ids) == 20


def test_a_guide_is_followed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=100, seed=1)
    options = {"guided_json": SCHEMA}
    for output in llm.generate(["a", "b"], params, use_tqdm=False, guided_options_request=options):
        assert output.outputs.finish_reason == "stop"
        assert json.loads(output.outputs.text)["size"] <= 99


def test_an_answer_ends_where_the_context_does(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6400, ignore_eos=True)
    (output,) = llm.generate([5] * 500, params, use_tqdm=False)
    assert (output.outputs.finish_reason, len(output.outputs.token_ids)) == ("length", 12)
    params = SamplingParams(max_tokens=505, ignore_eos=True, max_tokens_includes_prompt=True)
    (output,) = llm.generate([5] * 500, params, use_tqdm=False)
    assert (output.outputs.finish_reason, len(output.outputs.token_ids)) == ("length", 5)


@pytest.mark.parametrize(("kind", "wanted"), [("cpu", "float32"), ("cuda", "bfloat16"), ("npu", "bfloat16")])
def test_auto_is_the_checkpoints_dtype_but_on_the_cpu(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: DeviceKind, wanted: str
) -> None:
    """On a processor without products in bfloat16; test_bf16_cpu has the others."""
    monkeypatch.setattr(loader, "multiplies_bf16", lambda: False)
    checkpoint = Checkpoint.open(str(copied(path, tmp_path, dtype=None, torch_dtype="bfloat16")))
    assert resolve_dtype("auto", checkpoint, Device(kind)) == wanted


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_precisions_are_honoured(path: Path, dtype: str) -> None:
    with LLM(str(path), dtype=dtype, max_model_len=64, num_blocks=16) as llm:
        (instance,) = llm._offline.service.router.membership.instances
        assert instance.info is not None
        assert instance.info.layout is not None
        assert instance.info.layout.dtype == dtype
        (output,) = llm.generate([9], GREEDY, use_tqdm=False)
    assert len(output.outputs.token_ids) == 12


def test_no_code_of_a_model_folder_is_run(path: Path, tmp_path: Path) -> None:
    """This holds even if its config asks for it."""
    folder = copied(path, tmp_path, auto_map={"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"})
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')")
    for trusts in (False, True):
        with LLM(str(folder), trust_remote_code=trusts, max_model_len=64, num_blocks=16) as llm:
            (output,) = llm.generate([9], GREEDY, use_tqdm=False)
        assert output.outputs.token_ids == reference_greedy(path, [9], 12)[:12]
    assert not (tmp_path / "was run").exists()


def test_the_config_says_whether_weights_are_quantised(path: Path, tmp_path: Path) -> None:
    """Nothing has to be said for that: where it says so, plain weights are a contradiction."""
    folder = copied(path, tmp_path, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ModelError, match=r"config\.json: quantization_config: awq, but no tensor is quantized"):
        LLM(str(folder), max_model_len=64, num_blocks=16)


def copied(path: Path, to: Path, **config: Any) -> Path:
    folder = to / "model"
    shutil.copytree(path, folder)
    (folder / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | config))
    return folder


@pytest.mark.slow
def test_prefill_and_decode_in_processes_of_their_own(path: Path) -> None:
    with LLM(str(path), max_model_len=512, num_blocks=128, prefill=1, decode=1) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [output.outputs.token_ids for output in outputs] == [
        reference_greedy(path, prompt, 12)[:12] for prompt in PROMPTS
    ]
    assert all(output.metrics and output.metrics.time_in_queue is not None for output in outputs)
