"""The policies' choices equal those of an exhaustive search, in changing random clusters."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.known_prefixes import Prompt
from pd_cluster.cluster.placement import routing_policy
from pd_cluster.cluster.placement.pair_search import Pair, Sides
from pd_cluster.cluster.placement.routing_policy import POLICIES, RoutingRequest, session
from pd_cluster.errors import Unavailable
from pd_cluster.kv.kv_layout import keys_and_values
from pd_cluster.kv.prefix_index import PrefixScope, chain_hashes, keys_of
from pd_cluster.numerics import Numerics
from pd_cluster.types import LinkState, RequestSpec, Sampling
from tests.support import exhaustive_policy as exhaustive
from tests.support.router_world import info_of

BLOCK = 16
LAYOUT = wire.LayoutInfo(
    num_layers=4, num_kv_heads=2, planes=keys_and_values(64), block_size=BLOCK, dtype="float32", tp_size=1, tp_rank=0
)
ADAPTERS = ("", "ab" * 32, "cd" * 32)
STATES = [LinkState.parse(each) for each in ("up (shm)", "up (dist)", "resting", "waiting: x", "opening", "refused: x")]
PROMPTS = [RequestSpec([*range(num_tokens)], Sampling()) for num_tokens in (3, 100, 300, 1000)]
KEYS = keys_of(chain_hashes(PrefixScope("model", Numerics()).root(PROMPTS[-1]), PROMPTS[-1].prompt_token_ids, BLOCK))


class RandomCluster:
    """Instances that randomly come, go, change roles and loads, and lose links. Small loads make ties."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        most = 40 if seed % 20 == 0 else 5
        self.most_tokens = rng.choice([1, 3, 300, 10_000])
        self.up_share = rng.choice([0.0, 0.5, 0.95, 1.0] if most == 5 else [0.05, 0.1, 0.95])
        self.instances = [
            Instance(f"{role}-{at}", role, "127.0.0.1", 1, ["0"])
            for role in ("prefill", "decode", "encode")
            for at in range(rng.randrange(most) if role != "encode" else rng.randrange(2))
        ]
        for each in self.instances:
            self.restart(each)
        for each in self.instances:
            self.relink(each)

    def restart(self, each: Instance) -> None:
        """Restarts an instance, or leaves it dead."""
        rng = self.rng
        each.info = info_of(
            each.name, each.role, epoch=rng.randrange(9), model_identity="model", layout=rng.choice([LAYOUT, None])
        )
        each.state = rng.choice(["ready"] * 6 + ["connecting", "unreachable"])
        each.service, each.next_role = rng.choice(["in"] * 6 + ["out"]), rng.choice([None] * 6 + ["prefill"])
        each.outstanding_tokens, each.others_tokens = (rng.randrange(self.most_tokens) for _ in range(2))
        each.load = wire.Load(
            is_draining=rng.random() < 0.05,
            sleep_level=rng.choice([0] * 20 + [1]),
            adapters=rng.choice([None, (), *((each[:12],) for each in ADAPTERS[1:])]),
            num_queued_tokens=rng.choice([0, 0, 150]),
        ).at_rates(prefill_tokens_per_s=rng.choice([0.0, 1000.0, 2000.0]))
        each.known_blocks = type(each.known_blocks)()
        each.known_blocks.apply(wire.CacheKeys(added=KEYS[: 8 * rng.choice([0, 0, 1, 15, 62])]))

    def relink(self, prefill: Instance) -> None:
        """Changes or removes the states of random links; some links lead to processes that have ended."""
        rng, links = self.rng, dict[str, LinkState]()
        for other in self.instances:
            if rng.random() < 0.95:
                links[other.key] = rng.choice(STATES[:3] if rng.random() < self.up_share else STATES[3:])
            if rng.random() < 0.1:
                links[f"{other.name}@ff"] = rng.choice(STATES)
        prefill.load = msgspec.structs.replace(prefill.load, links=links)

    def change(self) -> None:
        if self.instances:
            each = self.rng.choice(self.instances)
            match self.rng.randrange(4):
                case 0:
                    self.restart(each)
                case 1:
                    self.relink(each)
                case 2 if each.role != "encode":
                    each.role = "decode" if each.role == "prefill" else "prefill"
                case _:
                    each.load = msgspec.structs.replace(each.load, num_queued_tokens=self.rng.choice([0, 0, 150]))

    def ask(self) -> RoutingRequest:
        rng, avoid = self.rng, set[tuple[str, str]]()
        if rng.random() < 0.4:
            avoid = {(p.key, d.key) for p, d in exhaustive.linked(self.instances) if rng.random() < 0.5}
        return RoutingRequest(
            Prompt(rng.choice(PROMPTS)), session=rng.choice("abc"), adapter=rng.choice(ADAPTERS), avoid=avoid
        )


