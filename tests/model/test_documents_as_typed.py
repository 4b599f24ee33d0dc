"""The examples of the offline documents as they are typed, with only import line and model path changed, and each
documented call with its arguments in the document's order. All on a real engine.

Other tests show that images, adapters and quantised weights are refused.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pd_cluster as lmdeploy
from pd_cluster import (
    LLM,
    AsyncEngine,
    ChatTemplateConfig,
    GenerationConfig,
    PytorchEngineConfig,
    TurbomindEngineConfig,
    pipeline,
)
from pd_cluster import SamplingParams as TacoParams
from pd_cluster.errors import ConfigError, RequestError
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from tests.support.watched import watching

MODEL = str(SHIPPED_MODEL)
GREETING = "Hello! How can I help you?"
PROMPTS = ["Hi, pls intro yourself", "Shanghai is"]
PLAIN = ChatTemplateConfig("base")  # LMDeploy's template that passes texts unchanged


@pytest.fixture(scope="module")
def pipe() -> Iterator[AsyncEngine]:
    with pipeline(MODEL) as engine:
        yield engine


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, max_model_len=512) as engine:
        yield engine


# ---- LMDeploy: making a pipeline


@pytest.mark.parametrize(
    "make",
    [
        lambda: pipeline(MODEL, None, TurbomindEngineConfig(), None, "ERROR"),
        lambda: pipeline(MODEL, None, "pytorch", PytorchEngineConfig(session_len=1024)),
        lambda: pipeline(MODEL, None, "turbomind", None, None, 32, 1, "ERROR"),
        lambda: AsyncEngine(MODEL, None, "turbomind", None, None, 32, 1),
        lambda: lmdeploy.pipeline(MODEL, backend="pytorch", backend_config=PytorchEngineConfig("", 1, 1024)),
    ],
    ids=["later order", "early order, config", "early order", "AsyncEngine", "named"],
)
def test_a_pipeline_in_the_orders_of_both_documents(make: Any) -> None:
    with make() as pipe:
        assert pipe(["hi"])[0].text == GREETING


def test_too_many_or_doubled_positions_are_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="at most 8 positional"):
        pipeline(MODEL, None, None, None, "ERROR", "pytorch", 32, 1, 1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="multiple values for argument 'backend_config'"):
        pipeline(MODEL, None, None, backend_config=None)  # type: ignore[call-overload]


# ---- LMDeploy: its calls


@pytest.mark.parametrize("name", ["__call__", "batch_infer"])
def test_a_call_with_every_option_by_its_place(pipe: AsyncEngine, name: str) -> None:
    """(prompts, gen_config, do_preprocess or chat_template_config, request_output_len, top_k, top_p, temperature,
    repetition_penalty, ignore_eos): each positional argument acts like the named one.
    """
    call = getattr(pipe, name)
    with pytest.warns(FutureWarning):
        (response,) = call(["hi"], None, True, 3, 1, 0.9, 0.5, 1.0, False)
    with pytest.warns(FutureWarning):
        (by_name,) = call(["hi"], request_output_len=3, top_k=1, top_p=0.9, temperature=0.5)
    assert (response.text, response.generate_token_len, response.finish_reason) == (by_name.text, 3, "length")
    with pytest.warns(FutureWarning):
        (endless,) = call(["hi"], None, None, 40, 1, 1.0, 1.0, 1.0, True)
    assert (endless.generate_token_len, endless.finish_reason) == (40, "length")
    assert endless.text.startswith(GREETING)
    with pytest.warns(FutureWarning):
        (repeated,) = call(["1, 1, 1, 1,"], None, False, 40, 1, 1.0, 1.0, 1.0, True)
    with pytest.warns(FutureWarning):
        (penalised,) = call(["1, 1, 1, 1,"], None, False, 40, 1, 1.0, 1.0, 2.0, True)
    assert penalised.text != repeated.text
    plain = call(["hi"], GenerationConfig(max_new_tokens=8), PLAIN)
    assert plain == call(["hi"], GenerationConfig(max_new_tokens=8), False)
    assert plain != call(["hi"], GenerationConfig(max_new_tokens=8), True)
    assert plain == call(["hi"], GenerationConfig(max_new_tokens=8), None, do_preprocess=False)
    whole = call(["hi"], GenerationConfig(max_new_tokens=6))[0].text
    assert "".join(part.text for part in pipe.stream_infer(["hi"], GenerationConfig(max_new_tokens=6), True)) == whole
    with pytest.warns(FutureWarning):
        assert "".join(part.text for part in pipe.stream_infer(["hi"], None, True, 6, 1)) == whole
    with pytest.raises(TypeError, match="do_preprocess is given twice"):
        call(["hi"], GenerationConfig(), True, do_preprocess=False)


def test_generate_with_every_option_by_its_place(pipe: AsyncEngine) -> None:
    """Passes by position: messages, session_id, gen_config, chat_template_config, stream_response, sequence_start,
    sequence_end, step, request_output_len, stop, stop_words, top_k, top_p, temperature, repetition_penalty, ignore_eos.
    """

    async def turn(*places: Any) -> list[Any]:
        return [out async for out in pipe.generate(*places)]

    old = (4, False, None, 1, 1.0, 1.0, 1.0, False)
    with pytest.warns(FutureWarning):
        (whole,) = asyncio.run(turn("hi", 1, None, None, False, True, True, 0, *old))
    assert (whole.generate_token_len, whole.finish_reason) == (4, "length")
    with pytest.warns(FutureWarning):
        parts = asyncio.run(turn("hi", 1, None, None, True, True, True, 0, *old))
    assert "".join(part.response for part in parts) == whole.response
    with pytest.warns(FutureWarning):
        (stopped,) = asyncio.run(turn("hi", 1, None, None, False, True, True, 0, 40, False, ["can"], 1))
    assert stopped.response == "Hello! How "
    (first,) = asyncio.run(turn("hi", 2, GenerationConfig(max_new_tokens=9), PLAIN, False, True, False))
    (second,) = asyncio.run(turn("there", 2, GenerationConfig(max_new_tokens=9), PLAIN, False, False, True))
    assert second.history_token_len == first.input_token_len + first.generate_token_len
    assert asyncio.run(turn("", 2, None, None, True, True, True, 0, None, True)) != []  # stop


def test_a_generator_of_a_session(pipe: AsyncEngine) -> None:
    """Calls get_generator(stop, session_id) by position."""

    async def ask() -> tuple[str, list[int]]:
        generator = await pipe.get_generator(False, 5)
        options: dict[str, Any] = {"gen_config": config, "stream_response": False}
        (first,) = [out async for out in generator.generate("hi", sequence_end=False, **options)]
        (second,) = [out async for out in generator.generate("hi", sequence_start=False, **options)]
        return first.response, second.token_ids

    config, talk = GenerationConfig(max_new_tokens=40), [{"role": "user", "content": "hi"}]
    whole = pipe([[*talk, {"role": "assistant", "content": GREETING}, *talk]], config)[0]
    assert asyncio.run(ask()) == (GREETING, whole.token_ids)
    pipe.stop_session(5)
    pipe.end_session(5)

    async def end() -> None:
        """Awaits the calls, as LMDeploy's first version requires."""
        await pipe.stop_session(5)
        await pipe.end_session(5)

    asyncio.run(end())


