"""LMDeploy's documented examples, with only the import and the model changed, and sessions, on the shipped model."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pd_cluster.offline.lmdeploy.pipeline as lmdeploy
from pd_cluster.errors import ConfigError
from pd_cluster.offline.lmdeploy.async_engine import AsyncEngine
from pd_cluster.offline.lmdeploy.engine_configs import PytorchEngineConfig, TurbomindEngineConfig
from pd_cluster.offline.lmdeploy.messages import GenerationConfig, GenOut
from pd_cluster.offline.lmdeploy.pipeline import pipeline
from pd_cluster.settings.engine import SHIPPED_MODEL

MODEL = str(SHIPPED_MODEL)
GREETING = "Hello! How can I help you?"


@pytest.fixture(scope="module")
def pipe() -> Iterator[AsyncEngine]:
    with pipeline(MODEL) as engine:
        yield engine


def test_the_example_with_defaults() -> None:
    pipe = pipeline(MODEL)
    response = pipe(["Hi, pls intro yourself", "Shanghai is"])
    print(response)
    assert isinstance(pipe, AsyncEngine)
    assert [each.index for each in response] == [0, 1]
    assert all(each.text and each.finish_reason == "stop" for each in response)
    pipe.close()


@pytest.mark.parametrize("backend", ["pytorch", "turbomind"])
def test_the_early_examples(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    from pd_cluster.messages import GenerationConfig

    if backend == "pytorch":
        from pd_cluster.pytorch import EngineConfig
    else:
        from pd_cluster.turbomind import EngineConfig

    # there are more arguments in EngineConfig set by default
    backend_config = EngineConfig(tp=1, session_len=1024)

    # there are more arguments in GenerationConfig set by default
    gen_config = GenerationConfig(max_new_tokens=224)

    # Initialize pipeline
    pipe = lmdeploy.pipeline(MODEL, backend=backend, backend_config=backend_config)

    # Perform inference on multiple inputs
    response = pipe(["hi", "say this is a test"], gen_config=gen_config)

    print(response)
    assert response[0].text == GREETING
    assert len(response) == 2
    assert GREETING in capsys.readouterr().out
    assert pipe.session_len == 1024
    pipe.close()


def test_the_example_of_sampling_and_of_openai_format_on_the_pytorch_backend() -> None:
    backend_config = PytorchEngineConfig(session_len=2024)
    gen_config = GenerationConfig(top_p=0.8, top_k=40, temperature=0.8, max_new_tokens=1024)
    pipe = pipeline(MODEL, backend_config=backend_config)
    prompts = [[{"role": "user", "content": "Hi, pls intro yourself"}], [{"role": "user", "content": "Shanghai is"}]]
    response = pipe(prompts, gen_config=gen_config)
    print(response)
    assert [each.index for each in response] == [0, 1]
    assert all(each.text and each.finish_reason == "stop" for each in response)
    pipe.close()


# tp=2 is four processes: two ranks that prefill, two that decode. The script has no `if __name__ == "__main__":`.
TP_SCRIPT = f"""
from pd_cluster.offline.lmdeploy.pipeline import pipeline
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
def test_split_into_prefill_and_decode_the_answers_are_the_same(pipe: AsyncEngine) -> None:
    prompts = ["hi", "What is 3 plus 4?", "Count from 1 to 5."]
    config = GenerationConfig(max_new_tokens=40)
    with pipeline(
        MODEL, prefill=1, decode=1, backend_config=TurbomindEngineConfig(cache_max_entry_count=0.01)
    ) as split:
        assert [each.token_ids for each in split(prompts, config)] == [each.token_ids for each in pipe(prompts, config)]
        assert [out.response for out in turn(split, "hi", 1)] == [GREETING]


def test_a_prompt_has_the_same_answer_alone_and_in_a_batch(pipe: AsyncEngine) -> None:
    prompts = [f"What is {at} plus 2?" for at in range(9)]
    config = GenerationConfig(max_new_tokens=20)
    together = pipe(prompts, gen_config=config)
    assert [each.text for each in together] == [pipe(prompt, gen_config=config).text for prompt in prompts]


def test_stop_and_bad_words(pipe: AsyncEngine) -> None:
    assert pipe("hi", gen_config=GenerationConfig(stop_words=["can"])).text == "Hello! How "
    assert pipe("hi", gen_config=GenerationConfig(stop_words=["!"])).finish_reason == "stop"
    assert "Hello" not in pipe("hi", gen_config=GenerationConfig(bad_words=["Hello"])).text
    ids = pipe("hi").token_ids
    banned = pipe("hi", gen_config=GenerationConfig(bad_token_ids=[ids[0]], max_new_tokens=20)).token_ids
    assert banned
    assert ids[0] not in banned


def test_a_stream_is_the_whole_answer_in_parts(pipe: AsyncEngine) -> None:
    config = GenerationConfig(max_new_tokens=40)
    parts = list(pipe.stream_infer(["hi"], gen_config=config))
    assert len(parts) > 2
    assert "".join(part.text for part in parts) == GREETING
    assert [token_id for part in parts for token_id in part.token_ids] == pipe("hi", gen_config=config).token_ids


def turn(engine: AsyncEngine, text: str, session_id: int, **options: object) -> list[GenOut]:
    async def read() -> list[GenOut]:
        steps = engine.generate(text, session_id, GenerationConfig(), stream_response=False, **options)
        return [out async for out in steps]

    return asyncio.run(read())


def test_a_stopped_session_leaves_the_engine_to_others(pipe: AsyncEngine) -> None:
    async def run() -> list[GenOut]:
        config = GenerationConfig(max_new_tokens=1500, ignore_eos=True)
        found = []
        async for out in pipe.generate("hi", 7, config):
            found.append(out)
            if len(found) == 3:
                pipe.stop_session(7)
        return found

    found = asyncio.run(run())
    assert found[-1].finish_reason == "abort"
    assert found[-1].generate_token_len < 1500
    assert pipe("hi").text == GREETING


def test_a_session_len_beyond_the_model_is_refused_under_its_name() -> None:
    with pytest.raises(ConfigError, match=r"session_len 5000: .* has max_position_embeddings 2048"):
        pipeline(MODEL, backend_config=PytorchEngineConfig(session_len=5000))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", "model_path /no/such/folder: no such folder"),
        (
            "internlm/internlm-chat-7b",
            "model_path internlm/internlm-chat-7b: .* no model of that name in the",
        ),
    ],
)
def test_a_model_that_is_not_there_is_refused_under_its_name(
    path: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=message):
        pipeline(path)


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
        if not thread.name.startswith("asyncio"):  # of the loop's executor, which ends with the interpreter
            thread.join(30)
            assert not thread.is_alive(), thread.name


def test_a_pool_that_the_host_cannot_give_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"num_gpu_blocks 1000000000000: a KV pool of .* free: .*Ask for less"):
        pipeline(MODEL, backend_config=PytorchEngineConfig(num_gpu_blocks=10**12))