def shown(pair: Pair | None) -> str:
    return f"{pair[0].name} {pair[1].name}" if pair is not None else "nobody"


def chosen(name: str, instances: list[Instance], ask: RoutingRequest) -> str:
    try:
        return shown(POLICIES[name](instances, ask))
    except Unavailable:
        return "nobody"


@pytest.mark.parametrize(
    "seeds", [range(1000), pytest.param(range(2000, 35_400), marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
def test_each_choice_is_that_of_an_exhaustive_search(seeds: range) -> None:
    """Compares three choices between changes of each cluster; 100,000 in the slow run."""
    kinds = Counter[str]()
    for seed in seeds:
        cluster = RandomCluster(seed)
        for step in range(3):
            ask, instances = cluster.ask(), cluster.instances
            for name, choose in exhaustive.CHOICES.items():
                wanted = shown(choose(instances, ask))
                assert chosen(name, instances, ask) == wanted, (seed, step, name)
                kinds[wanted.replace("prefill-", "p").replace("decode-", "d")[0] + str(len(set(wanted.split())))] += 1
            _check_sides(instances, ask, (seed, step))
            cluster.change()
    assert min(kinds[kind] for kind in ("p2", "p1", "d1", "n1")) > len(seeds) / 50, kinds


def _check_sides(instances: list[Instance], ask: RoutingRequest, at: tuple[int, int]) -> None:
    pairs = exhaustive.linked(instances)
    assert routing_policy.linked_pairs(instances) == pairs, at
    allowed = [pair for pair in pairs if (pair[0].key, pair[1].key) not in ask.avoid]
    paired = Sides.of(instances, ask.avoid).paired()
    assert {each.name for each in (*paired.prefills, *paired.decodes)} == {i.name for pair in allowed for i in pair}, at
    down = [(p, d) for p in instances for d in instances if (p.role, d.role) == ("prefill", "decode")]
    down = [(p, d) for p, d in down if p.is_ready and d.is_ready and exhaustive.phase(p, d) not in ("up", "resting")]
    assert [line.partition(": ")[0] for line in routing_policy.refused_links(instances)] == [
        f"{p.name} to {d.name}" for p, d in down
    ]
    takers = [each for each in instances if each.takes_requests and each.role != "encode"]
    opens = any(p.takes_requests and d.takes_requests and exhaustive.phase(p, d) == "opening" for p, d in down)
    arrives = any(i.state == "connecting" or (i.state == "unreachable") for i in instances if i.role != "encode")
    for each in instances:
        each.ready_s = 0.0
    assert routing_policy.awaits_pair(instances, 1.0, 3.5) == (bool(takers) and not pairs and (opens or arrives)), at


def test_sessions_are_spread_and_move_only_with_their_instances() -> None:
    """With 2,000 sessions over 5 + 7 instances, a leaving instance moves only its own sessions, on its side only."""
    sides = [Instance(f"prefill-{at}", "prefill", "127.0.0.1", 1, ["0"], state="ready") for at in range(5)]
    decodes = [Instance(f"decode-{at}", "decode", "127.0.0.1", 1, ["0"], state="ready") for at in range(7)]
    for prefill in sides:
        prefill.load = wire.Load(links={each.key: STATES[0] for each in decodes})
    instances, names = [*sides, *decodes], [str(at) for at in range(2000)]
    prompt = Prompt(PROMPTS[0])

    def places(of: list[Instance]) -> dict[str, Pair]:
        return {name: session(of, RoutingRequest(prompt, session=name)) for name in names}

    before = places(instances)
    counts = Counter(each.name for pair in before.values() for each in pair)
    assert all(320 < counts[each.name] < 480 for each in sides), counts
    assert all(220 < counts[each.name] < 360 for each in decodes), counts
    pairs = Counter(map(shown, before.values()))
    assert len(pairs) == 35
    assert max(pairs.values()) < 95, "the choices of both sides must be independent"
    for gone in (sides[1], decodes[3]):
        after = places([each for each in instances if each is not gone])
        for name in names:
            moved = [one.name for one, other in zip(before[name], after[name], strict=True) if one is not other]
            assert moved == ([gone.name] if gone in before[name] else []), name
        heirs = Counter(each.name for name in names if gone in before[name] for each in after[name])
        side = sides if gone in sides else decodes
        assert min(heirs[each.name] for each in side if each is not gone) > 0.5 * counts[gone.name] / len(side)