@pytest.mark.parametrize("top_k", [1, 40])
def test_n_answers(pipe: AsyncEngine, top_k: int) -> None:
    """Greedy answers are equal; sampled ones differ."""
    config = GenerationConfig(n=4, max_new_tokens=12, top_k=top_k, temperature=2.0, random_seed=3, ignore_eos=True)
    responses = pipe(PROMPTS, config)
    alone = pipe(PROMPTS, replace(config, n=1))
    assert [response.token_ids for response in alone] == [response.choices[0].token_ids for response in responses]
    for response in responses:
        texts = [choice.text for choice in response.choices]
        assert len(texts) == 4
        assert response.text == texts[0]
        assert [choice.choice for choice in response.choices] == [0, 1, 2, 3]
        assert len(set(texts)) == 1 if top_k == 1 else len(set(texts)) > 1
    streamed: dict[tuple[int, int], str] = {}
    for part in pipe.stream_infer(PROMPTS, config):
        key = part.index, part.choice
        streamed[key] = streamed.get(key, "") + part.text
    assert streamed == {(r.index, c.choice): c.text for r in responses for c in r.choices}
    (response,) = pipe(["a b c d " * 600], replace(config, n=3))
    assert [choice.finish_reason for choice in response.choices] == ["length"] * 3
    assert "leave no room" in (response.choices[2].error or "")

    async def ask() -> list[Any]:
        return [out async for out in pipe.generate("hi", 7, config)]

    with pytest.raises(RequestError, match=r"^n: 4; a session continues from one answer"):
        asyncio.run(ask())


