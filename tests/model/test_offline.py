"""An engine in this process: its answers, its refusals, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster import LLM, GenerationConfig, GuidedDecodingParams, LoRARequest, SamplingParams, pipeline
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.errors import Closed, ConfigError, GenerationError, ModelError, PdClusterError, RequestError
from pd_cluster.fastdeploy import LLM as FastDeployLLM
from pd_cluster.offline.offline_service import OfflineConfig, OfflineService
from pd_cluster.service.generation.text_sequence import Piece
from pd_cluster.service.schema.completion_protocol import CompletionRequest
from pd_cluster.settings.engine_config import EngineConfig
from tests.support.adapters import make_adapter
from tests.support.checkpoints import reference_greedy
from tests.support.held import held, more_than, processes_of

PROMPTS = [[5, 6, 7, 8], [9] * 40, [10, 11]]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def offline(model: Path) -> Iterator[OfflineService]:
    with OfflineService(OfflineConfig(engine=EngineConfig(model=str(model), num_blocks=64, max_model_len=256))) as made:
        yield made


async def pieces_of(offline: OfflineService, prompt: Any, **fields: Any) -> list[Piece]:
    request = CompletionRequest(prompt=prompt, **{"temperature": 0, "max_tokens": 8, **fields})
    return await offline.service.complete(await offline.service.completions(request))


async def stream_of(offline: OfflineService, prompt: Any, **fields: Any) -> AsyncGenerator[Piece, None]:
    request = CompletionRequest(prompt=prompt, return_token_ids=True, **{"temperature": 0, "max_tokens": 8, **fields})
    async for piece in offline.service.pieces(await offline.service.completions(request)):
        yield piece


def test_greedy_is_the_references(offline: OfflineService, model: Path) -> None:
    """Covers calls, streams, and use from another event loop; use from the engine's own loop would deadlock."""
    expected = [reference_greedy(model, prompt, 8) for prompt in PROMPTS]
    assert [piece.token_ids for piece in offline.run(pieces_of(offline, PROMPTS))] == expected
    pieces = list(offline.iterate(stream_of(offline, PROMPTS[0])))
    assert [token_id for piece in pieces for token_id in piece.token_ids] == expected[0]
    assert len(pieces) > 1

    async def ask() -> list[Piece]:
        return await asyncio.wrap_future(offline.start(pieces_of(offline, PROMPTS)))

    assert [piece.token_ids for piece in asyncio.run(ask())] == expected

    async def wait() -> None:
        offline.run(pieces_of(offline, PROMPTS))

    with pytest.raises(RuntimeError, match="would wait for itself"):
        offline.run(wait())


def test_a_stream_that_is_left_holds_nothing(offline: OfflineService) -> None:
    for _ in offline.iterate(stream_of(offline, PROMPTS[1], max_tokens=200, ignore_eos=True)):
        break
    offline.run(until_home(offline))


async def until_home(offline: OfflineService) -> None:
    async with asyncio.timeout(20):
        while offline.service.router.num_streams:
            await asyncio.sleep(0.01)
    (piece,) = await pieces_of(offline, [1, 2, 3], max_tokens=250)  # the whole pool but a few blocks is free again
    assert piece.finish_reason in ("length", "stop")


def test_from_many_threads_at_once(offline: OfflineService, model: Path) -> None:
    found: dict[int, list[int]] = {}

    def ask(at: int) -> None:
        (piece,) = offline.run(pieces_of(offline, [[at + 5, 6, 7]]))
        found[at] = piece.token_ids

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {at: reference_greedy(model, [at + 5, 6, 7], 8) for at in range(8)}
    assert offline.service.router.admission.waiting is None, "prompts must wait without a limit"


def test_a_wrong_request_is_refused_and_others_go_on(offline: OfflineService) -> None:
    with pytest.raises(RequestError, match="too long"):
        offline.run(pieces_of(offline, [[1] * 300]))
    assert offline.run(pieces_of(offline, PROMPTS))


