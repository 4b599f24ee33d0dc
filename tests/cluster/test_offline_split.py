"""Worker processes of a Python program: they answer as one process does, and end with it, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import LLM, SamplingParams, pipeline, turbomind
from pd_cluster.errors import ConfigError
from pd_cluster.messages import GenerationConfig, PytorchEngineConfig, Response
from pd_cluster.offline.session import Offline, OfflineConfig
from pd_cluster.offline.split import SplitCluster
from pd_cluster.service.schema.protocol import CompletionRequest
from pd_cluster.service.sequence import Piece
from pd_cluster.settings.engine import EngineConfig
from tests.support.checkpoints import make_tokenizer, reference_greedy
from tests.support.cluster import children_of

SCRIPT = Path(__file__).parents[1] / "support" / "offline_script.py"
PROMPTS = [[5, 6, 7, 8], [9] * 40, [10, 11]]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def split(model: Path) -> Iterator[Offline]:
    engine = EngineConfig(model=str(model), num_blocks=64, max_model_len=256)
    with Offline(OfflineConfig(engine=engine, prefill=1, decode=1)) as made:
        yield made


async def pieces_of(offline: Offline, prompts: list[list[int]], **fields: object) -> list[Piece]:
    request = CompletionRequest.model_validate({"prompt": prompts, "temperature": 0, "max_tokens": 8, **fields})
    return await offline.service.complete(await offline.service.completions(request))


def test_greedy_and_seeded_are_those_of_one_process(split: Offline, model: Path) -> None:
    found = split.run(pieces_of(split, PROMPTS))
    assert [piece.token_ids for piece in found] == [reference_greedy(model, prompt, 8) for prompt in PROMPTS]
    engine = EngineConfig(model=str(model), num_blocks=64, max_model_len=256)
    with Offline(OfflineConfig(engine=engine)) as one:
        fields = {"temperature": 1.0, "seed": 3, "n": 2, "presence_penalty": 0.5}
        assert split.run(pieces_of(split, PROMPTS, **fields)) == one.run(pieces_of(one, PROMPTS, **fields))


def test_answers_of_a_batch_are_those_of_one_process(split: Offline, model: Path) -> None:
    """Decode may wait with its steps; the batch is larger than the pool, so not for ever."""
    prompts = [[5 + at % 40] * (1 + at * 7 % 60) for at in range(60)]

    async def batch_of(offline: Offline) -> list[Piece]:
        fields = {"prompt": prompts, "max_tokens": 9, "seed": 4, "ignore_eos": True}
        generations = await offline.service.completions(CompletionRequest.model_validate(fields))
        for generation in generations:
            generation.amend(batch="b")
        return await offline.service.complete(generations)

    engine = EngineConfig(model=str(model), num_blocks=64, max_model_len=256)
    with Offline(OfflineConfig(engine=engine)) as one:
        assert split.run(batch_of(split)) == one.run(batch_of(one))


def test_tensor_parallel_size_alone_is_two_ranks_each(model: Path) -> None:
    with LLM(str(model), tensor_parallel_size=2, num_blocks=64, max_model_len=256) as llm:
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=SamplingParams(temperature=0, max_tokens=8))
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert found == [reference_greedy(model, prompt, 8) for prompt in PROMPTS]
        infos = [each.info for each in llm._offline.service.router.membership.instances]
        assert [len(info.rank_pids) for info in infos if info is not None] == [2, 2]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"backend_config": PytorchEngineConfig(tp=2, num_gpu_blocks=64)}, marks=pytest.mark.slow),
        {"backend_config": turbomind.EngineConfig(tp=2, cache_max_entry_count=0.002)},
    ],
    ids=["pipeline", "pytorch", "early turbomind"],
)
def test_tp_is_two_ranks_each(model: Path, arguments: dict[str, Any]) -> None:
    text = "Once upon a time"
    with pytest.warns(UserWarning, match="tp=2: a prefill and a decode instance of 2 ranks each"):
        pipe = pipeline(str(model), **arguments)
    with pipe:
        response = pipe(text, GenerationConfig(max_new_tokens=8), do_preprocess=False)
        assert isinstance(response, Response)
        assert response.token_ids == reference_greedy(model, make_tokenizer().encode(text).ids, 8)
        infos = [each.info for each in pipe._offline.service.router.membership.instances]
        assert [len(info.rank_pids) for info in infos if info is not None] == [2, 2]


def test_a_lost_worker_is_an_error_or_nothing_at_all(split: Offline, model: Path) -> None:
    """Last of this cluster's tests: its prefill process is gone after it, and decode does both."""
    assert isinstance(split._parts.backend, SplitCluster)
    prefill = split._parts.backend._processes["prefill-0"].pid
    running = split.start(pieces_of(split, PROMPTS, max_tokens=100, ignore_eos=True))
    os.kill(prefill, signal.SIGKILL)
    assert [len(piece.token_ids) for piece in running.result(60)] == [100] * 3
    found = split.run(pieces_of(split, PROMPTS))
    assert [piece.token_ids for piece in found] == [reference_greedy(model, prompt, 8) for prompt in PROMPTS]


