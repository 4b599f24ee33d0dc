"""Routing on recorded cluster states, and its inputs: known prefixes, predictions, goals."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.known_prefixes import KnownBlocks, Prompt
from pd_cluster.cluster.placement.routing_policy import (
    MAX_LOCAL_TOKENS,
    POLICIES,
    SESSION_SLACK_TOKENS,
    Pair,
    RoutingRequest,
    linked_pairs,
    predicted_ttft,
    prefix_aware,
    session,
    single_instance,
)
from pd_cluster.cluster.placement.wait_prediction import (
    Goals,
    check_goals,
    predict_transfer_s,
    predict_ttft_s,
    within_tpot,
)
from pd_cluster.engine.stages.cache_reports import CacheReports
from pd_cluster.errors import Overloaded
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.kv_layout import keys_and_values
from pd_cluster.kv.prefix_index import PrefixScope, chain_hashes, keys_of, read_keys
from pd_cluster.numerics import Numerics
from pd_cluster.types import TIERS, LinkState, RequestSpec, Role, Sampling
from tests.support.mail import RecordedMail
from tests.support.router_world import info_of

BLOCK = 16
LAYOUT = wire.LayoutInfo(
    num_layers=4, num_kv_heads=2, planes=keys_and_values(64), block_size=BLOCK, dtype="float32", tp_size=1, tp_rank=0
)
PROMPT = list(range(1000))
RATES = ("prefill_tokens_per_s", "decode_step_s")


def instance(name: str, ahead: int = 0, epoch: int = 0, **load: Any) -> Instance:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    info = info_of(name, role, epoch=epoch, model_identity="model", layout=LAYOUT)
    made = Instance(name, role, "127.0.0.1", 1, ["0"], state="ready", info=info)
    made.outstanding_tokens = ahead
    rates = {name: load.pop(name) for name in RATES if name in load}
    made.load = wire.Load(**load).at_rates(**rates)
    return made


def cluster(*instances: Instance, transport: str = "shm") -> list[Instance]:
    """Links all prefill instances to all decode instances."""
    links = {i.key: LinkState.parse(f"up ({transport})") for i in instances if i.role == "decode"}
    for each in instances:
        if each.role == "prefill":
            each.load = wire.Load(**{**_fields(each.load), "links": links})
    return list(instances)


def _fields(load: wire.Load) -> dict[str, Any]:
    return {name: getattr(load, name) for name in load.__struct_fields__}


def knows(each: Instance, token_ids: list[int], salt: str = "") -> None:
    root = PrefixScope("model", Numerics()).root(RequestSpec(token_ids, Sampling(), salt))
    each.known_blocks.apply(wire.CacheKeys(added=keys_of(chain_hashes(root, token_ids, BLOCK))))


def ask(prompt: list[int] = PROMPT, **more: Any) -> RoutingRequest:
    return RoutingRequest(Prompt(RequestSpec(prompt, Sampling())), **more)


def names(pair: Pair) -> str:
    return f"{pair[0].name} {pair[1].name}"


# ---- known prefixes


def test_a_prompt_is_known_up_to_its_first_unknown_block_and_never_whole() -> None:
    worker = instance("prefill-0")
    assert worker.num_cached(Prompt(RequestSpec(PROMPT, Sampling()))) == 0
    knows(worker, PROMPT[:100])
    # The last token must be computed for its logits.
    for prompt, salt, num_cached in (
        (PROMPT, "", 96),
        (PROMPT[:96], "", 80),
        (PROMPT[:97], "", 96),
        ([7, *PROMPT], "", 0),
        (PROMPT, "salted", 0),
    ):
        assert worker.num_cached(Prompt(RequestSpec(prompt, Sampling(), salt))) == num_cached


def test_another_life_is_asked_by_its_own_blocks() -> None:
    worker, prompt = instance("prefill-0"), Prompt(RequestSpec(PROMPT, Sampling()))
    knows(worker, PROMPT[:100])
    assert worker.num_cached(prompt) == 96
    assert worker.info is not None
    for layout, num_cached in ((None, 0), (msgspec.structs.replace(LAYOUT, block_size=32), 0), (LAYOUT, 96)):
        worker.info = msgspec.structs.replace(worker.info, layout=layout)
        assert worker.num_cached(prompt) == num_cached


def test_news_of_a_pool_add_up_to_what_the_pool_knows() -> None:
    """Two schedulers that follow a random pool, one joining late, end with the view of one that gets all at once."""
    for seed in range(30):
        rng = random.Random(seed)
        pool, post = BlockPool(40), RecordedMail()
        news, known = CacheReports(post, pool), {name: KnownBlocks() for name in ("early", "late", "last")}
        news.opened("early", is_scheduler=True)
        held: list[list[int]] = []
        for step in range(200):
            if step == 100:
                news.opened("late", is_scheduler=True)
            if held and (rng.random() < 0.5 or pool.num_available < 5):
                pool.release(held.pop(rng.randrange(len(held))))
            else:
                blocks = pool.take(rng.randint(1, 5))
                for block in blocks:
                    pool.remember(block, rng.randbytes(32))
                held.append(blocks)
            if rng.random() < 0.3:
                news.blocks_changed(pool.changes())
        news.blocks_changed(pool.changes())
        news.opened("last", is_scheduler=True)
        for client, body in post.of(wire.CacheKeys):
            known[client].apply(body)
        keys = read_keys(b"".join(body.added for client, body in post.of(wire.CacheKeys) if client == "last"))
        assert {len(each) for each in known.values()} == {len(keys)} != {0}, seed
        assert all(each.leading(keys)["device"] == len(keys) > 10 for each in known.values()), seed


def test_a_prefix_counts_less_the_slower_the_tier_that_has_it() -> None:
    """Before measurements, tiers count by order; afterwards by loading time relative to computing, at least 0."""
    root = PrefixScope("model", Numerics()).root(RequestSpec(PROMPT, Sampling()))
    keys, workers = keys_of(chain_hashes(root, PROMPT, BLOCK)), {tier: instance("prefill-0") for tier in TIERS}
    for tier, worker in workers.items():
        worker.known_blocks.apply(wire.CacheKeys(added=keys, tier=tier))
    prompt = Prompt(RequestSpec(PROMPT, Sampling()))
    most = (len(PROMPT) - 1) // BLOCK * BLOCK
    assert most == workers["device"].num_cached(prompt) > workers["host"].num_cached(prompt)
    assert workers["host"].num_cached(prompt) > workers["disk"].num_cached(prompt) > 0
    measured = {"tier_token_s": {"host": 0.00025, "disk": 0.002}}
    for worker in workers.values():
        worker.load = wire.Load(**{**_fields(worker.load), **measured}).at_rates(prefill_tokens_per_s=1000.0)
    assert [workers[tier].num_cached(prompt) for tier in TIERS] == [most, most * 3 // 4, 0]


def test_a_block_that_changes_tiers_is_known_by_the_last() -> None:
    known, key = KnownBlocks(), b"8 bytes."
    for tier in ("device", "host", "disk", "device"):
        known.apply(wire.CacheKeys(added=key, tier=tier))
        assert known.leading(read_keys(key)) == {**dict.fromkeys(TIERS, 0), tier: 1}
    known.apply(wire.CacheKeys(removed=key))
    assert not any(known.leading(read_keys(key)).values())


def test_nothing_is_recorded_until_somebody_follows_and_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Malformed bytes are ignored."""
    pool = BlockPool(4)
    pool.remember(pool.take(1)[0], b"x" * 32)
    assert pool.changes() == {}
    assert pool.follow() == {b"x" * 32: "device"}
    pool.remember(pool.take(1)[0], b"y" * 32)
    assert [pool.changes() for _ in range(2)] == [{b"y" * 32: "device"}, {}]
    monkeypatch.setattr("pd_cluster.cluster.instances.known_prefixes.MAX_KEYS", 3)
    known = KnownBlocks()
    known.apply(wire.CacheKeys(added=b"".join(bytes([i]) * 8 for i in range(5)) + b"odd"))
    assert len(known) == 3
    known.apply(wire.CacheKeys(is_whole=True))
    assert len(known) == 0


