"""Worker processes of a Python program answer as a single process does, and end with the program in any case."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_cluster import LLM, AsyncEngine, PoolingParams, SamplingParams, pipeline, turbomind
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.processes.launch_preloader import LaunchPreloader
from pd_cluster.cluster.streams.request_stream import RequestStream
from pd_cluster.engine.worker.worker_load import LOAD_S
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.messages import GenerationConfig, PytorchEngineConfig, Response
from pd_cluster.offline import split_cluster
from pd_cluster.offline.offline_service import OfflineConfig, OfflineService
from pd_cluster.offline.split_cluster import SplitCluster
from pd_cluster.service.callers.caller import Caller
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Pooling, RequestSpec, RopePositions, Sampling
from tests.support.checkpoints import make_tokenizer, reference_greedy, reference_model
from tests.support.cluster import children_of
from tests.support.engines import random_prompt
from tests.support.positions import KINDS, assert_same
from tests.support.vectors import reference_vector

pytestmark = pytest.mark.usefixtures("one_preloader")

SCRIPT = Path(__file__).parents[1] / "support" / "offline_script.py"
PROMPTS = [[5, 6, 7, 8], [9] * 40, [10, 11]]
ENGINE: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "max_model_len": 256, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), prefill=1, decode=1, **ENGINE) as made:
        yield made


@pytest.fixture(scope="module")
def split(llm: LLM) -> OfflineService:
    return offline_of(llm)


def offline_of(made: LLM | AsyncEngine) -> OfflineService:
    return made._offline


def cluster_of(made: OfflineService) -> SplitCluster:
    backend = made._parts.backend
    assert isinstance(backend, SplitCluster)
    return backend


def nums_of_ranks(made: LLM | AsyncEngine) -> list[int]:
    """Returns the number of ranks of each instance."""
    infos = [each.info for each in offline_of(made).service.router.membership.instances]
    return [len(info.rank_pids) for info in infos if info is not None]


@pytest.fixture(scope="module")
def one(model: Path) -> Iterator[OfflineService]:
    """Yields the same service in one process."""
    with OfflineService(OfflineConfig(engine=EngineConfig(model=str(model), **ENGINE))) as made:
        yield made


async def pieces_of(offline: OfflineService, prompts: list[list[int]], **fields: object) -> list[Piece]:
    request = CompletionRequest.model_validate({"prompt": prompts, "temperature": 0, "max_tokens": 8, **fields})
    return await offline.service.complete(await offline.service.completions(request))


def test_greedy_and_seeded_are_those_of_one_process(split: OfflineService, one: OfflineService, model: Path) -> None:
    found = split.run(pieces_of(split, PROMPTS))
    assert [piece.token_ids for piece in found] == [reference_greedy(model, prompt, 8) for prompt in PROMPTS]
    fields = {"temperature": 1.0, "seed": 3, "n": 2, "presence_penalty": 0.5}
    assert split.run(pieces_of(split, PROMPTS, **fields)) == one.run(pieces_of(one, PROMPTS, **fields))


def test_answers_of_a_batch_are_those_of_one_process(split: OfflineService, one: OfflineService) -> None:
    """Decode may delay steps to gather sequences, but the batch ends even though it exceeds the pool."""
    prompts = [[5 + at % 40] * (1 + at * 7 % 60) for at in range(60)]

    async def batch_of(offline: OfflineService) -> list[Piece]:
        fields = {"prompt": prompts, "max_tokens": 9, "seed": 4, "ignore_eos": True}
        request = CompletionRequest.model_validate(fields)
        generations = await offline.service.completions(request, caller=Caller(batch="b"))
        return await offline.service.complete(generations)

    assert split.run(batch_of(split)) == one.run(batch_of(one))


async def heartbeats_of(*instances: Instance) -> None:
    """Waits until each instance has sent a load measured after this call."""
    loop = asyncio.get_running_loop()
    now_s = loop.time() + LOAD_S
    async with asyncio.timeout(30):
        while any(instance.heard_s <= now_s for instance in instances):
            await asyncio.sleep(0.05)


def test_a_prefill_instance_embeds_and_no_decode_leg_is_taken(llm: LLM, split: OfflineService, model: Path) -> None:
    prefill, decode = sorted(split.service.router.membership.instances, key=lambda each: each.role == "decode")
    split.run(heartbeats_of(prefill, decode))
    before = prefill.load.num_steps, decode.load.num_steps, decode.load.num_landings
    for prompt, output in zip(PROMPTS, llm.embed(PROMPTS), strict=True):
        assert (output.prompt_token_ids, output.error_msg) == (prompt, None)
        assert np.allclose(output.outputs.embedding, reference_vector(model, prompt, Pooling()), atol=1e-5)
    few = llm.encode(PROMPTS, PoolingParams(dimensions=7), pooling_task="embed")
    assert [output.outputs.data.shape for output in few] == [(7,)] * len(PROMPTS)
    split.run(heartbeats_of(prefill, decode))
    assert prefill.load.num_steps > before[0]
    assert (decode.load.num_steps, decode.load.num_landings) == before[1:]
    assert (prefill.num_outstanding, decode.num_outstanding) == (0, 0)
    assert (prefill.load.num_held_blocks, decode.load.num_held_blocks) == (0, 0)


async def tokens_of(offline: OfflineService, orders: list[RequestSpec]) -> list[list[int]]:
    """Serves all requests at once through this process's router, each on two instances."""

    def routed(stream: RequestStream) -> None:
        assert stream.prefill.name != stream.decode.name

    async def tokens(order: RequestSpec) -> list[int]:
        return [output.token_id async for output in offline.service.router.serve(order, routed)]

    return await asyncio.gather(*map(tokens, orders))


