"""`python -m benchmarks routing`: conversations of several turns, with one routing policy after another.

Each user sends `input_len` random tokens, gets exactly `output_len` back, thinks for a while (exponential, seeded) and
continues; a turn's prompt is everything said before. The users start spread over `START_S` each. Every policy gets a
fresh cluster in each round, so that all begin with empty caches, and the same users. A policy written `NAME+host` is
measured with a host cache on each instance, the others without.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.child import make_model
from benchmarks.tiny_model import SMALL_SHAPE
from pd_cluster.bench.serve import ServeBench, ask_model, sigterm_ends_it, started_cluster
from pd_cluster.client.instances import Entries, fetch_settled
from pd_cluster.client.streaming import Sample, make_client, measure
from pd_cluster.cluster.routing.policy import POLICIES
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.tables import Report, Result, check_writable, percentiles, progress

SEED = 0
START_S = 0.2  # between the first turns of two users, on average
NUM_TOKEN_IDS = 256
WITH_HOST = "+host"  # behind a policy's name


@dataclass(frozen=True, slots=True)
class Conversations:
    """The command's parameters. Without a `model` one of random weights is made, large enough for prompts to matter."""

    model: str = ""
    prefill: int = 2
    decode: int = 2
    policies: tuple[str, ...] = ("least-loaded", "prefix-aware")
    users: int = 50
    turns: int = 4
    input_len: int = 96
    output_len: int = 24
    think_s: float = 1.0
    rounds: int = 1
    num_blocks: int = 0  # of each instance's device; 0: the instance's default
    host_cache_gib: float = 0.0

    def __post_init__(self) -> None:
        if unknown := [name for name in self.policies if name.removesuffix(WITH_HOST) not in POLICIES]:
            known = ",".join(POLICIES)
            raise ConfigError(f"--policies {unknown[0]!r}: expected some of {known}, each also with {WITH_HOST}")
        with_host = [name for name in self.policies if name.endswith(WITH_HOST)]
        if bool(with_host) != bool(self.host_cache_gib):
            raise ConfigError(
                f"--host-cache {self.host_cache_gib:g}: goes with a policy such as prefix-aware{WITH_HOST}"
            )

    def flags_of(self, policy: str) -> tuple[str, ...]:
        """Returns the flags of a policy's cluster, besides the policy."""
        blocks = (f"--num-blocks={self.num_blocks}",) if self.num_blocks else ()
        return (*blocks, f"--kv-host-cache={self.host_cache_gib:g}") if policy.endswith(WITH_HOST) else blocks

    @property
    def command(self) -> str:
        model = f" --model {self.model}" if self.model else ""
        return (
            f"python -m benchmarks routing --prefill {self.prefill} --decode {self.decode}{model} "
            f"--policies {','.join(self.policies)} --users {self.users} --turns {self.turns} "
            f"--input-len {self.input_len} --output-len {self.output_len} --think-time {self.think_s:g} "
            f"--rounds {self.rounds}{self._caches}"
        )

    @property
    def _caches(self) -> str:
        blocks = f" --num-blocks {self.num_blocks}" if self.num_blocks else ""
        return blocks + (f" --host-cache {self.host_cache_gib:g}" if self.host_cache_gib else "")


