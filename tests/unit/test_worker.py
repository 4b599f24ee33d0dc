"""A worker without sockets or a model: legs of several sequences arrive, end singly, are aborted or time out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import ConnClosed, Mail
from pd_cluster.engine.legs import output_batcher
from pd_cluster.engine.scheduling.step_plan import StepPlan
from pd_cluster.engine.step.beam_search import are_first_tokens
from pd_cluster.engine.step.engine_core import StepResult
from pd_cluster.engine.step.engine_limits import EngineLimits
from pd_cluster.engine.step.look_ahead import Begins
from pd_cluster.model.layers.rope.rope_limit import RopeLimit
from pd_cluster.numerics import Numerics
from pd_cluster.types import MAX_GUIDE_NUM_CHARS, Guide, Leg, Request, RequestSpec, Resumed, Role, Sampling
from tests.support.toy_model import VOCAB_SIZE, generate_alone
from tests.support.worker_world import CONN, LAYOUT, NUM_BLOCKS, PROMPT, World, found, peer, sampling


def beams(width: int, **changes: Any) -> Sampling:
    return sampling(**{"n": width, "beam_width": width, "temperature": 0.0, **changes})


@pytest.fixture
def world() -> Iterator[World]:
    """Yields a world; asserts afterwards that nothing of any request is left."""
    made = World()
    yield made
    made.assert_home()


def test_the_scheduler_says_which_role_it_has(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[list[str]] = []
    monkeypatch.setattr(
        world.worker.handover.out_links, "set_peers", lambda peers: links.append([p.name for p in peers])
    )
    others = [peer("prefill-0", 2, "prefill"), peer("decode-1", 3, "decode"), peer("prefill-1", 4, "decode")]
    others += [msgspec.structs.replace(peer("decode-2", 5, "decode"), is_forming=True)]  # visible only to its unit
    roles: tuple[Role, ...] = ("decode", "prefill", "decode", "prefill")
    for role in roles:
        world.mail(wire.Peers([peer("decode-0", 1, role), *others]))
    world.mail(wire.Peers([peer("decode-0", 99, "decode"), *others]))  # another process with its name
    world.mail(wire.Peers([]))
    world.step()
    both = ["decode-1", "prefill-1"]
    assert links == [[], both, [], both, ["decode-0", *both], []]


def test_links_are_taken_from_those_that_the_scheduler_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = wire.LinkOpen("l", "model", Numerics(), [LAYOUT.to_info()], [NUM_BLOCKS], wire.KVOptions(), [])
    told: list[bool] = []
    monkeypatch.setattr(
        world.worker.handover.in_links, "on_open", lambda conn, peer, opened, is_announced: told.append(is_announced)
    )
    forming = msgspec.structs.replace(peer("prefill-1", 2, "prefill"), is_forming=True)
    world.mail(wire.Peers([peer("decode-0", 1, "decode"), peer("prefill-0", 2, "prefill"), forming]))
    for name in ("prefill-0@2", "prefill-0@3", "prefill-9@2", "prefill-1@2"):
        world.inbox.put(Mail("link", name, opened))
    world.step()
    assert told == [True, False, False, False]


def test_what_metrics_show_is_reported_when_it_changes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is reported before the first step of an admitted request; without a change nothing is reported."""
    worker, run = world.worker, world.worker.core.run
    world.steps(3)
    assert world.post.num_beats <= 1  # reports the pool's size
    before, seen = world.post.num_beats, []

    def note(plan: StepPlan, begins: Begins) -> StepResult:
        seen.append((worker.load.num_running, world.post.num_beats - before))
        return run(plan, begins)

    monkeypatch.setattr(worker.core, "run", note)
    world.submit("r", PROMPT, sampling(n=1, max_tokens=2))
    world.run()
    assert seen[0] == (1, 1)
    assert worker.load.num_running == 0
    assert worker.load.step_tokens == wire.Tally((1, 1, *[0] * 12), len(PROMPT) + 1)
    assert worker.load.preemptions == wire.Tally((1, *[0] * 7), 0)
    before = world.post.num_beats
    world.steps(5)
    assert world.post.num_beats == before


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_one_sequence_is_aborted_and_the_others_go_on(num_steps: int) -> None:
    """Covers aborts before the fork, just after it, and later; the fork's token is always reported."""
    expected = generate_alone(PROMPT, sampling())
    for index in range(3):
        world = World()
        world.submit("r", PROMPT, sampling())
        world.steps(num_steps)
        world.mail(wire.Abort("r", 0, index))
        world.run()
        left = [tokens[: max(1, num_steps)] if at == index else tokens for at, tokens in enumerate(expected)]
        assert found(world, "r") == left
        world.assert_home()