def test_after_its_end(model: Path) -> None:
    made = OfflineService(OfflineConfig(engine=EngineConfig(model=str(model), num_blocks=64)))
    made.run(pieces_of(made, PROMPTS))
    running = made.start(pieces_of(made, PROMPTS, max_tokens=200, ignore_eos=True))
    made.close()
    made.close()
    with pytest.raises((PdClusterError, CancelledError)):
        running.result(30)
    with pytest.raises(Closed):
        made.run(pieces_of(made, PROMPTS))
    assert not [each for each in threading.enumerate() if each.name in ("engine", "pd-cluster") and each.is_alive()][2:]


def test_forgotten_it_ends(model: Path) -> None:
    """An engine ends when it is garbage collected, because programs switch models by `del llm`."""
    before = set(threading.enumerate())
    made = OfflineService(OfflineConfig(engine=EngineConfig(model=str(model), num_blocks=64)))
    made.run(pieces_of(made, PROMPTS))
    running = made.start(pieces_of(made, PROMPTS, max_tokens=30, ignore_eos=True))
    own = set(threading.enumerate()) - before
    del made
    assert [len(piece.token_ids) for piece in running.result(60)] == [30] * len(PROMPTS), "work must keep it alive"
    del running
    gc.collect()
    for thread in own | (set(threading.enumerate()) - before):
        thread.join(30)
        assert not thread.is_alive(), thread.name


def big_tensors() -> list[torch.Tensor]:
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return [each for each in tensors if each.numel() > 500]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_closed_it_frees_weights_at_once(checkpoint: Callable[..., Path], architecture: str, tmp_path: Path) -> None:
    """Closing frees weights (fused or not), adapters and the KV cache at once, while `llm` still exists."""
    folder = checkpoint(architecture)
    adapter = make_adapter(tmp_path / "a", folder)
    threads = set(threading.enumerate())
    gc.collect()
    gc.disable()
    try:
        before = big_tensors()
        known = {id(each) for each in before}
        llm = LLM(str(folder), num_blocks=64, enable_lora=True)
        llm.generate("Hello", SamplingParams(max_tokens=2), lora_request=LoRARequest("a", 1, str(adapter)))
        kept = [weakref.ref(each) for each in big_tensors() if id(each) not in known]
        assert len(kept) >= 10
        llm.close()
        alive = [tensor.shape for each in kept if (tensor := each()) is not None]
        assert not alive
    finally:
        gc.enable()
    for thread in set(threading.enumerate()) - threads:
        thread.join(30)
        assert not thread.is_alive(), thread.name


def test_a_fork_does_not_have_it(offline: OfflineService) -> None:
    """A fork cannot use the engine, and the fork's end does not affect the parent's resources."""
    pid = os.fork()
    if not pid:  # in the child: nothing may get out of here
        code = 1
        try:
            signal.alarm(30)
            with contextlib.suppress(Closed):
                offline.run(pieces_of(offline, PROMPTS))
                os._exit(2)
            offline.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(offline.run(pieces_of(offline, PROMPTS))) == len(PROMPTS)


