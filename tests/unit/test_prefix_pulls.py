"""Prefix pulls between prefill instances: the choice of a source, holds at both ends, and the gain for a load."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from msgspec import structs

from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.known_prefixes import Prompt, pool_kind_of
from pd_cluster.cluster.placement.pull_sources import PullSources, are_linked
from pd_cluster.cluster.placement.routing_policy import POLICIES, RoutingRequest
from pd_cluster.costs.linear_costs import Costs, HandoverCost, StepCost
from pd_cluster.engine.handover.exports import Exports
from pd_cluster.engine.handover.shipping import ShipGroup, ShipSizes
from pd_cluster.engine.handover.transfer_terms import TransferTerms
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.scheduling.state_checkpoints import KeepRule
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.group_rule import STATE, Rule
from pd_cluster.kv.kv_layout import KVLayout, keys_and_values
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.numerics import Numerics
from pd_cluster.process_messages import InstanceInfo
from pd_cluster.settings.timeouts import Timeouts
from pd_cluster.simulate.simulated_layout import SimulatedLayout
from pd_cluster.simulate.simulation import simulate
from pd_cluster.types import LinkState, Request, RequestSpec, Sampling, Status
from pd_cluster.wire import Body, CacheKeys, Cancel, Load, Offer, Revoke, pull_over

BLOCK_SIZE = 4
PROMPT = list(range(100, 142))  # ten blocks and two tokens
LAYOUT = KVLayout(1, 1, keys_and_values(64), BLOCK_SIZE, "float32")


def engine(*rules: Rule) -> StepScheduler:
    groups = [LayerGroup(BlockPool(64)), *(LayerGroup(BlockPool(64), rule) for rule in rules)]
    return StepScheduler(groups, StepSizes(BLOCK_SIZE, 8, 16), PrefixScope("model", Numerics()), KeepRule(interval=16))


def compute(scheduler: StepScheduler, salt: str = "") -> None:
    """Computes PROMPT and one token."""
    request = Request("r", RequestSpec(PROMPT, Sampling(max_tokens=1), cache_salt=salt))
    scheduler.add(request)
    while request.num_behind:
        scheduler.computed(scheduler.plan())
    scheduler.finish(request)
    scheduler.check()


def pull(num_tokens: int = 40, salt: str = "") -> Request:
    spec = RequestSpec(PROMPT, Sampling(), cache_salt=salt)
    request = Request("r.pull", spec, transfer_id="t.pull", is_pull=True)
    request.prompt_token_ids = PROMPT[:num_tokens]
    return request


def lent_by(lender: StepScheduler, asked: Request) -> bool:
    return lender.lend(asked, lender.root(asked))


@pytest.mark.parametrize("rules", [(), (STATE,), (Rule("window", 6),)], ids=["all", "state", "window"])
def test_a_beginning_is_lent_landed_and_found(rules: tuple[Rule, ...]) -> None:
    """After a pull, neither end holds blocks or has used a place in a step, and other salts find nothing."""
    lender, puller = engine(*rules), engine(*rules)
    compute(lender)
    lent, landing = pull(), pull()
    assert not lent_by(lender, pull(salt="other"))
    assert lent_by(lender, lent)
    assert (lent.status, lent.prompt_token_ids, lender.num_seqs) == (Status.EXPORTING, PROMPT[:40], 0)
    lender.check()
    assert puller.can_land(landing, 40)
    first = puller.land(landing, 40)
    assert puller.num_seqs == 0
    assert first[0] == 0
    puller.keep_pulled(landing)
    lender.finish(lent)
    for each in (lender, puller):
        each.check()
        assert not any(group.blocks.num_held for group in each.groups)
        assert each.num_known_tokens(Request("next", RequestSpec(PROMPT, Sampling()))) == 40
        assert not each.preemptions.tally().total
    assert puller.num_known_tokens(Request("next", RequestSpec(PROMPT, Sampling(), cache_salt="other"))) == 0


def test_weights_that_were_replaced_lend_nothing_to_others() -> None:
    """The peer would cache the blocks as those of its own weights."""
    old, new = engine(), engine()
    new.change_numerics(Numerics(weights="new"))
    compute(old)
    assert not old.lend(pull(), new.root(pull()))
    old.check()
    new.forget()
    compute(new)
    assert new.lend(pull(), new.root(pull()))


def test_a_source_with_other_weights_is_not_chosen() -> None:
    prompt = Prompt(RequestSpec(list(range(1001)), Sampling()))
    target, source = (prefill(f"prefill-{at}", at + 1, 1000.0) for at in range(2))
    for numerics, is_chosen in ((Numerics(), True), (Numerics(weights="old"), False)):
        assert source.info is not None
        source.info = structs.replace(source.info, numerics=numerics)
        holding(source, prompt, 200)
        links = {target.key: LinkState.parse("up (shm)")}
        source.load = Load(links=links, handover_costs={pull_over("shm"): HandoverCost(0.001, 1e-9)})
        assert source.num_held(prompt) == 800
        assert (PullSources([target, source], prompt).to(target) is not None) == is_chosen


def test_a_state_is_lent_where_it_is_kept() -> None:
    lender = engine(STATE)
    compute(lender)
    lent = pull(num_tokens=36)
    assert lent_by(lender, lent)
    assert len(lent.prompt_token_ids) == 32  # the last state checkpoint before the end
    lender.finish(lent)
    lender.check()


def test_what_was_cut_from_a_pull_does_not_wait_for_a_place() -> None:
    puller = engine()
    puller.add(Request("waits", RequestSpec(PROMPT, Sampling())))
    assert puller.can_land(pull(), 40)
    assert not puller.can_land(Request("lands", RequestSpec(PROMPT, Sampling()), leg="decode"), 40)


# ---- the choice of a source


def prefill(name: str, epoch: int, tokens_per_s: float) -> Instance:
    info = InstanceInfo(
        name=name,
        role="prefill",
        state="ready",
        server_ip="127.0.0.1",
        device_ids=["0"],
        epoch=epoch,
        pid=1,
        model_identity="model",
        layout=LAYOUT.to_info(),
        num_blocks=64,
    )
    found = Instance(name, "prefill", "127.0.0.1", 1, ["0"], state="ready", info=info)
    found.load = Load().at_rates(prefill_tokens_per_s=tokens_per_s)
    return found


def holding(source: Instance, prompt: Prompt, num_blocks: int, tier: str = "device") -> None:
    pool = pool_kind_of(source.info)
    assert pool is not None
    keys = b"".join(key.to_bytes(8, "little") for key in prompt.keys[pool][:num_blocks])
    source.known_blocks.apply(CacheKeys(keys, tier=tier))  # type: ignore[arg-type]


@pytest.mark.parametrize(("byte_s", "is_worth_it"), [(1e-9, True), (1e-3, False)])
def test_measured_rates_decide(byte_s: float, is_worth_it: bool) -> None:
    prompt = Prompt(RequestSpec(list(range(1001)), Sampling()))
    ask = RoutingRequest(prompt)
    target, source, smaller = (prefill(f"prefill-{at}", at + 1, 1000.0) for at in range(3))
    instances = [target, source, smaller]
    assert not are_linked(instances, target)
    holding(source, prompt, 200)
    holding(smaller, prompt, 100)
    for each in (source, smaller):
        links = {target.key: LinkState.parse("up (shm)")}
        costs = {pull_over("shm"): HandoverCost(0.001, byte_s)}
        each.load = Load(links=links, handover_costs=costs)
    assert are_linked(instances, target)
    pull = PullSources(instances, ask.prompt).to(target)
    assert (pull is not None) == is_worth_it
    if pull is not None:
        hint = pull.hint
        assert (hint.peer, hint.num_tokens, hint.within_s) == (source.key, 800, pytest.approx(0.8))
    holding(target, prompt, 240)
    assert PullSources(instances, ask.prompt).to(target) is None


@pytest.mark.parametrize(("tokens_per_s", "wakes"), [(1000.0, False), (200.0, True)])
def test_a_link_at_rest_is_woken_if_computing_takes_longer(tokens_per_s: float, wakes: bool) -> None:
    prompt = Prompt(RequestSpec(list(range(1001)), Sampling()))
    target, source = (prefill(f"prefill-{at}", at + 1, tokens_per_s) for at in range(2))
    holding(source, prompt, 200)
    costs = {pull_over("dist"): HandoverCost(0.001, 1e-9)}
    source.load = Load(links={target.key: LinkState("resting", ("dist",))}, handover_costs=costs)
    assert are_linked([target, source], target)
    pull = PullSources([target, source], prompt).to(target)
    assert (pull is not None) == wakes
    if pull is not None:
        assert pull.hint.wakes
        assert (pull.source, pull.num_saved) == (source, pytest.approx(600, abs=1))


def test_blocks_on_disk_are_not_pulled() -> None:
    prompt = Prompt(RequestSpec(list(range(1001)), Sampling()))
    source = prefill("prefill-0", 1, 1000.0)
    holding(source, prompt, 250, tier="disk")
    holding(source, prompt, 50, tier="host")
    assert source.num_held(prompt) == 200


# ---- a load


def sessions() -> list[Arrival]:
    """Returns sessions of three turns; each turn adds little to its prefix."""
    rng, ids, found = random.Random(5), count(100), []
    for number in range(12):
        at_s, own = rng.random() * 2, tuple(next(ids) for _ in range(40))
        for turn in range(3):
            num_tokens = 40 * 16 + turn * 32 + 5
            own = (*own, next(ids), next(ids))
            shown = own[: -(-num_tokens // 16)]
            found.append(
                Arrival(at_s=at_s, num_prompt_tokens=num_tokens, num_output_tokens=4, hash_ids=shown, block_tokens=16)
            )
            own, at_s = own[: num_tokens // 16], at_s + 2 * rng.random()
        del number
    return found


def test_a_load_of_sessions_computes_less() -> None:
    costs = Costs(
        model="made up",
        device="cpu",
        source="computed",
        step=StepCost(step_s=0.002, row_s=0.0005, prompt_token_s=5e-4),
        handover=HandoverCost(0.001, 1e-10),
        kv_token_nbytes=10_000,
        num_blocks=600,
    )
    layout = SimulatedLayout(num_prefill=3, num_decode=2, routing_policy="least-loaded")
    alone = simulate(layout, costs, sessions()).outcomes
    pulling = simulate(replace(layout, pulls_prefixes=True), costs, sessions()).outcomes
    assert not [each.error for each in (*alone, *pulling) if each.error]
    num_alone, num_pulling = (sum(each.num_cached_tokens for each in found) for found in (alone, pulling))
    assert num_pulling > 1.3 * num_alone
    assert simulate(replace(layout, pulls_prefixes=True), costs, sessions()).outcomes == pulling


# ---- routing


@pytest.mark.parametrize("policy", ["prefix-aware", "predicted-ttft"])
def test_a_prefix_that_can_be_pulled_counts_as_nearly_local(policy: str) -> None:
    """A little work at the instance with the prefix suffices to choose a linked one with capacity instead."""
    prompt = Prompt(RequestSpec(list(range(1001)), Sampling()))
    holder, other = (prefill(f"prefill-{at}", at + 1, 1000.0) for at in range(2))
    decode = replace(prefill("decode-0", 3, 1000.0), role="decode")
    holding(holder, prompt, 240)
    holder.outstanding_tokens = 300
    up, chosen = LinkState.parse("up (shm)"), {}
    for phase, num_free in (("up (shm)", 240), ("up (shm)", 0), ("waiting", 240)):
        costs = {pull_over("shm"): HandoverCost(0.001, 1e-9)}
        load = Load(links={decode.key: up, other.key: LinkState.parse(phase)}, handover_costs=costs)
        holder.load = load.at_rates(prefill_tokens_per_s=1000.0)
        other.load = Load(links={decode.key: up}, num_free_blocks=num_free).at_rates(prefill_tokens_per_s=1000.0)
        chosen[phase, num_free] = POLICIES[policy]([holder, other, decode], RoutingRequest(prompt))[0].name
    assert list(chosen.values()) == ["prefill-1", "prefill-0", "prefill-0"]


# ---- a link that reopens


@dataclass
class Ports:
    """Records an end's messages in order; nothing is shipped before a credit."""

    sent: list[tuple[str, Body]] = field(default_factory=list)
    ended: list[str | None] = field(default_factory=list)

    def send(self, conn: str, body: Body) -> None:
        self.sent.append((conn, body))

    def progress_s(self, conn: str) -> float:
        return 0.0

    def drop(self, conn: str, transfer_id: str) -> None:
        pass

    def export_ended(self, request: Request, error: str | None) -> None:
        self.ended.append(error)


