"""Pooling requests are routed to one instance, replayed, and end with nothing held."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_cluster import wire
from pd_cluster.checkpoints.pooling_config import pooling_kind_of
from pd_cluster.engine.handover.engine_events import ConnClosed
from pd_cluster.engine.step.engine_limits import EngineLimits
from pd_cluster.errors import GenerationError, InstanceLost, ModelError, RequestError
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.offline.llm_pooling import PoolingParams, check_task, paired_pooling
from pd_cluster.offline.llm_sampling import SamplingParams as OfflineParams
from pd_cluster.types import NO_SAMPLING, LegEnd, PooledOutput, Pooling, Request, RequestSpec, Resumed, Sampling
from tests.support.keyed_port import Port, key_of
from tests.support.public_port import Answer
from tests.support.router_world import World, token
from tests.support.toy_model import VOCAB_SIZE, generate_alone, hidden_state_after, logits_after
from tests.support.worker_world import CONN
from tests.support.worker_world import World as WorkerWorld

PROMPT = [5, 6, 7, 8, 9, 10, 11]
LOGITS = Pooling(kind="logits", token_ids=(7, 3, 7))
MEAN = Pooling(kind="mean", normalizes=False)
VECTOR = struct.pack("<2f", 3.0, 4.0)


def greedy(max_tokens: int, **more: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


# ---- at the scheduler


def pool(world: World) -> asyncio.Task[PooledOutput]:
    return asyncio.ensure_future(world.router.pool(RequestSpec(PROMPT, NO_SAMPLING, pooling=MEAN)))


async def submitted(world: World, count: int) -> tuple[str, wire.Submit]:
    while len(world.mailbox.of(wire.Submit)) < count:
        await asyncio.sleep(0)
    found: tuple[str, wire.Submit] = world.mailbox.of(wire.Submit)[-1]
    return found


def tell(world: World, conn: str, submit: wire.Submit) -> None:
    pooled = PooledOutput(submit.request_id, submit.attempt, VECTOR, 3)
    world.router.on_outputs(conn, wire.Outputs(pooled=[pooled]))


async def test_one_prefill_instance_takes_it_and_no_decode_leg() -> None:
    world = World()
    world.instances[0].outstanding_tokens += 50  # the other instance has less work
    task = pool(world)
    conn, submit = await submitted(world, 1)
    assert (conn, submit.leg, submit.peer) == ("to-prefill-1", "hybrid", "")
    assert submit.order.pooling == MEAN
    assert sum(instance.num_sequences for instance in world.instances) == 0
    tell(world, conn, submit)
    assert (await task).vector == VECTOR
    assert len(world.mailbox.of(wire.Submit)) == 1
    assert world.mailbox.of(wire.Abort) == []  # the leg had already ended
    world.instances[0].outstanding_tokens -= 50
    world.assert_home()
    stats = world.router.stats.snapshot()
    assert stats.counters["finished_stop"] == 1
    assert stats.counters["prompt_tokens"] == len(PROMPT)
    assert stats.counters["generation_tokens"] == 0
    counted = {name for name, each in stats.histograms.items() if sum(each.counts)}
    assert counted == {"num_prompt_tokens", "num_computed_tokens", "whole_s"}


async def test_links_do_not_matter_and_a_decode_instance_is_the_last_resort() -> None:
    world = World()
    for prefill in world.instances[:2]:
        prefill.load = wire.Load()
    first = pool(world)
    conn, submit = await submitted(world, 1)
    assert conn == "to-prefill-0"
    tell(world, conn, submit)
    await first
    for prefill in world.instances[:2]:
        prefill.state = "unreachable"
    second = pool(world)
    conn, submit = await submitted(world, 2)
    assert (conn, submit.leg) == ("to-decode-0", "hybrid")
    tell(world, conn, submit)
    await second
    world.assert_home()


async def test_it_is_computed_again_elsewhere() -> None:
    for how in ("death", "fault"):
        world = World()
        task = pool(world)
        conn, submit = await submitted(world, 1)
        if how == "death":
            world.lose("prefill-0")
        else:
            world.outputs(conn, ended=LegEnd(submit.request_id, 0, "it stops", is_fault=True))
        again, second = await submitted(world, 2)
        assert (conn, again) == ("to-prefill-0", "to-prefill-1")
        assert (second.attempt, second.resumed, second.order) == (1, [], submit.order)
        tell(world, conn, submit)  # a message of the previous attempt is dropped
        await asyncio.sleep(0)
        assert not task.done()
        tell(world, again, second)
        assert (await task).attempt == 1
        world.assert_home()


async def test_too_many_deaths_a_refusal_and_a_token_are_errors() -> None:
    world = World()
    task = pool(world)
    conn, submit = await submitted(world, 1)
    world.outputs(conn, ended=LegEnd(submit.request_id, 0, "dimensions 9", is_refusal=True))
    with pytest.raises(RequestError, match="dimensions 9"):
        await task
    task = pool(world)
    conn, submit = await submitted(world, 2)
    world.outputs(conn, token(submit.request_id, 0))
    with pytest.raises(GenerationError, match="instead of a vector"):
        await task
    task = pool(world)
    for count in (3, 4, 5):
        conn, _ = await submitted(world, count)
        world.lose(conn.removeprefix("to-"))
    with pytest.raises(InstanceLost):
        await task
    task = pool(world)  # its client leaves
    conn, _ = await submitted(world, 6)
    before = world.aborted()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert world.aborted() == sorted([*before, conn])
    world.assert_home()


# ---- at a worker


def submit_to(world: WorkerWorld, name: str, order: RequestSpec, deadline_s: float = 0.0) -> None:
    world.mail(wire.Submit(name, 0, name, "hybrid", "", order, deadline_s))


def test_a_worker_sends_the_vector_and_holds_nothing() -> None:
    world = WorkerWorld()
    prompt = [4 + at % 30 for at in range(21)]  # several chunks
    submit_to(world, "p", RequestSpec(prompt, NO_SAMPLING, pooling=MEAN))
    world.submit("g", PROMPT, greedy(4))
    world.run()
    world.assert_home()
    (pooled,) = [each for _, body in world.post.messages for each in body.pooled]
    states = [hidden_state_after(prompt[: at + 1]).double().numpy() for at in range(len(prompt))]
    expected = (np.sum(states, axis=0) / len(prompt)).astype(np.float32)
    assert np.allclose(np.frombuffer(pooled.vector, "<f4"), expected, rtol=1e-6)
    assert world.post.ended == []
    assert [world.post.tokens["g"][0]] == generate_alone(PROMPT, greedy(4))


def test_logits_in_steps_with_vectors_and_answers() -> None:
    """In a step with pooled prompts, sequences that sample still get their own logits."""
    world = WorkerWorld()
    prompts = {name: [4 + (at + start) % 30 for at in range(9 + start)] for start, name in enumerate("abcdef")}
    for name, pooling in (("a", LOGITS), ("c", MEAN), ("d", LOGITS)):
        submit_to(world, name, RequestSpec(prompts[name], NO_SAMPLING, pooling=pooling))
    world.submit("b", prompts["b"], greedy(5))
    world.submit("e", prompts["e"], greedy(5, prompt_logprobs=1))
    submit_to(world, "f", RequestSpec(prompts["f"], NO_SAMPLING, pooling=LOGITS))
    world.run()
    world.assert_home()
    found = {each.request_id: each.vector for _, body in world.post.messages for each in body.pooled}
    assert set(found) == {"a", "c", "d", "f"}
    for name in "adf":
        expected = logits_after(prompts[name])[[7, 3, 7]].numpy()
        assert found[name] == expected.tobytes()
    for name in "be":
        assert [world.post.tokens[name][0]] == generate_alone(prompts[name], greedy(5))


def test_an_end_in_the_middle() -> None:
    for how in ("abort", "deadline", "scheduler gone"):
        world = WorkerWorld()
        order = RequestSpec([5] * 40, NO_SAMPLING, pooling=MEAN)
        submit_to(world, "p", order, deadline_s=0.3 if how == "deadline" else 0.0)
        world.step()
        assert world.worker.core.pooler.sums
        if how == "abort":
            world.mail(wire.Abort("p", 0))
        elif how == "scheduler gone":
            world.inbox.put(ConnClosed(CONN, "scheduler@1", "it is gone"))
        for _ in range(4):
            world.step()
        world.assert_home()
        assert not world.worker.core.pooler.sums
        assert all(not body.pooled for _, body in world.post.messages)
        assert len(world.post.ended) == (how == "deadline")


def test_limits_of_an_engine() -> None:
    limits = EngineLimits(VOCAB_SIZE, 20, RopeLimit())
    cases: list[tuple[Any, Sampling, Pooling, list[Resumed], str]] = [
        ("hybrid", NO_SAMPLING, MEAN, [], ""),
        ("hybrid", NO_SAMPLING, LOGITS, [], ""),
        ("hybrid", Sampling(temperature=0.5), MEAN, [], "temperature 0.5: "),
        ("hybrid", Sampling(n=2), MEAN, [], "n 2: "),
        ("hybrid", NO_SAMPLING, Pooling(dimensions=0), [], "dimensions 0 "),
        ("hybrid", NO_SAMPLING, Pooling(token_ids=(1,)), [], "token_ids need a pooling of kind logits, not last"),
        ("hybrid", NO_SAMPLING, Pooling(kind="logits"), [], "needs 1 to 64 token_ids in 0 to 39"),
        ("hybrid", NO_SAMPLING, Pooling(kind="logits", token_ids=(40,)), [], "needs 1 to 64 token_ids in 0 to 39"),
        ("hybrid", NO_SAMPLING, Pooling(kind="logits", token_ids=(1,), dimensions=1), [], "dimensions do not apply"),
        ("prefill", NO_SAMPLING, LOGITS, [], "a hybrid leg"),
        ("decode", NO_SAMPLING, MEAN, [], "a hybrid leg"),
        ("hybrid", NO_SAMPLING, MEAN, [Resumed(0, [3])], "resumed"),
    ]
    for leg, sampling, pooling, resumed, problem in cases:
        found = limits.problem(Request("r", RequestSpec([1] * 20, sampling, pooling=pooling), leg=leg), resumed)
        assert (found is None) == (not problem)
        assert problem in (found or "")
    too_long = limits.problem(Request("r", RequestSpec([1] * 21, NO_SAMPLING, pooling=MEAN)))
    assert "21 prompt tokens exceed max_model_len 20" in (too_long or "")


# ---- a checkpoint's pooling method


def test_the_files_of_sentence_transformers(tmp_path: Path) -> None:
    assert pooling_kind_of(tmp_path) == "last"
    (tmp_path / "1_Pooling").mkdir()
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Normalize")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for config, kind in (
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ):
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
        assert pooling_kind_of(tmp_path) == kind


def test_files_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    for file, text, problem in (
        ("1_Pooling/config.json", '{"pooling_mode_cls_token": true}', "pooling_mode cls_token is not supported"),
        ("1_Pooling/config.json", '{"pooling_mode": ["mean", "lasttoken"]}', "mean and lasttoken"),
        ("1_Pooling/config.json", "{}", "pooling_mode missing"),
        ("1_Pooling/config.json", "{", "cannot be read"),
        ("modules.json", '[{"type": "sentence_transformers.models.Dense"}]', "module type .*Dense"),
    ):
        (tmp_path / file).write_text(text)
        with pytest.raises(ModelError, match=problem):
            pooling_kind_of(tmp_path)


# ---- parameters in Python


def test_wrong_parameters_are_named() -> None:
    wrong: list[tuple[Any, str]] = [
        (OfflineParams(temperature=0.5, max_tokens=3), "SamplingParams with temperature, max_tokens; no token"),
        ([PoolingParams()], "1 for 2 prompts"),
        ({"dimensions": 3}, "dict; must be PoolingParams"),
        ([PoolingParams(), None], r"pooling_params\[1\]: NoneType"),
        (PoolingParams(dimensions=0), "dimensions: 0; "),
        (PoolingParams(truncate_prompt_tokens=0), "truncate_prompt_tokens: 0; "),
        (PoolingParams(normalize=True, use_activation=False), "use_activation: False, but normalize is True"),
        (PoolingParams(task="classify"), "task: 'classify' is not supported"),
    ]
    for params, problem in wrong:
        with pytest.raises(RequestError, match=problem):
            paired_pooling(params, 2)
    given = [PoolingParams(), PoolingParams(normalize=False), PoolingParams(use_activation=False)]
    assert [each.normalizes for each in paired_pooling(given, 3)] == [True, False, False]
    check_task("pooling_task", "embed")
    with pytest.raises(RequestError, match="pooling_task: 'token_embed' is not supported"):
        check_task("pooling_task", "token_embed")


# ---- embeddings at the public port: limits, refunds, salts and priorities as on other routes


INPUT = [[1, 2, 3], [4, 5]]
Make = Callable[..., Port]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda *keys: Port(tmp_path, keys)


async def submits(port: Port, count: int) -> list[tuple[str, wire.Submit]]:
    async with asyncio.timeout(20):
        while len(found := port.world.mailbox.of(wire.Submit)) < count:
            await asyncio.sleep(0)
    return list(found)


def embed(port: Port, key: str, **more: Any) -> asyncio.Task[Answer]:
    return asyncio.ensure_future(port.ask(key, "POST", "/v1/embeddings", input=INPUT, model="tiny", **more))


async def test_prompt_tokens_are_reserved_and_charged_and_nothing_for_an_answer(make: Make) -> None:
    port = make(key_of("k", tokens_per_minute=8), key_of("other", tenant="b", tokens_per_minute=100))
    task = embed(port, "k")
    legs = await submits(port, 2)
    assert port.left("k")[1] == 8 - 5
    for conn, submit in legs:
        pooled = PooledOutput(submit.request_id, 0, VECTOR, num_cached_tokens=1)
        port.world.router.on_outputs(conn, wire.Outputs(pooled=[pooled]))
    answer = await task
    assert answer.status == 200
    body = answer.json()
    assert [each["embedding"] for each in body["data"]] == [[3.0, 4.0]] * 2
    cached = {"cached_tokens": 2}
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "prompt_tokens_details": cached}
    assert port.left("k")[1] == 8 - 5
    assert port.counted("prompt_tokens") == {"team": 5}
    refused = await embed(port, "k")
    assert refused.status == 429
    task = embed(port, "other", cache_salt="own")
    legs = await submits(port, 4)
    salts = {submit.order.cache_salt for _, submit in legs}
    assert len(salts - {"", "own"}) == 2  # each tenant has its own
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(port.world.mailbox.of(wire.Abort)) == 2
    port.world.assert_home()


async def test_one_prompt_that_fails_ends_all_and_gives_back_what_was_not_sent(make: Make) -> None:
    port = make(key_of("k", tokens_per_minute=100))
    task = embed(port, "k", dimensions=9)
    (conn, submit), _ = await submits(port, 2)
    port.world.outputs(conn, ended=LegEnd(submit.request_id, 0, "dimensions 9: too many", is_refusal=True))
    answer = await task
    assert answer.status == 400
    assert len(port.world.mailbox.of(wire.Abort)) == 1
    port.world.assert_home()
    answer = await embed(port, "k", priority=2)  # only with a server that allows priorities
    assert (answer.status, answer.json()["error"]["param"]) == (400, "priority")
    too_much = await port.ask("k", "POST", "/v1/embeddings", input=[[1] * 60, [2] * 60])
    assert too_much.status == 400
    assert too_much.json()["error"]["code"] == "larger_than_rate_limit"