def test_a_process_that_cannot_start_is_told(model: Path) -> None:
    engine = EngineConfig(model=str(model), num_blocks=64)
    with pytest.raises(ConfigError, match=r"could not start.*--no-such-flag"):
        Offline(OfflineConfig(engine=engine, prefill=1, decode=1, arguments=("--no-such-flag",)))


@pytest.mark.slow
def test_what_a_worker_refuses_is_told_with_the_names_of_the_call(model: Path) -> None:
    """The rank process, its parent and this program each hand the error on; who wrote the call reads its own names."""
    with pytest.raises(ConfigError, match=r"could not start \(exit code 1\): num_blocks 2: .* of max_model_len 256 "):
        LLM(str(model), num_blocks=2, max_model_len=256, prefill=1, decode=1)
    config = PytorchEngineConfig(num_gpu_blocks=2, session_len=256, block_size=16)
    with pytest.raises(ConfigError, match=r"exit code 1\): num_gpu_blocks 2: .* of session_len 256 "):
        pipeline(str(model), backend_config=config, prefill=1, decode=1)


def test_a_link_that_cannot_be_is_no_wait(model: Path) -> None:
    """The prefill instance finds out; its reason has the names of the call."""
    wanted = (
        r"prefill-0 and decode-0 cannot be a pair: kv_transport ipc is not possible here: .* pool is in host memory"
    )
    with pytest.raises(ConfigError, match=wanted):
        LLM(str(model), kv_transport="ipc", num_blocks=64, max_model_len=256, prefill=1, decode=1)


@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("end", "close", "exception", "kill")),
        "interrupt",
    ],
)
def test_nothing_is_left_when_a_script_ends(model: Path, how: str) -> None:
    """A script without a main guard: nothing of it runs again in the processes that it starts."""
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, str(SCRIPT), str(model), "1", how]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stderr
    pids = [int(pid) for pid in lines[0].split()]
    assert len(pids) == 5  # a preloader, two parents, a rank process each
    expected = {"exception": 1, "kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}.get(how, 0)
    assert done.returncode in (expected, 130 if how == "interrupt" else expected), done.stderr
    assert ("KeyboardInterrupt" in done.stderr) == (how == "interrupt")
    asyncio.run(until_gone(pids))


def test_a_close_that_is_cut_short_leaves_nothing_either(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C arrives during the wait for processes, in a program that continues, as in Jupyter."""

    def take_time(process: subprocess.Popen[bytes]) -> None:  # instead of ending
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    monkeypatch.setattr(subprocess.Popen, "terminate", take_time)
    made = Offline(OfflineConfig(engine=EngineConfig(model=str(model), num_blocks=64), prefill=1, decode=1))
    assert isinstance(made._parts.backend, SplitCluster)
    folder, processes = made._parts.backend._folder, list(made._parts.backend._processes.values())
    assert made._parts.backend._preloader is not None
    preloader = made._parts.backend._preloader.pid
    pids = [preloader, *children_of(preloader), *(each.pid for each in processes)]
    assert len(pids) == 5
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        made.close()
    assert [each.returncode for each in processes] == [-signal.SIGKILL] * 2
    assert not folder.exists()
    asyncio.run(until_gone(pids))


async def until_gone(pids: list[int]) -> None:
    deadline_s = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and _runs(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "processes are left"
        await asyncio.sleep(0.05)


def _runs(pid: int) -> bool:
    """Returns whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