# ---- LMDeploy: examples, and a pipeline's end


def test_lmdeploy_s_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Covers defaults, early configurations, sampling, OpenAI's format, and the pytorch backend."""
    from pd_cluster.pytorch import EngineConfig as Pytorch
    from pd_cluster.turbomind import EngineConfig as Turbomind

    pipe = pipeline(MODEL)
    response = pipe(["Hi, pls intro yourself", "Shanghai is"])
    assert [(each.index, each.finish_reason) for each in response] == [(0, "stop"), (1, "stop")]
    pipe.close()
    for backend, kind in (("pytorch", Pytorch), ("turbomind", Turbomind)):
        backend_config = kind(tp=1, session_len=1024)
        gen_config = GenerationConfig(max_new_tokens=224)
        pipe = lmdeploy.pipeline(MODEL, backend=backend, backend_config=backend_config)
        response = pipe(["hi", "say this is a test"], gen_config=gen_config)
        print(response)
        assert [each.text == GREETING for each in response] == [True, False]
        assert GREETING in capsys.readouterr().out
        assert pipe.session_len == 1024
        pipe.close()
    backend_config = PytorchEngineConfig(session_len=2024)
    gen_config = GenerationConfig(top_p=0.8, top_k=40, temperature=0.8, max_new_tokens=1024)
    pipe = pipeline(MODEL, backend_config=backend_config)
    prompts = [[{"role": "user", "content": "Hi, pls intro yourself"}], [{"role": "user", "content": "Shanghai is"}]]
    response = pipe(prompts, gen_config=gen_config)
    assert [(each.index, each.finish_reason) for each in response] == [(0, "stop"), (1, "stop")]
    pipe.close()


# tp=2 makes two prefill and two decode ranks. The script has no `if __name__ == "__main__":`.
TP_SCRIPT = f"""
from pd_cluster.extras.lmdeploy.pipeline import pipeline
from pd_cluster.messages import GenerationConfig, TurbomindEngineConfig

{{indent}}backend_config = TurbomindEngineConfig(tp=2)
{{indent}}gen_config = GenerationConfig(top_p=0.8,
{{indent}}                              top_k=40,
{{indent}}                              temperature=0.8,
{{indent}}                              max_new_tokens=1024)
{{indent}}pipe = pipeline({MODEL!r},
{{indent}}                backend_config=backend_config)
{{indent}}response = pipe(['Hi, pls intro yourself', 'Shanghai is'],
{{indent}}                gen_config=gen_config)
{{indent}}print(response)
"""