# ---- policies


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_a_pair_that_can_serve(name: str) -> None:
    """In random clusters, the choice is a linked pair that has not failed the request, or a single instance."""
    for seed in range(80):
        rng = random.Random(seed)
        instances = cluster(
            *(
                instance(f"{role}-{i}", rng.randrange(3000), num_queued_tokens=rng.randrange(500))
                for role in ("prefill", "decode")
                for i in range(rng.randint(1, 3))
            )
        )
        for each in instances:
            each.state = rng.choice(["ready", "ready", "ready", "failed"])
            knows(each, PROMPT[: rng.choice([0, 0, 300, 900])])
        pairs = linked_pairs(instances)
        avoid = {(p.key, d.key) for p, d in pairs if rng.random() < 0.3}
        if not any(i.takes_requests for i in instances):
            continue
        prefill, decode = POLICIES[name](instances, ask(avoid=avoid, session=rng.choice(["", "a", "b"])))
        if prefill is not decode:
            assert (prefill, decode) in pairs
            assert (prefill.key, decode.key) not in avoid
        elif {(p.key, d.key) for p, d in pairs} <= avoid:
            assert (prefill, decode) == single_instance(instances)
            assert prefill.takes_requests
        else:
            assert name == "predicted-ttft"
            assert prefill.takes_requests