@pytest.mark.parametrize("event", ["up", "lost", "down", "cancelled", "expired"])
def test_what_is_lent_over_a_waking_link_is_offered_when_it_is_up(event: str) -> None:
    """If the link fails to open, the lender releases its blocks, and the puller is notified or loses the connection."""
    now_s, ports, lent = [0.0], Ports(), pull()
    lent.peer = "prefill-0@1"
    terms = TransferTerms(lambda: now_s[0], Timeouts())
    exports = Exports(ports, ports, terms, ShipSizes((ShipGroup(4, 32),)))  # type: ignore[arg-type]
    exports.lend(lent, "c", is_up=False)
    assert not ports.sent
    assert exports.uses("c")
    match event:
        case "up":
            exports.link_up(lent.peer, "c")
            assert ports.sent == [("c", Offer("t.pull", 40, "", 0))]
            return
        case "lost":
            exports.link_lost(lent.peer, "refused")
        case "down":
            exports.on_link_down("c", "cut")
        case "cancelled":
            exports.on_cancel("c", Cancel("t.pull", "aborted"))
        case _:
            now_s[0] = 1000.0
            exports.expire()
            assert ports.sent == [("c", Revoke("t.pull"))]
    assert len(ports.ended) == 1
    assert not exports.uses("c")
