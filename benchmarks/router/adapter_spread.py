"""`lora --spread`: how often requests find their adapter in memory, by the way that they are routed.

Two prefill and two decode instances keep half of the adapters each. Every request names one of them, by Zipf's law.
With `least-loaded` the router prefers instances that have a request's adapter; with `session`, and a session of its own
for each request, it spreads them evenly and without a look at adapters, as round robin does. The figures are counts.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.child import make_model
from benchmarks.lora_folders import LoraFolders
from benchmarks.tiny_model import QUICK_SHAPE
from pd_cluster.bench.serve import sigterm_ends_it
from pd_cluster.client.streaming import make_client, measure
from pd_cluster.cluster.processes.launch import Launch
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.cluster.processes.ports import free_port_pair
from pd_cluster.errors import GenerationError
from pd_cluster.tables import Report, Result, check_writable

POLICIES = {"least-loaded": "prefers instances that have the adapter", "session": "evenly, as round robin"}
LOADED = " parts of "  # in the log of an instance, for each adapter that it reads


@dataclass(frozen=True, slots=True)
class SpreadBench:
    rounds: int
    quick: bool
    num_instances: int = 2  # of each role
    num_adapters: int = 12
    num_kept: int = 6  # by each instance
    concurrency: int = 3
    num_tokens: int = 16  # of prompts and of answers

    @property
    def num_requests(self) -> int:
        return 24 if self.quick else 120

    @property
    def command(self) -> str:
        return f"python -m benchmarks lora --spread --rounds {self.rounds}{' --quick' if self.quick else ''}"


@dataclass(slots=True)
class _Lines:
    """The processes' log, of which adapters that are read are counted."""

    num_loads: int = 0
    last: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.num_loads += LOADED in line
        self.last = [*self.last[-30:], line]


async def run(bench: SpreadBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError."""
    check_writable(json_path)
    nums_loads = dict.fromkeys(POLICIES, 0)
    with tempfile.TemporaryDirectory(prefix="pd-cluster-spread-") as place, sigterm_ends_it():
        model = await asyncio.to_thread(make_model, Path(place), QUICK_SHAPE)
        folders = LoraFolders(Path(place) / "adapters", Path(model), rank=8)
        paths = {f"a{at}": folders.next() for at in range(bench.num_adapters)}
        for at in range(bench.rounds):
            for policy in POLICIES:
                nums_loads[policy] += await _round(bench, str(model), paths, policy, at)
    report = Report(bench.command, _results(bench, nums_loads))
    report.show(
        f"{bench.num_requests} requests of {bench.num_adapters} adapters, {bench.num_instances} + "
        f"{bench.num_instances} instances that keep {bench.num_kept} each"
    )
    if json_path:
        report.write(json_path)


async def _round(bench: SpreadBench, model: str, paths: dict[str, Path], policy: str, at: int) -> int:
    """Returns how many adapters were read again for the requests."""
    flags = ["--enable-lora", f"--max-loras={bench.num_kept}", f"--max-cpu-loras={bench.num_kept}"]
    flags += [f"--routing-policy={policy}", *(f"--lora-modules={name}={path}" for name, path in paths.items())]
    number = bench.num_instances
    launch = Launch(
        model=model, num_prefill=number, num_decode=number, port=free_port_pair(), arguments=flags, restart="no"
    )
    lines = _Lines()
    cluster = Cluster(launch, lines.add)
    try:
        await cluster.start()
        await cluster.wait_ready()
        before = lines.num_loads
        asks = _asks(bench, list(paths), at)
        async with make_client(bench.concurrency) as client:

            async def work() -> None:
                for name, seed in asks:
                    body = {
                        "model": name,
                        "prompt": [random.Random(seed).randrange(256) for _ in range(bench.num_tokens)],
                        "max_tokens": bench.num_tokens,
                        "ignore_eos": True,
                        "prompt_cache_key": f"session-{seed}",
                    }
                    sample = await measure(client, f"{launch.url}/v1/completions", body)
                    if sample.error is not None:
                        raise GenerationError(f"a request failed: {sample.error}\n" + "\n".join(lines.last))

            await asyncio.gather(*(work() for _ in range(bench.concurrency)))
        return lines.num_loads - before
    finally:
        await cluster.stop()


def _asks(bench: SpreadBench, names: list[str], at: int) -> Iterator[tuple[str, int]]:
    """Yields the adapters of a round's requests, by Zipf's law, and a number for each."""
    rng = random.Random(at)
    weights = [1 / (rank + 1) for rank in range(len(names))]
    for number, name in enumerate(rng.choices(names, weights, k=bench.num_requests)):
        yield name, 1000 * at + number


def _results(bench: SpreadBench, nums_loads: dict[str, int]) -> list[Result]:
    num_legs = 2 * bench.num_requests * bench.rounds  # each request needs its adapter on two instances
    shares = {policy: 1 - num / num_legs for policy, num in nums_loads.items()}
    found = [
        Result(name=f"{how}: found in memory", value=shares[policy], unit="of legs", better="higher")
        for policy, how in POLICIES.items()
    ]
    least, even = (nums_loads[policy] for policy in POLICIES)
    name = "adapters read again, evenly to preferring"
    return [*found, Result(name=name, value=even / max(1, least), unit="×", better="higher", samples=bench.rounds)]