def test_rotary_positions_are_the_same_on_both_legs(split: OfflineService, model: Path) -> None:
    """Both legs use the same positions, for chunked prompts and for cached prefixes."""
    rng, sampling = random.Random(8), Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    orders = [
        RequestSpec(random_prompt(rng, length), sampling, rope_positions=kind(rng, length) if kind else None)
        for length in (9, 50)
        for kind in (*KINDS.values(), None)
    ]
    for _ in range(2):
        for order, tokens in zip(orders, split.run(tokens_of(split, orders)), strict=True):
            assert len(tokens) == sampling.max_tokens
            assert_same(reference_model(model), order.prompt_token_ids, order.rope_positions, tokens)
    three = RequestSpec([1, 2], sampling, rope_positions=RopePositions(((0, 1),) * 3))
    with pytest.raises(GenerationError, match="rope_positions: 3 rows; this model takes 1"):
        split.run(tokens_of(split, [three]))


@pytest.mark.slow
def test_tensor_parallel_size_alone_is_two_ranks_each(model: Path) -> None:
    with LLM(str(model), tensor_parallel_size=2, num_blocks=64, max_model_len=256) as llm:
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=SamplingParams(temperature=0, max_tokens=8))
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert found == [reference_greedy(model, prompt, 8) for prompt in PROMPTS]
        assert nums_of_ranks(llm) == [2, 2]


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
        assert nums_of_ranks(pipe) == [2, 2]


def test_a_lost_worker_is_an_error_or_nothing_at_all(split: OfflineService, model: Path) -> None:
    """The last test of this cluster: it kills the prefill process, after which decode does both."""
    prefill = cluster_of(split)._processes["prefill-0"].pid
    running = split.start(pieces_of(split, PROMPTS, max_tokens=100, ignore_eos=True))
    os.kill(prefill, signal.SIGKILL)
    assert [len(piece.token_ids) for piece in running.result(60)] == [100] * 3
    found = split.run(pieces_of(split, PROMPTS))
    assert [piece.token_ids for piece in found] == [reference_greedy(model, prompt, 8) for prompt in PROMPTS]


def test_a_process_that_cannot_start_is_told(model: Path) -> None:
    engine = EngineConfig(model=str(model), num_blocks=64)
    with pytest.raises(ConfigError, match=r"could not start.*--no-such-flag"):
        OfflineService(OfflineConfig(engine=engine, prefill=1, decode=1, arguments=("--no-such-flag",)))


@pytest.mark.slow
def test_what_a_worker_refuses_is_told_with_the_names_of_the_call(model: Path) -> None:
    """The rank, its parent and this program pass the error on; it uses the names of the call's arguments."""
    config = PytorchEngineConfig(num_gpu_blocks=2, session_len=256, block_size=16)
    with pytest.raises(ConfigError, match=r"exit code 1\): num_gpu_blocks 2: .* of session_len 256 "):
        pipeline(str(model), backend_config=config, prefill=1, decode=1)


def test_a_link_that_cannot_be_is_no_wait(model: Path) -> None:
    """If no link is possible, the prefill instance reports it at once, with the names of the call's arguments."""
    wanted = (
        r"prefill-0 and decode-0 cannot be linked: kv_transport ipc is not possible here: .* pool is in host memory"
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
    """A script without a main guard does not run again in the processes that it starts, and leaves none."""
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, str(SCRIPT), str(model), "1", how]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stderr
    pids = [int(pid) for pid in lines[0].split()]
    assert len(pids) == 5  # a preloader, two parents, and a rank process for each
    expected = {"exception": 1, "kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}.get(how, 0)
    assert done.returncode in (expected, 130 if how == "interrupt" else expected), done.stderr
    assert ("KeyboardInterrupt" in done.stderr) == (how == "interrupt")
    asyncio.run(until_gone(pids))


def test_a_close_that_is_cut_short_leaves_nothing_either(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a second Ctrl-C while closing waits for processes, in a program that continues, like Jupyter."""

    def take_time(process: subprocess.Popen[bytes]) -> None:  # instead of ending
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    monkeypatch.setattr(subprocess.Popen, "terminate", take_time)
    monkeypatch.setattr(split_cluster, "LaunchPreloader", LaunchPreloader)  # a preloader of its own
    made = OfflineService(OfflineConfig(engine=EngineConfig(model=str(model), num_blocks=64), prefill=1, decode=1))
    cluster = cluster_of(made)
    folder, processes, own = cluster._folder, list(cluster._processes.values()), cluster._preloader
    assert own is not None
    preloader = own.pid
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
