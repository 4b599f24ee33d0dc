"""LMDeploy's documented examples, with only the import and the model changed, and how a pipeline ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pd_cluster.offline.lmdeploy.pipeline as lmdeploy
from pd_cluster.errors import ConfigError
from pd_cluster.offline.lmdeploy.async_engine import AsyncEngine
from pd_cluster.offline.lmdeploy.engine_configs import PytorchEngineConfig
from pd_cluster.offline.lmdeploy.messages import GenerationConfig
from pd_cluster.offline.lmdeploy.pipeline import pipeline
from pd_cluster.settings.engine import SHIPPED_MODEL

MODEL = str(SHIPPED_MODEL)
GREETING = "Hello! How can I help you?"


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


def test_a_session_len_beyond_the_model_is_refused_under_its_name() -> None:
    with pytest.raises(ConfigError, match=r"session_len 5000: .* has max_position_embeddings 2048"):
        pipeline(MODEL, backend_config=PytorchEngineConfig(session_len=5000))


ENDS = {
    "at_its_end": "print(pipe('hi').text)",
    "within_a_stream": "print(next(pipe.stream_infer('hi')).text)",
    "by_sys_exit_within_a_stream": "for each in pipe.stream_infer('hi'): sys.exit(3)",
}


@pytest.mark.parametrize(
    "end", [pytest.param(end, marks=() if "sys_exit" in end else pytest.mark.slow) for end in ENDS]
)
def test_a_script_that_never_closes_its_pipeline_ends_quietly(tmp_path: Path, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nfrom pd_cluster import pipeline\npipe = pipeline({MODEL!r})\n{ENDS[end]}\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (3 if "sys.exit" in ENDS[end] else 0, "")


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