@pytest.mark.parametrize("lens", [{0: 3}, {0: 0, 1: 2, 2: 7}, {0: 0, 2: 0}])
def test_sequences_go_on_after_what_was_told_elsewhere(world: World, lens: dict[int, int]) -> None:
    """Covers sequences that ended elsewhere, which are not sent, and sequences without reported tokens."""
    expected = generate_alone(PROMPT, sampling())
    world.resume("r", RequestSpec(PROMPT, sampling()), {index: expected[index][:num] for index, num in lens.items()})
    world.run()
    assert dict(world.post.tokens["r"]) == {index: expected[index] for index in lens}


@pytest.mark.parametrize("seed", range(8))
def test_sequences_that_go_on_do_not_take_each_others_blocks(seed: int) -> None:
    """Sequences that recompute reported tokens must not use siblings' blocks from the prefix cache."""
    world, rng = World(), random.Random(seed)
    prompt = [rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
    params = sampling(max_tokens=24, seed=seed)
    expected = generate_alone(prompt, params)
    told = {index: expected[index][: rng.choice([1, 9, 15, rng.randrange(24)])] for index in range(3)}
    world.resume("r", RequestSpec(prompt, params, gathers=rng.random() < 0.5), told)
    world.run()
    assert found(world, "r") == expected
    world.assert_home()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_one_of_the_sequences_that_go_on_is_aborted(world: World, num_steps: int) -> None:
    expected = generate_alone(PROMPT, sampling())
    world.resume("r", RequestSpec(PROMPT, sampling()), {index: expected[index][:2] for index in range(3)})
    world.steps(num_steps)
    world.mail(wire.Abort("r", 1, 1))
    world.run()
    tokens = found(world, "r")
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])
    assert len(tokens[1]) < len(expected[1])


def test_what_cannot_go_on_is_refused(world: World) -> None:
    legs: list[tuple[Leg, list[Resumed]]] = [
        ("prefill", [Resumed(0, [1])]),
        ("hybrid", [Resumed(0, [1]), Resumed(0, [2])]),
        ("hybrid", [Resumed(3, [1])]),
        ("hybrid", [Resumed(0, [1] * 8)]),
        ("hybrid", [Resumed(0, [VOCAB_SIZE])]),
    ]
    for leg, resumed in legs:
        world.mail(wire.Submit("r", 1, "r-1", leg, "decode-0@2", RequestSpec(PROMPT, sampling()), 0.0, resumed))
        world.step()
        end = world.post.ended.pop()
        assert "resumed" in (end.error or "")
        assert not end.is_fault
    assert not world.post.ended


