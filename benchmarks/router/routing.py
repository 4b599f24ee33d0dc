"""`python -m benchmarks routing`: serves conversations of several turns with one routing policy after another.

Each user sends `input_len` random tokens, gets exactly `output_len` back, waits for a while (exponentially distributed,
seeded) and continues. A turn's prompt begins with the whole conversation before it. The first turns of users are
`START_S` apart on average. In each round, every policy gets a new cluster with empty caches, and the same users.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from benchmarks.child_process import make_model
from benchmarks.figures import begin, finish, names_of, result
from benchmarks.mixed_load import answered
from benchmarks.model_shapes import SMALL_SHAPE, ModelShape
from pd_cluster.bench.serve_bench import ServeBench, ask_model, sigterm_ends_it, started_cluster
from pd_cluster.client.instance_list import fetch_settled
from pd_cluster.client.streaming_client import make_client
from pd_cluster.cluster.placement.routing_policy import POLICIES
from pd_cluster.errors import ConfigError
from pd_cluster.result_tables import Report, Result, percentile, progress

SEED = 0
START_S = 0.2  # mean time between the first turns of two users
NUM_TOKEN_IDS = 256
NUM_INSTANCES = 2  # instances of each role


@dataclass(frozen=True, slots=True)
class Conversations:
    users: int = 50
    turns: int = 4
    input_len: int = 96
    output_len: int = 24
    think_s: float = 1.0

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the longest conversation."""
        return self.turns * (self.input_len + self.output_len)


@dataclass(slots=True)
class PolicyFigures:
    """One policy's results, over all rounds."""

    first_ttft_ms: list[float] = field(default_factory=list)  # TTFT of first turns
    later_ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    hit_shares: list[float] = field(default_factory=list)  # cached prompt tokens on prefill instances, per round
    kv_nbytes: list[float] = field(default_factory=list)


async def run(policies: str, talk: Conversations, rounds: int, json: str) -> None:
    """Measures and reports. Raises PdClusterError for an unknown policy, and for failed requests."""
    names = names_of("--policies", policies, POLICIES)
    begin(json)
    found = {policy: PolicyFigures() for policy in names}
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder, sigterm_ends_it():
        model = str(await asyncio.to_thread(make_model, Path(folder), _shape_of(talk)))
        for at in range(rounds):
            for policy in names if at % 2 == 0 else reversed(names):
                await _round(talk, model, policy, at, found[policy])
    asked = f"--policies {','.join(names)} --users {talk.users} --turns {talk.turns} --rounds {rounds}"
    title = f"{talk.users} users, {talk.turns} turns of {talk.input_len} + {talk.output_len} tokens"
    finish(Report(f"python -m benchmarks routing {asked}", _results(found)), title, json)


def _shape_of(talk: Conversations) -> ModelShape:
    return msgspec.structs.replace(SMALL_SHAPE, max_positions=max(SMALL_SHAPE.max_positions, talk.num_tokens))


async def _round(bench: Conversations, model: str, policy: str, at: int, found: PolicyFigures) -> None:
    cluster = ServeBench(model=model, prefill=NUM_INSTANCES, decode=NUM_INSTANCES, routing_policy=policy)
    async with started_cluster(cluster) as (url, admin), make_client(bench.users) as client:
        name, max_model_len = await ask_model(client, url)
        if max_model_len is not None and bench.num_tokens > max_model_len:
            raise ConfigError(f"--turns {bench.turns}: {bench.num_tokens} tokens; the context is {max_model_len}")
        rng = random.Random(f"{SEED} {at}")
        with progress(f"{policy}, round {at + 1}", bench.users * bench.turns) as advance:
            talks = [_Talk(client, url, name, bench, rng.getrandbits(32), found) for _ in range(bench.users)]
            await asyncio.gather(*(talk.go_on(advance) for talk in talks))
        entries = await fetch_settled(admin)
    asked = sum(entry["num_prefix_query_tokens"] for entry in entries)
    found.hit_shares.append(sum(entry["num_prefix_hit_tokens"] for entry in entries) / asked if asked else 0.0)
    found.kv_nbytes.append(sum(entry["kv_received_nbytes"] for entry in entries))


@dataclass(slots=True)
class _Talk:
    """One user's conversation."""

    client: httpx.AsyncClient
    url: str
    model: str
    bench: Conversations
    seed: int
    found: PolicyFigures

    async def go_on(self, advance: Callable[[], None]) -> None:
        """Runs the conversation's turns. Raises GenerationError."""
        rng, bench = random.Random(self.seed), self.bench
        prompt: list[int] = []
        more = {"model": self.model, "max_tokens": bench.output_len, "temperature": 0, "ignore_eos": True}
        await asyncio.sleep(rng.random() * START_S * bench.users)
        for turn in range(bench.turns):
            prompt += [rng.randrange(NUM_TOKEN_IDS) for _ in range(bench.input_len)]
            body = {"prompt": prompt, "prompt_cache_key": f"user-{self.seed}", **more}
            sample = await answered(self.client, f"{self.url}/v1/completions", body)
            advance()
            times_ms = self.found.later_ttft_ms if turn else self.found.first_ttft_ms
            times_ms.append(1e3 * (sample.ttft_s or 0.0))
            self.found.tpot_ms.append(1e3 * (sample.tpot_s or 0.0))
            prompt += sample.token_ids
            await asyncio.sleep(rng.expovariate(1 / bench.think_s) if bench.think_s else 0)


def _results(found: dict[str, PolicyFigures]) -> list[Result]:
    results: list[Result] = []
    for policy, each in found.items():
        results += [
            result(f"{policy}: hit share", each.hit_shares, "of tokens", "higher"),
            result(f"{policy}: KV moved", each.kv_nbytes, "bytes"),
            result(f"{policy}: ttft, turn 1, p50", each.first_ttft_ms, "ms"),
            result(f"{policy}: ttft, later, p50", each.later_ttft_ms, "ms"),
            result(f"{policy}: ttft, later, p90", each.later_ttft_ms, "ms", at=90),
            result(f"{policy}: tpot, p50", each.tpot_ms, "ms"),
        ]
    (first, base), *others = found.items()
    base_ms = percentile(base.later_ttft_ms, 50)
    for policy, each in others:
        ratios = [ms / base_ms for ms in each.later_ttft_ms] if base_ms else []
        results.append(result(f"ttft, later turns, {policy} to {first}", ratios, "ratio"))
    return results
