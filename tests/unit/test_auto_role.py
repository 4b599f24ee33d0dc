"""When an instance should change its role automatically, on recorded loads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pd_cluster.cluster.roles.auto_role import AutoRole, Flip, InstanceReading, RoleSample, Rules, busy, decide
from pd_cluster.types import Role
from pd_cluster.wire import Load
from tests.support.elastic_world import ElasticWorld

RULES = Rules()
NEVER = float("-inf")


def prefill(name: str, num_prompts: int, tokens: int = 0) -> InstanceReading:
    return InstanceReading(name, "prefill", num_prompts, 0, outstanding_tokens=tokens)


def decode(
    name: str, held: float = 0.0, num_waiting: int = 0, num_running: int = 0, tokens: int = 0
) -> InstanceReading:
    return InstanceReading(name, "decode", num_waiting, num_running, held, outstanding_tokens=tokens)


def recorded(*instances: InstanceReading, num: int = 11, is_settled: bool = True) -> list[RoleSample]:
    return [RoleSample(float(at), instances, is_settled) for at in range(num)]


def name_of(flip: Flip | None) -> tuple[str, Role] | None:
    return (flip.name, flip.role) if flip is not None else None


QUIET = [prefill("prefill-0", 0), prefill("prefill-1", 0)]
PROMPTS_WAIT = [prefill("prefill-0", 6), decode("decode-0", 0.1, tokens=9), decode("decode-1", 0.1, tokens=5)]
POOL_IS_FULL = [prefill("prefill-0", 0), prefill("prefill-1", 1), decode("decode-0", 1.0, num_waiting=3)]

# Recorded from `pd-cluster instances`: 40 concurrent requests of 700 prompt and 2 output tokens, then of 8 and 600.
LONG_PROMPTS = [
    InstanceReading("prefill-0", "prefill", 19, 1, 44 / 300),
    InstanceReading("prefill-1", "prefill", 18, 1, 88 / 300),
    InstanceReading("decode-0", "decode", 19, 0, 44 / 300),
    InstanceReading("decode-1", "decode", 18, 0, 88 / 300),
]
LONG_ANSWERS = [
    InstanceReading("prefill-0", "prefill", 0, 0, 4 / 300),
    InstanceReading("prefill-1", "prefill", 0, 0, 4 / 300),
    InstanceReading("decode-0", "decode", 11, 9, 204 / 300),
    InstanceReading("decode-1", "decode", 13, 7, 266 / 300),
]
HELD_UP = [  # decode instances are full, so prefill instances are full of prompts that none of them takes
    InstanceReading("prefill-0", "prefill", 9, 0, 1.0, num_exporting=20),
    InstanceReading("prefill-1", "prefill", 9, 0, 1.0, num_exporting=20),
    InstanceReading("decode-0", "decode", 58, 4, 1.0),
]


@pytest.mark.parametrize(
    ("instances", "wanted"),
    [
        (LONG_PROMPTS, ("decode-1", "prefill")),
        (LONG_ANSWERS, ("prefill-1", "decode")),
        (HELD_UP, ("prefill-1", "decode")),
        (PROMPTS_WAIT, ("decode-1", "prefill")),
        (POOL_IS_FULL, ("prefill-1", "decode")),
        ([*QUIET, decode("decode-0", num_waiting=4)], ("prefill-1", "decode")),
        ([*QUIET, decode("decode-0", num_running=64)], ("prefill-1", "decode")),
        ([prefill("prefill-0", 9), decode("decode-0")], None),  # it is the last decode instance
        ([prefill("prefill-0", 9), decode("decode-0", 0.3), decode("decode-1", 0.3)], None),  # 0.6 for one instance
        ([prefill("prefill-0", 3), decode("decode-0"), decode("decode-1")], None),  # not busy enough
        ([prefill("prefill-0", 9), decode("decode-0", 1.0), decode("decode-1", 1.0)], None),  # both sides are busy
        ([prefill("prefill-0", 0), decode("decode-0"), decode("decode-1")], None),
        ([], None),
    ],
)
def test_recorded_states(instances: Sequence[InstanceReading], wanted: tuple[str, Role] | None) -> None:
    assert name_of(decide(recorded(*instances), NEVER, RULES)) == wanted


def test_it_must_last() -> None:
    assert decide(recorded(*PROMPTS_WAIT, num=10), NEVER, RULES) is None
    assert decide(recorded(*PROMPTS_WAIT, num=11), NEVER, RULES) is not None
    history = recorded(*PROMPTS_WAIT, num=11)
    history[5] = RoleSample(5.0, (prefill("prefill-0", 0), *PROMPTS_WAIT[1:]))
    assert decide(history, NEVER, RULES) is None, "one quiet second must reset the wait"
    assert decide([history[0], history[10]], NEVER, RULES) is None, "the load was not checked in between"
    assert decide(recorded(*PROMPTS_WAIT, is_settled=False), NEVER, RULES) is None, "another one is changing"
    history = recorded(*PROMPTS_WAIT)
    assert decide(history, 10.0 - 59.9, RULES) is None, "too soon after another change"
    assert decide(history, 10.0 - 60.0, RULES) is not None


def test_one_change_never_calls_for_the_other() -> None:
    """After a change, the same work on the new roles must not call for the reverse change, for any loads."""
    for num_prompts in range(30):
        for held in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            prefills = [prefill(f"prefill-{i}", num_prompts) for i in range(2)]
            decodes = [decode(f"decode-{i}", held) for i in range(3)]
            flip = decide(recorded(*prefills, *decodes), NEVER, RULES)
            if flip is None:
                continue
            giver: Role = "decode" if flip.role == "prefill" else "prefill"
            before = RoleSample(0.0, (*prefills, *decodes))
            assert busy(before, giver, RULES, num_fewer=1) <= RULES.low < RULES.high


def test_oscillating_load_makes_nothing_flap() -> None:
    """Prompts arrive in waves of 6 s; roles must not follow each wave."""
    world = ElasticWorld(num_prefill=2, num_decode=2)
    auto = AutoRole()
    flips: list[tuple[float, Flip]] = []
    for at in range(600):
        is_wave = at // 6 % 2 == 0
        for each in world.membership.instances:
            if each.role == "prefill":
                each.load = Load(num_waiting=8 if is_wave else 0, num_blocks=10, links=each.load.links)
            else:
                each.load = Load(num_blocks=10, num_held_blocks=0 if is_wave else 10)
        if flip := auto.observe(float(at), world.membership.instances):
            flips.append((float(at), flip))
    assert flips == []


def test_long_phases_are_followed_one_by_one() -> None:
    """Roles follow 300 s of prompts and 300 s of decoding, twice, but never faster than the cool-down."""
    world = ElasticWorld(num_prefill=2, num_decode=2)
    auto, flips = AutoRole(), list[tuple[int, Role]]()
    for at in range(1200):
        prompts_come = at // 300 % 2 == 0
        decodes = [each for each in world.membership.instances if each.role == "decode"]
        for each in world.membership.instances:
            each.load = Load(num_waiting=8 if prompts_come else 0, num_blocks=10)
        for each in decodes:
            each.load = Load(num_blocks=10, num_held_blocks=0 if prompts_come else 10 // len(decodes))
        if flip := auto.observe(float(at), world.membership.instances):
            flips.append((at, flip.role))
            for each in world.membership.instances:
                each.load = Load()  # drained
            world.elastic.change_role(flip.name, flip.role)
            world.elastic.tick()
        assert {each.role for each in world.membership.instances} == {"prefill", "decode"}
    assert flips == [(10, "prefill"), (310, "decode"), (610, "prefill"), (910, "decode")]


def test_only_those_that_take_requests_count() -> None:
    world = ElasticWorld(num_prefill=1, num_decode=3)
    world.elastic.drain("decode-0")
    sample = RoleSample.of(0.0, world.membership.instances)
    assert [each.name for each in sample.instances] == ["prefill-0", "decode-1", "decode-2"]
    assert sample.is_settled, "a drained instance must count as settled"
    world["decode-0"].num_outstanding = 1
    assert not RoleSample.of(0.0, world.membership.instances).is_settled