@pytest.mark.parametrize("entry", ["", pytest.param("if __name__ == '__main__':", marks=pytest.mark.slow)])
def test_a_script_with_two_ranks_starts_with_and_without_an_entry(tmp_path: Path, entry: str) -> None:
    head, _, rest = TP_SCRIPT.partition("\n\n")
    script = tmp_path / "script.py"
    script.write_text(f"{head}\n\n{entry}\n{rest}".format(indent="    " if entry else ""))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[Response(text='")
    assert done.stdout.count("finish_reason='stop'") == 2


@pytest.mark.slow
@pytest.mark.parametrize("end", ["print(pipe('hi').text)", "print(next(pipe.stream_infer('hi')).text)"])
def test_a_script_that_never_closes_its_pipeline_ends_quietly(tmp_path: Path, end: str) -> None:
    """A script that ends during a stream: see test_documents_models.py."""
    script = tmp_path / "script.py"
    script.write_text(f"from pd_cluster import pipeline\npipe = pipeline({MODEL!r})\n{end}\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pipeline_that_is_forgotten_ends_its_threads() -> None:
    before = set(threading.enumerate())
    pipe = pipeline(MODEL)
    mine = set(threading.enumerate()) - before
    assert {thread.name for thread in mine} >= {"pd-cluster", "engine"}
    stream = pipe.stream_infer("hi")
    next(stream)
    del pipe, stream
    gc.collect()
    for thread in mine:
        if not thread.name.startswith("asyncio"):  # the executor's threads end with the interpreter
            thread.join(30)
            assert not thread.is_alive(), thread.name


def test_a_configuration_that_cannot_be_is_refused_under_its_name() -> None:
    with pytest.raises(ConfigError, match=r"session_len 5000: .* has max_position_embeddings 2048"):
        pipeline(MODEL, backend_config=PytorchEngineConfig(session_len=5000))
    with pytest.raises(ConfigError, match=r"num_gpu_blocks 1000000000000: a KV pool of .* free: .*Ask for less"):
        pipeline(MODEL, backend_config=PytorchEngineConfig(num_gpu_blocks=10**12))


# ---- TACO-LLM


def test_a_taco_llm_with_every_argument_by_its_place() -> None:
    """Passes the constructor's nineteen arguments in the document's order, with its defaults."""
    documented = (MODEL, None, "auto", False, False, 1, "auto", None, None, None)
    documented += (0, 0.9, 4, 0, None, None, 8192, False, False)  # type: ignore[assignment]
    with LLM(*documented) as llm:
        (output,) = llm.generate("User: hi", TacoParams(max_tokens=4, temperature=0), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4


def test_taco_s_calls_by_place(llm: LLM) -> None:
    """Calls, by position, chat(messages, sampling_params, use_tqdm, lora_request, chat_template,
    add_generation_prompt) and generate(prompts, sampling_params, prompt_token_ids, use_tqdm, lora_request,
    prompt_adapter_request, guided_options_request).
    """
    params = TacoParams(max_tokens=16, temperature=0)
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, params, False, None, None, True)
    assert output.outputs[0].text == GREETING
    (bare,) = llm.chat(messages, params, False, None, "{{ messages[0].content }}", False)
    assert bare.prompt == "hi"
    guide = lmdeploy.LLMGuidedOptions(guided_choice=["yes", "no"])
    (guided,) = llm.generate(["Is it?"], params, None, False, None, None, guide)
    assert guided.outputs[0].text in ("yes", "no")
    asked = lmdeploy.GuidedDecodingRequest(guided_regex="[0-9]{3}")
    (numbers,) = llm.generate(["Is it?"], params, None, False, None, None, asked)
    assert numbers.outputs[0].text.isdecimal()


def test_prompts_beside_their_token_ids(llm: LLM) -> None:
    """The ids are used, and the text is reported."""
    params = TacoParams(max_tokens=6, temperature=0)
    (alone,) = llm.generate(prompt_token_ids=[5, 6, 7], sampling_params=params, use_tqdm=False)
    (both,) = llm.generate(["five six seven"], params, [[5, 6, 7]], False)
    (inside,) = llm.generate({"prompt": "five six seven", "prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert both.prompt == inside.prompt == "five six seven"
    assert both.prompt_token_ids == inside.prompt_token_ids == [5, 6, 7]
    assert both.outputs[0].token_ids == inside.outputs[0].token_ids == alone.outputs[0].token_ids
    with pytest.raises(RequestError, match="prompt_token_ids: 1 for 2 prompts"):
        llm.generate(["a", "b"], params, [[5]])


# ---- FastDeploy


def test_fastdeploy_s_first_two_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from pd_cluster.fastdeploy import LLM, SamplingParams

    msg1 = [
        {"role": "system", "content": "I'm a helpful AI assistant."},
        {"role": "user", "content": "把李白的静夜思改写为现代诗"},
    ]
    msg2 = [
        {"role": "system", "content": "I'm a helpful AI assistant."},
        {"role": "user", "content": "Write me a poem about large language model."},
    ]
    messages = [msg1, msg2]

    # 采样参数
    sampling_params = SamplingParams(top_p=0.95, max_tokens=6400)

    # 加载模型
    with watching() as made:
        llm = LLM(model=MODEL, tensor_parallel_size=1, max_model_len=512)

    # 批量进行推理
    outputs = llm.chat(messages, sampling_params)

    # 输出结果
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs.text
        assert "helpful" in str(prompt)
        assert generated_text

    prompts = ["User: 帮我写一篇关于深圳文心公园的500字游记和赏析。\nAssistant: 好的。"]
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        assert output.prompt == prompts[0]
        assert output.outputs.text
    pool = made[0].runner.pool
    assert (pool.layout.block_size, pool.num_blocks * 64 >= 512) == (64, True)
    llm.close()
    (line,) = (tmp_path / "log" / "fastdeploy.log").read_text().splitlines()
    assert line.endswith(f"INFO Doing profile, the total_block_num:{pool.num_blocks}")


def test_fastdeploy_s_module_paths_and_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`max_tokens` includes the prompt, `index` is the prompt's place in the batch, durations are as documented."""
    monkeypatch.setenv("FD_LOG_DIR", str(tmp_path))
    from pd_cluster.fastdeploy.engine.request import CompletionOutput, RequestMetrics, RequestOutput
    from pd_cluster.fastdeploy.engine.sampling_params import SamplingParams
    from pd_cluster.fastdeploy.entrypoints.llm import LLM
    from pd_cluster.fastdeploy.input.ernie_tokenizer import ErnieBotTokenizer

    tokenizer = ErnieBotTokenizer.from_pretrained(MODEL)
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(prompt, str)
    prompt_ids = tokenizer.apply_chat_template(messages)
    with LLM(model=MODEL, max_model_len=512) as llm:
        images: list[Any] = []
        (answer,) = llm.generate(
            prompts={"prompt": prompt, "multimodal_data": {"image": images, "video": images}},
            sampling_params=SamplingParams(temperature=0.0, max_tokens=6400),
        )
        assert answer.outputs.text == GREETING  # type: ignore[union-attr]
        assert answer.prompt_token_ids == prompt_ids
        (short,) = llm.generate([prompt_ids], SamplingParams(temperature=0.0, max_tokens=len(prompt_ids) + 3), False)
        assert len(short.outputs.token_ids) == 3  # type: ignore[union-attr]
        found = llm.chat([messages, messages, messages], SamplingParams(temperature=0.0), False, {"unknown": 1})
        several = llm.generate([prompt], SamplingParams(n=2, temperature=1.0, max_tokens=200), False)
    for at, output in enumerate(found):
        assert isinstance(output, RequestOutput)
        assert isinstance(output.outputs, CompletionOutput)
        assert isinstance(output.metrics, RequestMetrics)
        metrics, outputs = output.metrics, output.outputs
        assert (outputs.index, outputs.text, output.finished, output.error_code) == (at, GREETING, True, 200)
        assert outputs.send_idx == len(outputs.token_ids) - 1
        times = (metrics.first_token_time, metrics.model_forward_time, metrics.model_execute_time)
        assert metrics.inference_start_time is not None
        assert metrics.inference_start_time >= metrics.arrival_time
        assert None not in times
        assert 0 < times[0] <= times[1] <= times[2]  # type: ignore[operator]
    assert isinstance(several[0].outputs, list)
    assert len(several[0].outputs) == 2
