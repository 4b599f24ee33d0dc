"""vLLM's and TACO-LLM's AsyncLLMEngine with a real engine: growing outputs, aborts, and shutdown."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, RequestOutput, RequestOutputKind, SamplingParams
from pd_cluster.errors import Closed, ConfigError, RequestError
from tests.support.checkpoints import reference_greedy

PROMPT = [5, 6, 7, 8]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SMALL: dict[str, Any] = {"max_model_len": 256, "num_blocks": 64}
TIMEOUT_S = 60

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[AsyncLLMEngine]:
    with AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(model), **SMALL)) as made:
        yield made


async def outputs_of(engine: AsyncLLMEngine, prompt: Any, params: Any, name: str, **more: Any) -> list[RequestOutput]:
    async with asyncio.timeout(TIMEOUT_S):
        return [output async for output in engine.generate(prompt, params, name, **more)]


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_outputs_grow(engine: AsyncLLMEngine, model: Path) -> None:
    wanted = reference_greedy(model, PROMPT, 6)[:6]
    outputs = asyncio.run(outputs_of(engine, {"prompt_token_ids": PROMPT}, GREEDY, "one"))
    assert len(outputs) > 3  # a token that ends inside a character comes with the next one
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"one"}
    for short, long in itertools.pairwise(token_ids(outputs)):
        assert len(short) < len(long)
        assert wanted[: len(long)] == long
    for one, more in itertools.pairwise(output.outputs[0].text for output in outputs):
        assert more.startswith(one)
    assert token_ids(outputs)[-1] == wanted
    assert (outputs[-1].outputs[0].finish_reason, outputs[-1].prompt_token_ids) == ("length", PROMPT)
    tokenizer = asyncio.run(engine.get_tokenizer())
    outputs = asyncio.run(outputs_of(engine, "hello", GREEDY, "text"))
    assert tokenizer("hello")["input_ids"] == outputs[-1].prompt_token_ids


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_output_kinds(engine: AsyncLLMEngine, kind: RequestOutputKind) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, n=2, logprobs=1)
    whole = asyncio.run(outputs_of(engine, "ab", params, "whole"))[-1]
    params.output_kind = kind
    outputs = asyncio.run(outputs_of(engine, "ab", params, "kind"))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert (len(outputs) == 1) is (kind is RequestOutputKind.FINAL_ONLY)
    for at, choice in enumerate(whole.outputs):
        own = [each for output in outputs for each in output.outputs if each.index == at]
        assert [token for each in own for token in each.token_ids] == choice.token_ids
        assert "".join(each.text for each in own) == choice.text
        assert [told for each in own for told in each.logprobs or []] == choice.logprobs


def test_the_best_of_several_come_at_the_end(engine: AsyncLLMEngine) -> None:
    best = SamplingParams(n=2, best_of=3, temperature=1.0, seed=5, max_tokens=4)
    (output,) = asyncio.run(outputs_of(engine, PROMPT, best, "best"))
    assert [each.finish_reason for each in output.outputs] == ["length", "length"]
    beams = SamplingParams(use_beam_search=True, n=2, best_of=3, temperature=0, max_tokens=4)
    *_, last = asyncio.run(outputs_of(engine, PROMPT, beams, "beams"))
    assert [(each.finish_reason, len(each.token_ids)) for each in last.outputs] == [("length", 4)] * 2


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
def test_an_abort_ends_an_answer_with_what_there_is(engine: AsyncLLMEngine, kind: RequestOutputKind) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=kind)

    async def ask() -> list[RequestOutput]:
        if kind is RequestOutputKind.FINAL_ONLY:
            work = asyncio.create_task(outputs_of(engine, PROMPT, params, "gone"))
            await outputs_of(engine, PROMPT, GREEDY, "beside")
            await engine.abort(["gone", "unknown"])
            return await work
        found = []
        async with asyncio.timeout(TIMEOUT_S):
            async for output in engine.generate(PROMPT, params, "gone"):
                found.append(output)
                if len(found) == 3:
                    await engine.abort("gone")
        return found

    outputs = asyncio.run(ask())
    last = outputs[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert sum(map(len, token_ids(outputs))) < 200
    assert token_ids(asyncio.run(outputs_of(engine, PROMPT, GREEDY, "gone")))[-1]


def test_leaving_the_iteration_ends_the_work(engine: AsyncLLMEngine) -> None:
    async def ask() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            stream = engine.generate(PROMPT, LONG, "left")
            await anext(stream)
            with pytest.raises(RequestError, match="'left' is being answered"):
                await anext(engine.generate(PROMPT, LONG, "left"))
            await stream.aclose()
            assert await outputs_of(engine, PROMPT, GREEDY, "left")

    asyncio.run(ask())


def test_errors_are_raised(engine: AsyncLLMEngine, model: Path) -> None:
    refused: list[tuple[Any, Any, str, str]] = [
        (PROMPT, GREEDY, "", "request_id: ''; give a name"),
        ([PROMPT, PROMPT], GREEDY, "a", "prompt: 2 prompts; give one"),
        (PROMPT, [GREEDY], "a", "sampling_params: "),
        (PROMPT, SamplingParams(temperature=-1), "a", "temperature"),
        ([5] * 300, GREEDY, "a", "256"),
    ]
    for prompt, params, name, said in refused:
        with pytest.raises(RequestError, match=said):
            asyncio.run(outputs_of(engine, prompt, params, name))
    with pytest.raises(ConfigError, match="max_modellen: unknown argument; did you mean max_model_len"):
        AsyncLLMEngine.from_engine_args(EngineArgs(str(model), max_modellen=64))


def test_a_shutdown_ends_answers(model: Path) -> None:
    engine = AsyncLLMEngine(str(model), **SMALL)

    async def ask() -> None:
        await engine.check_health()
        async with asyncio.timeout(TIMEOUT_S):
            stream = engine.generate(PROMPT, LONG, "ends")
            await anext(stream)
            await asyncio.to_thread(engine.shutdown)
            with pytest.raises(Closed, match="shut down"):
                async for _ in stream:
                    pass
        assert (engine.is_running, engine.errored) == (False, True)
        with pytest.raises(Closed):
            await engine.check_health()
        with pytest.raises(Closed):
            await anext(engine.generate(PROMPT, GREEDY, "late"))

    asyncio.run(ask())
