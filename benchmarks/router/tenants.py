"""`python -m benchmarks tenants`: the cost of keeping tenants' cached prompts apart.

Tenants send questions after one system prompt that they share. In mode "shared" all use the same cache, as with
`--shared-prefix-cache`; in mode "apart" each tenant's requests have a salt, as keys give them by default. Both modes
run on one cluster, with other random system prompts in each round, so that neither finds the other's blocks.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.child import make_model
from benchmarks.tiny_model import SMALL_SHAPE
from pd_cluster.bench.serve import ServeBench, ask_model, sigterm_ends_it, started_cluster
from pd_cluster.client.instances import fetch_settled
from pd_cluster.client.streaming import make_client, measure
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.tables import Report, Result, check_writable, percentiles, progress

SEED = 0
NUM_TOKEN_IDS = 256
OUTPUT_LEN = 2
MODES = ("shared", "apart")


@dataclass(frozen=True, slots=True)
class Tenants:
    """The command's parameters. Without a `model` one of random weights is made, large enough for prompts to matter."""

    model: str = ""
    tenants: int = 8
    requests: int = 8
    system_len: int = 512
    question_len: int = 32
    rounds: int = 3

    @property
    def command(self) -> str:
        model = f" --model {self.model}" if self.model else ""
        return (
            f"python -m benchmarks tenants{model} --tenants {self.tenants} --requests {self.requests} "
            f"--system-len {self.system_len} --question-len {self.question_len} --rounds {self.rounds}"
        )


@dataclass(slots=True)
class Measured:
    """One mode's results, over all rounds."""

    ttft_s: list[float] = field(default_factory=list)
    num_asked: int = 0  # prompt tokens
    num_computed: int = 0  # those not cached where they were prefilled
    errors: list[str] = field(default_factory=list)


async def run(bench: Tenants, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError: a shape that does not fit, failed requests."""
    check_writable(json_path)
    measured = {mode: Measured() for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder, sigterm_ends_it():
        model = bench.model or str(await asyncio.to_thread(make_model, Path(folder), SMALL_SHAPE))
        async with started_cluster(ServeBench(model=model)) as (url, admin), make_client() as client:
            name, max_model_len = await ask_model(client, url)
            length = bench.system_len + bench.question_len + OUTPUT_LEN
            if max_model_len is not None and length > max_model_len:
                raise ConfigError(f"--system-len {bench.system_len}: {length} tokens; the context is {max_model_len}")
            with progress("tenants", len(MODES) * bench.rounds * bench.tenants * bench.requests) as advance:
                for at in range(bench.rounds):
                    for mode in MODES if at % 2 == 0 else reversed(MODES):
                        before = await _prefix_tokens(admin)
                        await _round(bench, client, url, name, f"{mode} {at}", measured[mode], advance)
                        after = await _prefix_tokens(admin)
                        measured[mode].num_asked += after[0] - before[0]
                        measured[mode].num_computed += (after[0] - after[1]) - (before[0] - before[1])
    report = Report(bench.command, _results(measured))
    report.show(f"{bench.tenants} tenants, {bench.requests} requests each, {bench.system_len} tokens in common")
    if json_path:
        report.write(json_path)
    errors = [error for each in measured.values() for error in each.errors]
    if errors:
        raise GenerationError(f"{len(errors)} requests failed; the first: {errors[0]}")


async def _round(
    bench: Tenants,
    client: httpx.AsyncClient,
    url: str,
    model: str,
    name: str,
    measured: Measured,
    advance: Callable[[], None],
) -> None:
    """Sends one request after another, tenants in random order, so that a first token waits only for its own prompt."""
    rng = random.Random(f"{SEED} {name}")
    system = _tokens(rng, bench.system_len)
    senders = [tenant for tenant in range(bench.tenants) for _ in range(bench.requests)]
    rng.shuffle(senders)
    for tenant in senders:
        body: dict[str, Any] = {
            "model": model,
            "prompt": system + _tokens(rng, bench.question_len),
            "max_tokens": OUTPUT_LEN,
        }
        body |= {"temperature": 0, "ignore_eos": True}
        if name.startswith("apart"):
            body["cache_salt"] = f"tenant-{tenant}"
        sample = await measure(client, f"{url}/v1/completions", body)
        advance()
        if sample.error is not None:
            measured.errors.append(sample.error)
        elif sample.ttft_s is not None:
            measured.ttft_s.append(sample.ttft_s)


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(NUM_TOKEN_IDS) for _ in range(number)]


async def _prefix_tokens(admin: str) -> tuple[int, int]:
    """Returns the prompt tokens that prefill instances were asked for, and the cached ones among them."""
    entries = [entry for entry in await fetch_settled(admin) if entry["role"] == "prefill"]
    return sum(e["num_prefix_query_tokens"] for e in entries), sum(e["num_prefix_hit_tokens"] for e in entries)


def _results(measured: dict[str, Measured]) -> list[Result]:
    results: list[Result] = []
    for mode, each in measured.items():
        share = each.num_computed / each.num_asked if each.num_asked else None
        results.append(Result(name=f"{mode}: prompt tokens computed", value=share, unit="of all", better="lower"))
        results += percentiles(f"{mode}: ttft", [1e3 * s for s in each.ttft_s], "ms", percents=(50, 90))
    shared, apart = measured["shared"], measured["apart"]
    tokens = apart.num_computed / shared.num_computed if shared.num_computed else None
    means = [sum(each.ttft_s) / len(each.ttft_s) if each.ttft_s else 0.0 for each in (apart, shared)]
    ttft = means[0] / means[1] if means[1] else None
    results.append(Result(name="prompt tokens computed, apart to shared", value=tokens, unit="ratio", better="lower"))
    results.append(Result(name="mean ttft, apart to shared", value=ttft, unit="ratio", better="lower"))
    return results