@dataclass(slots=True)
class Measured:
    """One policy's results, over all rounds."""

    first_ttft_s: list[float] = field(default_factory=list)  # of first turns
    later_ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    hit_shares: list[float] = field(default_factory=list)  # of prompt tokens on prefill instances; one per round
    kv_nbytes: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def run(bench: Conversations, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError: a shape that does not fit, failed requests."""
    check_writable(json_path)
    measured = {policy: Measured() for policy in bench.policies}
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder, sigterm_ends_it():
        model = bench.model or str(await asyncio.to_thread(make_model, Path(folder), SMALL_SHAPE))
        for at in range(bench.rounds):
            for policy in bench.policies if at % 2 == 0 else reversed(bench.policies):
                await _round(bench, model, policy, at, measured[policy])
    report = Report(bench.command, _results(bench, measured))
    report.show(f"{bench.users} users, {bench.turns} turns of {bench.input_len} + {bench.output_len} tokens")
    if json_path:
        report.write(json_path)
    errors = [error for each in measured.values() for error in each.errors]
    if errors:
        raise GenerationError(f"{len(errors)} requests failed; the first: {errors[0]}")


async def _round(bench: Conversations, model: str, policy: str, at: int, measured: Measured) -> None:
    cluster = ServeBench(
        model=model,
        prefill=bench.prefill,
        decode=bench.decode,
        routing_policy=policy.removesuffix(WITH_HOST),
        more_flags=bench.flags_of(policy),
    )
    async with started_cluster(cluster) as (url, admin), make_client(bench.users) as client:
        name, max_model_len = await ask_model(client, url)
        longest = bench.turns * (bench.input_len + bench.output_len)
        if max_model_len is not None and longest > max_model_len:
            raise ConfigError(f"--turns {bench.turns}: {longest} tokens; the model's context is {max_model_len}")
        rng = random.Random(f"{SEED} {at}")
        with progress(f"{policy}, round {at + 1}", bench.users * bench.turns) as advance:
            talks = [
                _Talk(client, url, name, bench, rng.getrandbits(32), measured, advance) for _ in range(bench.users)
            ]
            await asyncio.gather(*(talk.go_on() for talk in talks))
        entries = await fetch_settled(admin)
    measured.hit_shares.append(_hit_share(entries))
    measured.kv_nbytes.append(sum(entry["kv_received_nbytes"] for entry in entries))


@dataclass(slots=True)
class _Talk:
    """One user's conversation."""

    client: httpx.AsyncClient
    url: str
    model: str
    bench: Conversations
    seed: int
    measured: Measured
    advance: Callable[[], None]

    async def go_on(self) -> None:
        rng, bench = random.Random(self.seed), self.bench
        prompt: list[int] = []
        await asyncio.sleep(rng.random() * START_S * bench.users)
        for turn in range(bench.turns):
            prompt += [rng.randrange(NUM_TOKEN_IDS) for _ in range(bench.input_len)]
            sample = await measure(self.client, f"{self.url}/v1/completions", self._body(prompt))
            self.advance()
            if sample.error is not None:
                self.measured.errors.append(sample.error)
                return
            self._note(sample, is_first=turn == 0)
            prompt += sample.token_ids
            await asyncio.sleep(rng.expovariate(1 / bench.think_s) if bench.think_s else 0)

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.bench.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "prompt_cache_key": f"user-{self.seed}",
        }

    def _note(self, sample: Sample, is_first: bool) -> None:
        if sample.ttft_s is not None:
            (self.measured.first_ttft_s if is_first else self.measured.later_ttft_s).append(sample.ttft_s)
        if sample.tpot_s is not None:
            self.measured.tpot_s.append(sample.tpot_s)


def _hit_share(entries: Entries) -> float:
    """Returns the share of the prompt tokens to compute that were cached where they were admitted."""
    asked = sum(entry["num_prefix_query_tokens"] for entry in entries)
    return sum(entry["num_prefix_hit_tokens"] for entry in entries) / asked if asked else 0.0


def _results(bench: Conversations, measured: dict[str, Measured]) -> list[Result]:
    results: list[Result] = []
    for policy, each in measured.items():
        results += [
            Result(name=f"{policy}: hit share", value=_median(each.hit_shares), unit="of tokens", better="higher"),
            Result(name=f"{policy}: KV moved", value=_median(each.kv_nbytes), unit="bytes", better="lower"),
            *percentiles(f"{policy}: ttft, turn 1", [1e3 * s for s in each.first_ttft_s], "ms", percents=(50, 90)),
            *percentiles(f"{policy}: ttft, later", [1e3 * s for s in each.later_ttft_s], "ms", percents=(50, 90)),
            *percentiles(f"{policy}: tpot", [1e3 * s for s in each.tpot_s], "ms", percents=(50,)),
        ]
    base = measured[bench.policies[0]]
    for policy in bench.policies[1:]:
        ratio = _ratio(measured[policy].later_ttft_s, base.later_ttft_s)
        name = f"ttft, later turns, {policy} to {bench.policies[0]}"
        results.append(Result(name=name, value=ratio, unit="ratio", better="lower"))
    return results


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(values: list[float], base: list[float]) -> float | None:
    return statistics.median(values) / statistics.median(base) if values and base else None
