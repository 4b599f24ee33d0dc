"""How a worker sends tokens of steps with drafts: together, each once, with a report on the drafts."""

from __future__ import annotations

import random
from typing import Any, cast

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.engine.leg_trace import Tracer
from pd_cluster.engine.legs.output_batcher import OutputBatcher
from pd_cluster.types import (
    MAX_UNSENT,
    DraftReport,
    FinishReason,
    Logprobs,
    Request,
    RequestSpec,
    Sampling,
    TokenOutput,
)
from tests.support.drafts import liars
from tests.support.mail import RecordedMail
from tests.support.resume_values import DIGEST, ROOM, WINDOW_S
from tests.support.toy_model import VOCAB_SIZE, generate_alone
from tests.support.worker_world import PROMPT, World, sampling

S = "conn-of-s"


def tokens_of(start: int, stop: int, num_tokens: int, has_logprobs: bool) -> list[TokenOutput]:
    """Returns one step's tokens; an answer's last token ends it."""
    found = []
    for position in range(start, stop):
        logprobs = Logprobs(-position, 1, [(position, -0.5)]) if has_logprobs else None
        reason: FinishReason | None = "length" if position == num_tokens - 1 else None
        found.append(TokenOutput("r", 0, 0, position, 100 + position, reason, logprobs))
    return found


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_steps_of_any_size_are_told_whole_and_in_order(gathers: bool, has_logprobs: bool) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        post = RecordedMail()
        output_batcher = OutputBatcher(cast(Any, post), Tracer(), lambda: 0.0)
        num_tokens = rng.choice([1, 2, 64, 65, 66, 130, 300])
        order = RequestSpec([1], Sampling(max_tokens=num_tokens, logprobs=1 if has_logprobs else None), gathers=gathers)
        request, steps = Request("r", order, client=S), list[tuple[int, int]]()
        given: list[TokenOutput] = []
        while len(given) < num_tokens:
            size = 1 if not given else min(rng.choice([1, 1, 2, 5, 64, 65]), num_tokens - len(given))
            group = tokens_of(len(given), len(given) + size, num_tokens, has_logprobs)
            request.output_token_ids += [token.token_id for token in group]
            if size > 1 or rng.random() < 0.3:
                steps.append((size + 1, size - 1))
                request.draft_report = (request.draft_report or DraftReport()).plus(size - 1, 1, steps[-1])
            given += group
            output_batcher.add_group(request, group)
            output_batcher.flush()
        told = [each for _, body in post.of(wire.Outputs) for each in body.tokens]
        apart = [each for token in told for each in token.apart()]
        assert [(each.position, each.token_id, each.finish_reason, each.logprobs) for each in apart] == [
            (each.position, each.token_id, each.finish_reason, each.logprobs) for each in given
        ]
        reports = [token.drafts for token in told if token.drafts is not None]
        assert [step for report in reports for step in report.steps] == steps
        assert sum(report.num_accepted for report in reports) == sum(accepted for _, accepted in steps)
        assert sum(report.num_rejected for report in reports) == len(steps)
        if gathers and not has_logprobs:
            assert len(told) == 1 + -(-(num_tokens - 1) // (MAX_UNSENT + 1))
        read = msgspec.msgpack.decode(wire.encode_body(wire.Outputs(told)), type=wire.Outputs)
        assert read.tokens == told, "a scheduler must be able to decode the message"


def truth(request: Request) -> list[int]:
    return generate_alone(request.prompt_token_ids, request.sampling)[request.index]


@pytest.mark.parametrize("seed", range(4))
def test_a_step_with_drafts_leaves_in_one_output_with_its_report(seed: int) -> None:
    world = World(drafting_of=lambda scheduler: liars(scheduler, random.Random(seed), truth, VOCAB_SIZE))
    order = RequestSpec(PROMPT, sampling(1, max_tokens=30), reports_drafts=True)
    world.order("r", order, keep=wire.Keep(DIGEST, WINDOW_S, ROOM, b"recipe"))
    world.order("quiet", RequestSpec(PROMPT, sampling(1, max_tokens=9)))
    world.run()
    world.steps(2)
    told = [each for _, body in world.post.messages for each in body.tokens]
    assert all(each.drafts is None for each in told if each.request_id == "quiet")
    own = [each for each in told if each.request_id == "r"]
    assert [each.token_id for token in own for each in token.apart()] == truth(Request("r", order))
    for token in own:
        num_accepted = token.drafts.steps[0][1] if token.drafts is not None else 0
        assert len(token.earlier) == num_accepted, "a step's tokens must be sent together"
    steps = [step for token in own if token.drafts is not None for step in token.drafts.steps]
    numbers = {each.transfer_id: each.numbers for _, body in world.post.messages for each in body.events}
    assert (numbers["r"]["num_drafted"], numbers["r"]["num_accepted"]) == tuple(map(sum, zip(*steps, strict=True)))
    drafts = world.worker.load.drafts
    assert drafts.num_accepted == sum(each.get("num_accepted", 0) for each in numbers.values()) > 0
    assert drafts.num_tokens == sum(each.get("num_drafted", 0) for each in numbers.values())
    world.post.messages.clear()
    world.post.tokens.clear()
    world.mail(wire.Attach(DIGEST, "r", 0))
    world.step()
    again = [each for _, body in world.post.messages for each in body.tokens]
    assert [each.position for each in again] == list(range(30)), "each token must be recorded separately"
    assert [step for each in again if each.drafts is not None for step in each.drafts.steps] == steps
    world.assert_home()