def test_beams_leave_all_at_once(world: World) -> None:
    """All beams are sent in one message, with no token before it; aborting one beam has no effect."""
    world.submit("r", PROMPT, beams(3))
    world.steps(4)
    assert not world.post.tokens
    world.mail(wire.Abort("r", 0, 1))
    world.run()
    assert found(world, "r") == generate_alone(PROMPT, beams(3))
    (message,) = [outputs for _, outputs in world.post.messages if outputs.tokens]
    assert [t.finish_reason for t in message.tokens if t.finish_reason is not None] == ["length"] * 3


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_candidates_are_handed_over_and_not_told(
    world: World, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """Candidates are handed over instead of sent; a search of one token ends at the prefill instance."""
    shipped = world.take_links(monkeypatch)
    params = beams(3, max_tokens=max_tokens)
    world.mail(wire.Submit("r", 0, "r", "prefill", "decode-0@2", RequestSpec(PROMPT, params), 0.0))
    world.step()
    if max_tokens > 1:
        world.inbox.put(Mail("link", "decode-0@2", wire.Credit("r", [0])))
        world.worker.handover.credits.put(("link", wire.Credit("r", [0])))
        world.step()
        assert not world.post.tokens
        (end,) = shipped.ends
        assert are_first_tokens(Request("r", RequestSpec(PROMPT, params)), end.first_tokens, VOCAB_SIZE)
        world.mail(wire.Abort("r", 0))
        world.step()
    else:
        assert found(world, "r") == generate_alone(PROMPT, params)
        assert not shipped.ends
    assert shipped.sent[-1] == wire.Revoke("r")


def test_tokens_with_many_logprobs_are_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have a limited size, so logprobs are split over several; a prompt comes before its tokens."""
    monkeypatch.setattr(output_batcher, "MAX_MESSAGE_LOGPROBS", 10)
    world = World()
    many = sampling(n=1, max_tokens=3, logprobs=6)
    for name in "abc":
        world.submit(name, PROMPT, many)
    world.run()
    messages = [message for _, message in world.post.messages]
    numbers = [sum(len(token.logprobs.top) for token in each.tokens if token.logprobs) for each in messages]
    assert max(numbers) <= 10
    assert sum(numbers) == 3 * 3 * 6
    for name in "abc":
        assert world.post.tokens[name][0] == generate_alone(PROMPT, many)[0]
        prompted = [name in {each.request_id for each in message.prompts} for message in messages].index(True)
        assert prompted <= [name in {each.request_id for each in message.tokens} for message in messages].index(True)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_deadline_ends_all_sequences_once(world: World, num_steps: int) -> None:
    world.submit("r", PROMPT, sampling(), deadline_s=0.1 + 0.2 * num_steps)
    world.run()
    assert [(e.request_id, e.error) for e in world.post.ended] == [("r", "the request's deadline has passed")]


@pytest.mark.parametrize("n", [1, 3])
def test_a_guide_that_cannot_be_followed_ends_its_request_only(world: World, n: int) -> None:
    world.submit("r", PROMPT, sampling())
    world.submit("guided", PROMPT, sampling(n=n, guide=Guide("regex", "a+")))
    world.submit("too long", PROMPT, sampling(n=n, guide=Guide("regex", "a" * (MAX_GUIDE_NUM_CHARS + 1))))
    world.run()
    why = "its guide cannot be followed: this engine has no tokenizer, which guides need"
    long = "a guide of 262145 characters; at most 262144 are allowed"
    assert sorted((each.request_id, each.error) for each in world.post.ended) == [("guided", why), ("too long", long)]
    assert found(world, "r") == generate_alone(PROMPT, sampling())


def test_a_scheduler_that_is_gone_leaves_nothing_behind(world: World) -> None:
    world.submit("r", PROMPT, sampling())
    world.submit("s", PROMPT, beams(4))
    world.steps(2)
    world.inbox.put(ConnClosed(CONN, "scheduler@1", "cut"))
    world.run()


def test_what_the_engine_cannot_do_ends_that_leg_only(world: World) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"n": 0}, "n 0 must be in 1 to 1024"),
        ({"temperature": float("nan")}, "temperature nan must be in [0, inf)"),
        ({"min_p": 1.5}, "min_p 1.5 must be in [0, 1]"),
        ({"logit_bias": ((1, float("nan")),)}, "logit_bias must be finite numbers"),
        ({"top_p": 0.0}, "top_p 0.0 must be in (0, 1]"),
        ({"repetition_penalty": -1.0}, "repetition_penalty -1.0 must be in (0, inf)"),
        ({"logit_bias": ((VOCAB_SIZE, 1.0),)}, "token ids in sampling parameters must be in 0 to"),
        ({"allowed_token_ids": (-1,)}, "token ids in sampling parameters must be in 0 to"),
        ({"bad_words": ((),)}, "token ids in sampling parameters must be in 0 to"),
        ({"logprobs": -1}, "logprobs, prompt_logprobs and min_tokens must not be negative"),
        ({"prompt_logprobs": 10**6}, "prompt_logprobs 1000000 for 5 tokens are too many to return"),
        ({"max_tokens": 36}, "5 prompt tokens and max_tokens 36 exceed max_model_len 40"),
    ]
    world.submit("good", PROMPT, sampling())
    for at, (changes, _) in enumerate(refused):
        world.submit(str(at), PROMPT, sampling(**changes))
    world.run()
    ended = {each.request_id: each.error or "" for each in world.post.ended}
    assert ended.keys() == set(map(str, range(len(refused))))
    for at, (_, problem) in enumerate(refused):
        assert ended[str(at)].startswith(problem)
    assert found(world, "good") == generate_alone(PROMPT, sampling())


def test_only_logprobs_of_a_prompt_limit_its_length() -> None:
    limits, prompt = EngineLimits(VOCAB_SIZE, 2_000_000, RopeLimit()), [1] * 1_000_001
    assert limits.problem(Request("r", RequestSpec(prompt, sampling()))) is None
    told = limits.problem(Request("r", RequestSpec(prompt, sampling(prompt_logprobs=0))))
    assert told == "prompt_logprobs 0 for 1000001 tokens are too many to return; at most 1000000 logprobs are allowed"


@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 1 << 32, 1 << 64, -(1 << 64)])
def test_a_prompt_has_only_tokens_of_the_vocabulary(wrong: int) -> None:
    limits = EngineLimits(VOCAB_SIZE, 100, RopeLimit())
    told = f"prompt token ids must be in 0 to {VOCAB_SIZE - 1}"
    assert limits.problem(Request("r", RequestSpec([0, VOCAB_SIZE - 1], sampling()))) is None
    assert limits.problem(Request("r", RequestSpec([0, wrong, 1], sampling()))) == told


@pytest.mark.parametrize("seed", range(8))
def test_random_aborts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_batcher, "MAX_UNSENT", 3)
    rng = random.Random(seed)
    world = World()
    wanted: dict[str, tuple[list[int], Sampling]] = {}
    touched: set[tuple[str, int]] = set()
    for at in range(100):
        if at < 50 and rng.random() < 0.4:
            name = f"r{at}"
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 14))]
            max_tokens = rng.randrange(1, 12)
            params = sampling(n=rng.randrange(1, 7), max_tokens=max_tokens, seed=at)
            if rng.random() < 0.3:
                params = beams(rng.randrange(2, 7), n=rng.choice([1, 2]), max_tokens=max_tokens)
            wanted[name] = prompt, params
            world.submit(name, prompt, params, gathers=rng.random() < 0.5)
        if wanted and rng.random() < 0.2:
            name, index = rng.choice(list(wanted)), rng.randrange(-1, 7)
            world.mail(wire.Abort(name, 0, index))
            touched |= {(name, i) for i in range(7) if index in (-1, i)}
        world.step()
    world.run()
    world.assert_home()
    for name, (prompt, params) in wanted.items():
        for index, expected in enumerate(generate_alone(prompt, params)):
            tokens = world.post.tokens[name][index]
            assert tokens == expected[: len(tokens)]
            assert len(tokens) == len(expected) or (name, index) in touched, f"{name}/{index} never ended"