def test_a_cached_prefix_draws_until_others_wait_for_as_much() -> None:
    instances = cluster(*(instance(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")))
    for each in instances[1::2]:
        knows(each, PROMPT[:800])
    for ahead, chosen in ((0, "prefill-1 decode-1"), (799, "prefill-1 decode-1"), (801, "prefill-0 decode-0")):
        for each in instances[1::2]:
            each.outstanding_tokens = ahead
        assert names(prefix_aware(instances, ask())) == chosen
    unknown = [*range(2000, 2100)]
    assert names(prefix_aware(instances, ask(unknown))) == "prefill-0 decode-0"
    instances[0].outstanding_tokens = 900
    assert names(prefix_aware(instances, ask(unknown))) == "prefill-1 decode-0"


def test_predicted_ttft_goes_where_the_queue_is_shorter_in_seconds() -> None:
    p0 = instance("prefill-0", ahead=4000, prefill_tokens_per_s=10_000.0)
    p1 = instance("prefill-1", ahead=1000, prefill_tokens_per_s=1000.0)
    instances = cluster(p0, p1, instance("decode-0"), instance("decode-1", ahead=-1))
    assert names(predicted_ttft(instances, ask())) == "prefill-0 decode-1"  # 0.5 s against 2 s


def test_short_remainders_are_computed_where_they_are_decoded() -> None:
    p0 = instance("prefill-0", ahead=5000, prefill_tokens_per_s=5000.0)
    d0, d1 = instance("decode-0"), instance("decode-1", num_queued_tokens=300)
    instances = cluster(p0, d0, d1)
    short = PROMPT[:MAX_LOCAL_TOKENS]
    assert names(predicted_ttft(instances, ask(short))) == "decode-0 decode-0"
    assert names(predicted_ttft(instances, ask([*short, 1]))) == "prefill-0 decode-0"
    knows(d1, PROMPT[:960])
    assert names(predicted_ttft(instances, ask())) == "decode-1 decode-1"  # 40 tokens after 300
    p0.outstanding_tokens = 0
    knows(p0, PROMPT)
    assert names(predicted_ttft(instances, ask())) == "prefill-0 decode-1"


def test_a_session_stays_until_its_place_is_overloaded_or_lost() -> None:
    instances = cluster(*(instance(f"{role}-{i}") for role in ("prefill", "decode") for i in range(2)))
    places = {name: session(instances, ask(session=name)) for name in map(str, range(64))}
    assert len(set(map(names, places.values()))) == 4
    for each in instances:
        each.outstanding_tokens = 500
    assert {name: session(instances, ask(session=name)) for name in places} == places
    for outstanding, state in ((SESSION_SLACK_TOKENS + 5000, "ready"), (500, "unreachable")):
        instances[0].outstanding_tokens, instances[0].state = outstanding, state  # type: ignore[assignment]
        for name, place in places.items():
            moved = session(instances, ask(session=name))
            assert instances[0] not in moved
            assert moved == place or instances[0] in place


# ---- predictions and goals


def test_a_ttft_is_the_queue_and_the_prompt_over_the_rate() -> None:
    worker = instance("prefill-0", ahead=1500, prefill_tokens_per_s=1000.0)
    assert predict_ttft_s(worker, 500) == 2.0
    worker.others_tokens = 1000
    assert predict_ttft_s(worker, 500) == 3.0
    assert predict_ttft_s(instance("prefill-1"), 500, lambda: 250.0) == 2.0  # other instances' rate


def test_a_transfer_takes_as_long_as_its_slowest_lane() -> None:
    p0, d0 = instance("prefill-0"), instance("decode-0")
    took_s = []
    for transport in ("dist", "dist, int8", "dist+shm", "shm"):
        cluster(p0, d0, transport=transport)
        took_s.append(predict_transfer_s(p0, d0, 10_000))
    assert took_s[0] == took_s[1] == took_s[2] > took_s[3] > predict_transfer_s(p0, d0, 0) > 0


def test_what_would_come_too_late_is_refused_with_the_time_to_wait() -> None:
    p0, d0 = instance("prefill-0", ahead=4500, prefill_tokens_per_s=1000.0), instance("decode-0")
    with pytest.raises(Overloaded, match=r"after 5\.5 s, and the objective is 2 s") as caught:
        check_goals(Goals(ttft_s=2.0), [p0, d0], (p0, d0), 1000)
    assert caught.value.retry_after_s == 4
    check_goals(Goals(), [p0, d0], (p0, d0), 10**9)
    for ahead, rate in ((1000, 1000.0), (0, 0.1)):  # the last rate is as measured by a single cold step
        p0.outstanding_tokens, p0.load = ahead, wire.Load().at_rates(prefill_tokens_per_s=rate)
        check_goals(Goals(ttft_s=2.0), [p0, d0], (p0, d0), 1000)


def test_decode_instances_that_are_too_slow_are_passed_over() -> None:
    p0 = instance("prefill-0")
    d0 = instance("decode-0", decode_step_s=0.2, num_running=4)
    d1 = instance("decode-1", decode_step_s=0.01, num_running=4, num_queued_tokens=9)
    d2 = instance("decode-2", decode_step_s=0.2)  # it was slow, but is idle now
    goals = Goals(tpot_s=0.05)
    assert within_tpot(goals, [p0, d0, d1, d2]) == [p0, d1, d2]
    assert within_tpot(goals, [p0, d0]) == [p0, d0]
    with pytest.raises(Overloaded, match="200 ms now, and the objective is 50 ms"):
        check_goals(goals, [p0, d0], (p0, d0), 1)
    check_goals(goals, [p0, d2], (p0, d2), 1)
    d0.load = msgspec.structs.replace(d0.load.at_rates(decode_step_s=0.09), tokens_per_step=2.0)
    assert within_tpot(goals, [p0, d0]) == within_tpot(goals, [p0, d0, d1])[:2] == [p0, d0]
    check_goals(goals, [p0, d0], (p0, d0), 1)
    d0.load = d0.load.at_rates(decode_step_s=0.11)
    assert within_tpot(goals, [p0, d0, d1]) == [p0, d1]
    with pytest.raises(Overloaded, match="a token takes 55 ms now, and the objective is 50 ms"):
        check_goals(goals, [p0, d0], (p0, d0), 1)
