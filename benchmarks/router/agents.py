"""`python -m benchmarks agents`: serves agents' sessions on simulated prefill instances, with and without
--prefix-pull.

The simulator serves a trace of sessions (`agents_trace`) with 1, 2 and 4 prefill instances of the same total memory and
speed. One instance shows the effect of a single pool with all the memory. The working set, which consists of the
contexts of all sessions that are open at a time, is `SET_SHARE` times as large as the pools.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.figures import begin, finish, result
from pd_cluster.bench.outcomes import Outcome
from pd_cluster.bench.request_arrivals import HASH_BLOCK_TOKENS, Arrival
from pd_cluster.bench.trace_files import write_trace
from pd_cluster.costs.linear_costs import Costs, HandoverCost, StepCost
from pd_cluster.result_tables import Report, Result
from pd_cluster.simulate.simulated_layout import SimulatedLayout
from pd_cluster.simulate.simulation import silent, simulate

SET_SHARE = 2.5
NUM_DECODE = 8
TOKENS_PER_S = 160_000.0  # prompt tokens a second of all prefill instances together
LINK_NBYTES_PER_S, TOKEN_NBYTES = 40e9, 1 << 16
SCALE = 8  # tokens of the trace per simulated token, because hashing all of them would take too long
COMPACT_SHARE = 0.008  # share of turns that replace the context by a summary


@dataclass(frozen=True, slots=True)
class Agents:
    """Medians, in tokens and seconds. `num_open`: open sessions. The number of turns is geometrically distributed."""

    num_open: int = 48
    num_turns: int = 64
    num_requests: int = 2000
    num_systems: int = 4  # system prompts with the definitions of tools
    system_tokens: int = 24_576
    start_tokens: int = 112_000  # length of a session's first message: files and history
    result_tokens: int = 2_400  # length of a tool's result
    output_tokens: int = 317
    tool_s: float = 6.0
    user_s: float = 240.0  # median pause for the user, who causes one pause in eight on average


def run(num_requests: int, seed: int, export: str, json: str) -> None:
    """Raises PdClusterError."""
    begin(json)
    agents = Agents(num_requests=num_requests)
    arrivals = agents_trace(agents, seed)
    title = f"{num_requests} turns of {agents.num_open} agents, seed {seed}"
    if export:
        write_trace(export, arrivals)
    shares = reused_shares(arrivals)
    num_tokens = sum(each.num_prompt_tokens for each in arrivals)
    ideal = sum(share * each.num_prompt_tokens for share, each in zip(shares, arrivals, strict=True)) / num_tokens
    results = [
        result("prompt, p50", [each.num_prompt_tokens for each in arrivals], "tokens"),
        result("output, p50", [each.num_output_tokens for each in arrivals], "tokens"),
        result("turns that reuse nine tenths", [sum(share >= 0.9 for share in shares) / len(shares)], "share"),
        result("hit share: infinite cache", [ideal], "of tokens", "higher"),
    ]
    pools = pool_tokens(agents, arrivals)
    for num_prefill, pulls in ((1, False), (2, False), (2, True), (4, False), (4, True)):
        results += _results(num_prefill, pulls, served(arrivals, num_prefill, pools, pulls))
    finish(Report(f"python -m benchmarks agents --num-requests {num_requests} --seed {seed}", results), title, json)


def _results(num_prefill: int, pulls: bool, outcomes: Sequence[Outcome]) -> list[Result]:
    name = f"{num_prefill}P{' with pulls' if pulls else ''}"
    times_ms = [1e3 * each.ttft_s for each in outcomes if each.ttft_s is not None]
    return [
        result(f"hit share: {name}", [hit_share(outcomes)], "of tokens", "higher"),
        result(f"ttft, p50: {name}", times_ms, "ms"),
        result(f"ttft, p90: {name}", times_ms, "ms", at=90),
    ]


def agents_trace(agents: Agents, seed: int) -> list[Arrival]:
    """Returns the turns in order of time. Equal arguments give equal turns."""
    rng, fresh = random.Random(f"agents {seed}"), itertools.count(1_000)
    found: list[Arrival] = []
    opened = [_sessions(agents, rng.getrandbits(64), fresh, slot) for slot in range(agents.num_open)]
    for session in opened:
        found += itertools.islice(session, 2 * agents.num_requests // agents.num_open + agents.num_turns)
    return sorted(found, key=lambda each: (each.at_s, each.session))[: agents.num_requests]


def _sessions(agents: Agents, seed: int, fresh: Iterator[int], slot: int) -> Iterator[Arrival]:
    """Yields the turns of endless sessions, one after another."""
    rng, at_s = random.Random(seed), 0.0
    at_s = rng.random() * agents.num_open * 4.0
    for number in itertools.count():
        system = rng.randrange(agents.num_systems)
        num_system = agents.system_tokens // HASH_BLOCK_TOKENS
        prefix = tuple(range(system * num_system, (system + 1) * num_system))
        ids, num_tokens = prefix, agents.system_tokens + _drawn(rng, agents.start_tokens, 0.5)
        while True:
            num_blocks = -(-num_tokens // HASH_BLOCK_TOKENS)
            ids = (*ids, *itertools.islice(fresh, max(0, num_blocks - len(ids))))
            num_output = _drawn(rng, agents.output_tokens, 0.8)
            yield Arrival(
                at_s=round(at_s, 3),
                num_prompt_tokens=num_tokens,
                num_output_tokens=num_output,
                hash_ids=ids,
                session=f"agent-{slot}-{number}",
            )
            ids = ids[: num_tokens // HASH_BLOCK_TOKENS]
            is_user = rng.random() < 1 / 8
            at_s += 0.01 * num_output + _drawn(rng, 1000 * (agents.user_s if is_user else agents.tool_s), 0.9) / 1000
            if rng.random() < 1 / agents.num_turns:
                break
            if rng.random() < COMPACT_SHARE:
                ids, num_tokens = prefix, agents.system_tokens + _drawn(rng, agents.start_tokens // 2, 0.5)
            else:
                num_tokens += num_output + _drawn(rng, agents.result_tokens, 0.8)


def _drawn(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(median), sigma)))


def reused_shares(arrivals: Sequence[Arrival]) -> list[float]:
    """Returns, for each turn, the share of its prompt that an infinite cache would contain."""
    known: set[int] = set()
    found = []
    for each in arrivals:
        num_known = next((at for at, name in enumerate(each.hash_ids) if name not in known), len(each.hash_ids))
        found.append(min(1.0, num_known * HASH_BLOCK_TOKENS / each.num_prompt_tokens))
        known.update(each.hash_ids[: each.num_prompt_tokens // HASH_BLOCK_TOKENS])
    return found


def pool_tokens(agents: Agents, arrivals: Sequence[Arrival]) -> int:
    """Returns the tokens that all prefill pools hold together: the working set divided by SET_SHARE."""
    mean = sum(each.num_prompt_tokens for each in arrivals) / len(arrivals)
    return round(agents.num_open * mean / SET_SHARE)


def served(arrivals: Sequence[Arrival], num_prefill: int, num_tokens: int, pulls: bool) -> list[Outcome]:
    """Simulates `num_prefill` instances that share the memory and the speed."""
    costs = Costs(
        model="agents",
        device="simulated",
        source="computed",
        step=StepCost(step_s=0.004, row_s=SCALE * 1e-3, prompt_token_s=SCALE * num_prefill / TOKENS_PER_S),
        handover=HandoverCost(0.003, 1 / LINK_NBYTES_PER_S),
        kv_token_nbytes=SCALE * TOKEN_NBYTES,
        num_blocks=num_tokens // num_prefill // HASH_BLOCK_TOKENS,
        block_size=HASH_BLOCK_TOKENS // SCALE,
        max_num_batched_tokens=8192 // SCALE,
    )
    layout = SimulatedLayout(num_prefill=num_prefill, num_decode=NUM_DECODE, pulls_prefixes=pulls)
    with silent():
        return simulate(layout, costs, [_scaled(each) for each in arrivals]).outcomes


def _scaled(arrival: Arrival) -> Arrival:
    return msgspec.structs.replace(
        arrival,
        num_prompt_tokens=-(-arrival.num_prompt_tokens // SCALE),
        num_output_tokens=-(-arrival.num_output_tokens // SCALE),
        block_tokens=HASH_BLOCK_TOKENS // SCALE,
    )


def hit_share(outcomes: Sequence[Outcome]) -> float:
    return sum(each.num_cached_tokens for each in outcomes) / sum(each.num_prompt_tokens for each in outcomes)