def test_an_engine_that_fails_ends_what_it_had(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pd_cluster.engine.scheduling.step_plan import StepPlan
    from pd_cluster.engine.step.engine_core import EngineCore

    with OfflineService(OfflineConfig(engine=EngineConfig(model=str(model), num_blocks=64))) as made:
        made.run(pieces_of(made, PROMPTS))

        run = EngineCore.run

        def fail(core: EngineCore, plan: StepPlan, *rest: Any) -> Any:
            if not plan.chunks:  # an empty step of the first call may still be under way
                return run(core, plan, *rest)
            raise RuntimeError("out of luck")

        monkeypatch.setattr(EngineCore, "run", fail)
        with pytest.raises(GenerationError, match="out of luck"):
            made.run(pieces_of(made, PROMPTS[:1]))
        with pytest.raises(PdClusterError, match="out of luck"):
            made.run(pieces_of(made, PROMPTS[:1]))


def test_what_cannot_be_made(model: Path, tmp_path: Path) -> None:
    engine = EngineConfig(model=str(model))
    with pytest.raises(ConfigError, match="prefill 1, decode 0"):
        OfflineService(OfflineConfig(engine=engine, prefill=1))
    with pytest.raises(ModelError):
        OfflineService(OfflineConfig(engine=EngineConfig(model=str(tmp_path))))
    with pytest.raises(ConfigError, match="tensor_parallel_size 2"):
        OfflineService(OfflineConfig(engine=EngineConfig(model=str(model), tensor_parallel_size=2)))
    with pytest.raises(ConfigError):
        OfflineService(OfflineConfig(engine=EngineConfig(model=str(model), max_model_len=10**6)))


# ---- an engine that has ended holds no resource of the system


GUIDED = SamplingParams(max_tokens=4, temperature=0, guided_decoding=GuidedDecodingParams(regex="[ab]{4}"))
PARAMS = SamplingParams(max_tokens=4, temperature=0)
NOTHING: Counter[str] = Counter()


SMALL: dict[str, Any] = {"num_blocks": 64, "max_model_len": 64}


def one_llm(model: Path, params: SamplingParams = PARAMS, **more: Any) -> None:
    with LLM(str(model), **SMALL, **more) as llm:
        assert llm.generate("Hello", params, use_tqdm=False)[0].outputs[0].text


def one_with_a_guide(model: Path) -> None:
    """Covers a guide, which has threads and a checking process."""
    one_llm(model, GUIDED)


def one_pipeline(model: Path) -> None:
    with pipeline(str(model)) as pipe:
        assert pipe(["Hello"], gen_config=GenerationConfig(max_new_tokens=2))


def one_fastdeploy(model: Path) -> None:
    with FastDeployLLM(str(model), **SMALL) as llm:
        assert llm.generate(["Hello"], use_tqdm=False)


def one_split(model: Path) -> None:
    one_llm(model, prefill=1, decode=1)


public_port = functools.cache(free_port_pair)  # reserved while this process lives, as `up` reserves it


def one_up(model: Path) -> None:
    """Starts and ends a cluster as `pd-cluster up` does."""

    async def run(launch: Launch) -> None:
        cluster = Cluster(launch, lambda line: None)
        try:
            await cluster.start()
            await cluster.wait_ready()
        finally:
            await cluster.stop()

    flags = ["--num-blocks=64", "--max-model-len=64"]
    asyncio.run(run(Launch(model=str(model), port=public_port(), arguments=flags)))


def one_that_cannot_start(model: Path) -> None:
    """Covers an adapter of a wider model, an error that is found after the pool was made."""
    adapter = model.parent / "wide-adapter"
    with pytest.raises(ModelError, match="wide-adapter"):
        LLM(str(model), **SMALL, enable_lora=True, lora_modules=[f"wide={adapter}"])


@pytest.fixture
def uncollected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stops the garbage collector, and gives the test its own folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def check_rounds(one: Callable[[Path], None], model: Path, num_rounds: int) -> None:
    one(model)  # imports, and libraries' threads and caches, remain
    before = held()
    for _ in range(num_rounds):
        one(model)
    assert more_than(before) == NOTHING


@pytest.mark.usefixtures("uncollected", "one_thread")
@pytest.mark.parametrize("one", [one_llm, one_with_a_guide, one_pipeline, one_fastdeploy, one_that_cannot_start])
def test_an_engine_in_this_process_leaves_nothing(one: Callable[[Path], None], checkpoint: Callable[..., Path]) -> None:
    if one is one_that_cannot_start:
        make_adapter(checkpoint("llama").parent / "wide-adapter", checkpoint("llama", hidden_size=128), only="q_proj")
    check_rounds(one, checkpoint("llama"), 1)


@pytest.mark.usefixtures("uncollected")
def test_closed_but_kept_it_holds_nothing(checkpoint: Callable[..., Path]) -> None:
    one_llm(checkpoint("llama"))
    before = held()
    llm = LLM(str(checkpoint("llama")), **SMALL)
    llm.close()
    llm.close()
    assert more_than(before) == NOTHING
    with pytest.raises(Closed, match="make a new one"):
        llm.generate("Hello", PARAMS, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("one", [one_llm, one_with_a_guide, one_pipeline, one_split, one_up])
def test_ten_of_each_leave_nothing(one: Callable[[Path], None], checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("llama", seed=3)  # no other test's command line has this folder
    check_rounds(one, model, 10)
    assert processes_of(str(model)) == []
