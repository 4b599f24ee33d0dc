"""`python -m benchmarks routing --instances 32,100,500`: measures the CPU time to route a request, by the cluster's
size.

Measures everything from a tokenized prompt to the chosen pair of instances: the queue's check of capacity, the lookup
of known prefixes, and the policy. There is no engine, socket or process. Links are all open; or one in twenty is down;
or each instance has 16 open links, and the others are idle.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.figures import begin, finish, names_of, result
from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.roster import RosterFollower
from pd_cluster.cluster.placement.routing_policy import POLICIES
from pd_cluster.cluster.placement.routing_rules import RoutingRules
from pd_cluster.cluster.routing.router import Router
from pd_cluster.cluster.streams.request_origin import RequestOwner
from pd_cluster.cluster.streams.request_stream import ask_of
from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_layout import keys_and_values
from pd_cluster.kv.prefix_index import PrefixScope, chain_hashes, keys_of
from pd_cluster.numerics import Numerics
from pd_cluster.process_messages import InstanceInfo
from pd_cluster.result_tables import Report, Result, progress
from pd_cluster.types import LinkState, RequestSpec, Role, Sampling

SEED = 0
BLOCK_SIZE = 16
PROMPT_LEN = 1024
NUM_PROMPTS = 200  # prompts per round
KNOWN_SHARE = 0.05  # share of the instances that have a prompt's beginning in their caches
NUM_OPEN = 16  # open links of an instance whose other links are idle
LINKS = ("open", "some down", "most at rest")
LAYOUT = wire.LayoutInfo(
    num_layers=32,
    num_kv_heads=8,
    planes=keys_and_values(128),
    block_size=BLOCK_SIZE,
    dtype="bfloat16",
    tp_size=1,
    tp_rank=0,
)


class _Members:
    """Ready instances that never change."""

    def __init__(self, instances: list[Instance]) -> None:
        self.instances = instances

    def watch(self, follower: RosterFollower) -> None:
        """Does nothing, because no instance is ever lost."""

    async def change(self) -> None:
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A cluster with this number of instances of each role, and random work and links."""

    num_each: int
    links: str

    def instances(self, rng: random.Random, prompts: list[RequestSpec]) -> list[Instance]:
        made = [self._instance(role, at, rng) for role in ("prefill", "decode") for at in range(self.num_each)]
        keys = [each.key for each in made[self.num_each :]]
        for each in made[: self.num_each]:
            each.load = wire.Load(links=self._links(keys, rng)).at_rates(prefill_tokens_per_s=rng.uniform(5e3, 2e4))
        for order in prompts:
            root = PrefixScope("model", Numerics()).root(order)
            known = keys_of(chain_hashes(root, order.prompt_token_ids, BLOCK_SIZE)[: rng.randrange(PROMPT_LEN // 16)])
            for each in rng.sample(made, int(KNOWN_SHARE * len(made))):
                each.known_blocks.apply(wire.CacheKeys(added=known))
        return made

    def _instance(self, role: Role, at: int, rng: random.Random) -> Instance:
        name = f"{role}-{at}"
        info = InstanceInfo(
            role=role,
            name=name,
            epoch=rng.getrandbits(32),
            pid=1,
            state="ready",
            server_ip="127.0.0.1",
            device_ids=["0"],
            control_port=1,
            model_identity="model",
            layout=LAYOUT,
            max_num_seqs=64,
        )
        made = Instance(name, role, "127.0.0.1", 1, ["0"], state="ready", info=info)
        made.outstanding_tokens = rng.randrange(4000)
        return made

    def _links(self, keys: list[str], rng: random.Random) -> dict[str, LinkState]:
        links = dict.fromkeys(keys, LinkState("up", ("shm",)))
        if self.links == "some down":
            links |= dict.fromkeys(rng.sample(keys, len(keys) // 20), LinkState("waiting"))
        elif self.links == "most at rest" and len(keys) > NUM_OPEN:
            links |= dict.fromkeys(rng.sample(keys, len(keys) - NUM_OPEN), LinkState("resting"))
        return links


async def run(instances: str, policies: str, rounds: int, json: str) -> None:
    """Measures and reports. Raises ConfigError for an unknown policy, and for invalid sizes."""
    names = names_of("--policies", policies, POLICIES)
    sizes = _sizes(instances)
    begin(json)
    found: list[Result] = []
    with progress("choices", rounds * len(sizes) * len(LINKS) * len(names)) as advance:
        for num_each in sizes:
            for links in LINKS:
                for name in names:
                    ms = [_round(_Cluster(num_each, links), name, at, advance) for at in range(rounds)]
                    found.append(result(f"{num_each} + {num_each}, {links}, {name}: CPU time a request", ms, "ms"))
    command = f"python -m benchmarks routing --instances {instances} --policies {','.join(names)} --rounds {rounds}"
    finish(Report(command, found), "the scheduler's choice of instances", json)


def _sizes(text: str) -> list[int]:
    sizes = [int(each) for each in text.split(",") if each.strip().isdecimal()]
    if len(sizes) != len(text.split(",")) or min(sizes) < 1:
        raise ConfigError(f"--instances {text}: expected numbers of instances of each role with commas, such as 32,100")
    return sizes


def _round(cluster: _Cluster, policy: str, at: int, advance: Callable[[], None]) -> float:
    """Returns the CPU time of a request, in milliseconds."""
    rng = random.Random(f"{SEED} {at}")
    orders = [
        RequestSpec([rng.randrange(32_000) for _ in range(PROMPT_LEN)], Sampling(), session="s")
        for _ in range(NUM_PROMPTS)
    ]
    members = _Members(cluster.instances(rng, orders))
    admission = Router(lambda conn, body: None, members, RoutingRules(POLICIES[policy], max_queue_s=60.0)).admission
    began_s = time.process_time()
    for number, order in enumerate(orders):
        admitted = admission.pair_at_once(ask_of(order), 1, 0, RequestOwner(f"client-{number % 8}"))
        assert admitted is not None
        assert admitted.entry is not None
        admission.begun(admitted.entry)
    took_s = time.process_time() - began_s
    advance()
    return 1e3 * took_s / len(orders)
