"""`lora --cold`: the first request of an adapter that is not in memory, and what others pay for it.

A cluster of one prefill and one decode instance has more adapters than it keeps in memory. Some users ask the model
itself, without a pause. Beside them one more asks, with an adapter that must be read again, with one that is in memory,
or without any, in turn; so all three have the same work beside them, but for the reading.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from benchmarks.child import make_model
from benchmarks.lora_folders import LoraFolders
from benchmarks.tiny_model import QUICK_SHAPE, ModelShape
from pd_cluster.bench.serve import ServeBench, ask_model, sigterm_ends_it, started_cluster
from pd_cluster.client.streaming import make_client, measure
from pd_cluster.errors import GenerationError
from pd_cluster.tables import Report, Result, check_writable, percentiles

Kind = Literal["cold", "warm", "none"]
NAMES: dict[Kind, str] = {"cold": "read again", "warm": "in memory", "none": "the model itself"}
MOST_ADDED = 1.2  # to others' p99 TPOT
NUM_TOKEN_IDS = 256


@dataclass(frozen=True, slots=True)
class ColdBench:
    rounds: int
    quick: bool
    rank: int = 16
    num_kept: int = 4  # adapters in memory
    num_others: int = 3  # users of the model itself
    num_asks: int = 8  # of the one beside them, in each part of a round
    num_tokens: int = 32  # of prompts and of answers
    pause_s: float = 0.1  # between its asks

    @property
    def command(self) -> str:
        quick = " --quick" if self.quick else ""
        return f"python -m benchmarks lora --cold --rounds {self.rounds}{quick}"


@dataclass(slots=True)
class Measured:
    """The requests of one kind; `tpot_s` by round, of the others."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[list[float]] = field(default_factory=list)


async def run(bench: ColdBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError."""
    check_writable(json_path)
    measured: dict[Kind, Measured] = {kind: Measured() for kind in NAMES}
    with tempfile.TemporaryDirectory(prefix="pd-cluster-cold-") as place, sigterm_ends_it():
        shape = QUICK_SHAPE if bench.quick else ModelShape()
        model = await asyncio.to_thread(make_model, Path(place), shape)
        folders = LoraFolders(Path(place) / "adapters", Path(model), bench.rank)
        names = [f"a{at}" for at in range(3 * bench.num_kept)]
        modules = [f"{name}={folders.next()}" for name in names]
        flags = ["--enable-lora", f"--max-loras={bench.num_kept}", f"--max-cpu-loras={bench.num_kept}"]
        flags += [f"--max-lora-rank={bench.rank}", *(f"--lora-modules={each}" for each in modules)]
        cluster = ServeBench(model=str(model), more_flags=tuple(flags))
        async with started_cluster(cluster) as (url, _), make_client(bench.num_others + 1) as client:
            base, _ = await ask_model(client, url)
            clients = _Clients(client, url, bench, base, names[0], itertools.cycle(names[1:]))
            await clients.part("warm")
            for at in range(bench.rounds):
                kinds: list[Kind] = list(NAMES)
                for kind in kinds[at % 3 :] + kinds[: at % 3]:
                    ttft_s, tpot_s = await clients.part(kind)
                    measured[kind].ttft_s += ttft_s
                    measured[kind].tpot_s.append(tpot_s)
    report = Report(bench.command, _results(bench, measured))
    report.show(f"{bench.num_others} users of the model itself, and one whose adapter is read again or not")
    if json_path:
        report.write(json_path)


@dataclass(slots=True)
class _Clients:
    client: httpx.AsyncClient
    url: str
    bench: ColdBench
    base: str
    kept: str  # the name of an adapter that stays in memory
    others: Iterator[str]  # so many that each has given way when it comes again
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    async def part(self, kind: Kind) -> tuple[list[float], list[float]]:
        """Returns the TTFTs of the asks of this kind, and the others' TPOTs beside them."""
        ended = asyncio.Event()
        others = [asyncio.create_task(self._other(ended)) for _ in range(self.bench.num_others)]
        try:
            ttft_s = []
            for _ in range(self.bench.num_asks):
                ttft_s.append((await self._ask(self._model_of(kind)))[0])
                await asyncio.sleep(self.bench.pause_s)
        finally:
            ended.set()
            tpot_s = await asyncio.gather(*others)
        return ttft_s, [each for own in tpot_s for each in own]

    def _model_of(self, kind: Kind) -> str:
        return {"cold": lambda: next(self.others), "warm": lambda: self.kept, "none": lambda: self.base}[kind]()

    async def _other(self, ended: asyncio.Event) -> list[float]:
        tpot_s = []
        while not ended.is_set():
            tpot_s.append((await self._ask(self.base))[1])
        return tpot_s

    async def _ask(self, model: str) -> tuple[float, float]:
        """Returns TTFT and TPOT. Raises GenerationError."""
        num_tokens = self.bench.num_tokens
        body: dict[str, Any] = {"model": model, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        prompt = [self.rng.randrange(NUM_TOKEN_IDS) for _ in range(num_tokens)]
        sample = await measure(self.client, f"{self.url}/v1/completions", {**body, "prompt": prompt})
        if sample.error is not None or sample.ttft_s is None or sample.tpot_s is None:
            raise GenerationError(f"a request failed: {sample.error}")
        return sample.ttft_s, sample.tpot_s


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _results(bench: ColdBench, measured: dict[Kind, Measured]) -> list[Result]:
    found: list[Result] = []
    for kind, each in measured.items():
        found += percentiles(f"{NAMES[kind]}: ttft", [1e3 * s for s in each.ttft_s], "ms", percents=(50,))
        pooled = [1e3 * s for own in each.tpot_s for s in own]
        found += percentiles(f"others' tpot beside it ({NAMES[kind]})", pooled, "ms", percents=(50, 99))
    added = statistics.median(measured["cold"].ttft_s) - statistics.median(measured["warm"].ttft_s)
    found.append(Result(name="ttft that reading adds", value=1e3 * added, unit="ms", better="lower"))
    pairs = zip(measured["cold"].tpot_s, measured["warm"].tpot_s, strict=True)
    ratio = statistics.median(_p99(cold) / _p99(warm) for cold, warm in pairs)
    return [
        *found,
        Result(
            name="others' p99 tpot while adapters are read again, times with one in memory",
            value=ratio,
            unit="×",
            better="lower",
            samples=bench.rounds,
            goal=None if bench.quick else MOST_ADDED,
        ),
    ]
