"""`python -m benchmarks multimodal --encode N`: many pictures with encoders (E + P + D) and without (P + D), in turn.

Two clusters of the same model run beside each other, and each prompt goes to one and then to the other, each time with
new pictures. CPU time of the prefill instance does not depend on what else a machine does; TTFT does.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.child import run_peer
from benchmarks.multimodal import PEER_DEADLINE_S, WARM_UP, Asker, Measured, Multimodal
from benchmarks.pictures import url_of
from benchmarks.processes import cpu_s
from benchmarks.spec import Spec, Workload
from pd_cluster.bench.serve import ServeBench, ask_model, sigterm_ends_it, started_cluster
from pd_cluster.client.instances import Entries, fetch_instances, fetch_settled, links_of
from pd_cluster.client.streaming import make_client
from pd_cluster.errors import GenerationError
from pd_cluster.settings.engine import SHIPPED_VISION_MODEL
from pd_cluster.tables import Report, Result, check_writable, percentile, spread

CPU_GOAL = 0.5  # of prefill's CPU time without encoders
LINK_S = 30.0


@dataclass(slots=True)
class Side:
    """One of the two clusters, and what was measured of it, all rounds together."""

    name: str
    asker: Asker
    admin: str
    ttft_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)  # CPU time of the prefill instance for a prompt

    async def ask(self, urls: list[str]) -> None:
        (pid,) = [each["rank_pids"][0] for each in await fetch_instances(self.admin) if each["role"] == "prefill"]
        before_s = cpu_s(pid)
        self.ttft_s.append(await self.asker.picture(urls))
        self.prefill_s.append(cpu_s(pid) - before_s)


async def run(bench: Multimodal, num_encode: int, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError."""
    check_writable(json_path)
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as name, sigterm_ends_it():
        folder, nothing = Path(name), Workload(name="", prompts=[], output_lens=[])
        spec = Spec(
            model=str(folder / "model"),
            gguf=str(SHIPPED_VISION_MODEL),
            num_threads=bench.threads,
            warmup=nothing,
            quick=bench.quick,
        )
        await asyncio.to_thread(run_peer, "vision", spec, folder, PEER_DEADLINE_S)  # makes the model
        without, having = (ServeBench(model=spec.model, encode=number) for number in (0, num_encode))
        async with started_cluster(without) as plain, started_cluster(having) as larger, make_client() as client:
            sides = []
            for title, (url, admin) in (("P + D", plain), (f"{num_encode} E + P + D", larger)):
                asker = Asker(client, url, (await ask_model(client, url))[0], measured)
                sides.append(Side(title, asker, admin))
            await linked(larger[1], num_encode)
            for side in sides:
                await side.asker.picture([url_of(WARM_UP)])
            for at in range(bench.rounds * (1 if bench.quick else 4)):
                for turn, side in enumerate(sides if at % 2 == 0 else sides[::-1]):
                    first = 100_000 + bench.several * (2 * at + turn)
                    await side.ask([url_of(first + each) for each in range(bench.several)])
            entries = await fetch_settled(larger[1])
    command = f"{bench.command} --encode {num_encode}"
    report = Report(command, results(bench, sides, entries))
    report.show(f"Prompts with {bench.several} pictures of 448 x 448 pixels, in turn")
    if json_path:
        report.write(json_path)
    if measured.errors:
        raise GenerationError(f"{len(measured.errors)} requests failed; the first: {measured.errors[0]}")


async def linked(admin: str, num_encode: int) -> None:
    """Waits until the prefill instance has a link to each encoder. Raises GenerationError."""
    deadline_s = time.monotonic() + LINK_S
    while time.monotonic() < deadline_s:
        entries = await fetch_instances(admin)
        links = [links_of(each) for each in entries if each["role"] == "prefill"]
        encoders = [each["instance_id"] for each in entries if each["role"] == "encode"]
        up = sum(name in of and of[name].is_up for of in links for name in encoders)
        if up == num_encode * len(links):
            return
        await asyncio.sleep(0.05)
    raise GenerationError(f"the prefill instance has no link to {num_encode} encoders after {LINK_S:g} s")


def results(bench: Multimodal, sides: Sequence[Side], entries: Entries) -> list[Result]:
    plain, having = sides

    def total(name: str) -> int:
        return sum(each[name] for each in entries if each["role"] == "prefill")

    return [
        *(_of(f"ttft, {side.name}", side.ttft_s, 1e3, "ms") for side in sides),
        Result(name="the same, with encoders to without", value=_ratio(having.ttft_s, plain.ttft_s), **RATIO),
        *(_of(f"prefill's CPU time a prompt, {side.name}", side.prefill_s, 1e3, "ms of CPU") for side in sides),
        Result(
            name="the same, with encoders to without",
            value=_ratio(having.prefill_s, plain.prefill_s),
            goal=None if bench.quick else CPU_GOAL,
            **RATIO,
        ),
        Result(name="images from encoders", value=float(total("num_landed_images")), unit="images", better="higher"),
        Result(
            name="images that encoders failed to deliver",
            value=float(total("num_encoder_fallbacks")),
            unit="images",
            better="lower",
        ),
        Result(name="features moved", value=total("feature_nbytes") / 1e6, unit="MB", better="lower"),
    ]


RATIO: dict[str, Any] = {"unit": "ratio", "better": "lower"}


def _of(name: str, values: list[float], scale: float, unit: str) -> Result:
    value = scale * (percentile(values, 50) or 0.0)
    return Result(name=name, value=value, unit=unit, better="lower", samples=len(values), spread=spread(values))


def _ratio(one: list[float], other: list[float]) -> float | None:
    first, second = percentile(one, 50), percentile(other, 50)
    return first / second if first is not None and second else None
