"""`python -m benchmarks multimodal`: what pictures cost, where they are read and where they are computed.

A model of Qwen2-VL's architecture with random weights is made for it. Three parts, each in every round: how many
pictures the front reads, without a cluster; TTFT with pictures, of a cluster and of transformers' generate(); and the
time between tokens of streams without pictures, idle and while pictures come. Once, in CPU time: the tower alone, of
one rank and of two that share its work. Its own process holds the event loop
whose longest turn is measured, in CPU time, so that a busy machine does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.child import run_peer
from benchmarks.pictures import url_of
from benchmarks.spec import Spec, Workload
from pd_cluster.bench.serve import ServeBench, ask_model, sigterm_ends_it, started_cluster
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.vision import VisionPart
from pd_cluster.client.streaming import Sample, make_client, measure
from pd_cluster.errors import GenerationError
from pd_cluster.service.prompts.pictures import PictureIntake, Source
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.parse import parse
from pd_cluster.settings.engine import SHIPPED_VISION_MODEL
from pd_cluster.settings.media import MediaSettings
from pd_cluster.tables import Report, Result, check_writable, percentile, spread

REPEATED_GOAL = 0.2  # of a first picture's TTFT
STREAMS_GOAL = 1.5  # of idle TPOT
RANKS_GOAL = 0.6  # of one rank's work, on the busier one of two
HELD_GOAL_MS = 50.0
PEER_DEADLINE_S = 300.0
WARM_UP = 90_000  # seeds of pictures that nothing else asks for


@dataclass(frozen=True, slots=True)
class Multimodal:
    """The command's parameters."""

    rounds: int = 3
    threads: int = 1
    quick: bool = False

    @property
    def command(self) -> str:
        return "python -m benchmarks multimodal " + (
            "--quick" if self.quick else f"--rounds {self.rounds} --threads {self.threads}"
        )

    @property
    def several(self) -> int:
        """How many pictures the larger prompt has."""
        return 2 if self.quick else 8

    @property
    def num_front(self) -> int:
        """How many pictures the front reads in a round."""
        return 4 if self.quick else 48

    @property
    def num_tokens(self) -> int:
        """Output tokens of a stream."""
        return 16 if self.quick else 400


@dataclass(slots=True)
class Measured:
    """Times in seconds, of all rounds."""

    images_per_s: list[float] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    repeated_s: list[float] = field(default_factory=list)
    several_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)  # between tokens
    beside_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def kept(self, sample: Sample) -> Sample:
        if sample.error is not None:
            self.errors.append(sample.error)
        return sample


async def run(bench: Multimodal, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError."""
    check_writable(json_path)
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as name, sigterm_ends_it():
        folder = Path(name)
        nothing = Workload(name="", prompts=[], output_lens=[])
        spec = Spec(
            model=str(folder / "model"),
            gguf=str(SHIPPED_VISION_MODEL),
            num_threads=bench.threads,
            warmup=nothing,
            quick=bench.quick,
        )
        peer = await asyncio.to_thread(run_peer, "vision", spec, folder, PEER_DEADLINE_S)
        tower = await asyncio.to_thread(run_peer, "tower", spec, folder, PEER_DEADLINE_S)
        vision = Checkpoint.open(spec.model).vision
        assert vision is not None
        async with started_cluster(ServeBench(model=spec.model)) as (url, _), make_client() as client:
            asker = Asker(client, url, (await ask_model(client, url))[0], measured)
            await asker.picture([url_of(WARM_UP)])
            for at in range(bench.rounds):
                await front(bench, vision, 10_000 * at, measured)
                await pictures(bench, asker, 10_000 * at, measured)
                await streams(bench, asker, 10_000 * at, measured)
    report = Report(bench.command, results(bench, measured, peer.figures | tower.figures))
    report.show(f"Pictures of 448 x 448 pixels, {bench.rounds} rounds; peer: {peer.version}")
    if json_path:
        report.write(json_path)
    if measured.errors:
        raise GenerationError(f"{len(measured.errors)} requests failed; the first: {measured.errors[0]}")


# ---- the front


async def front(bench: Multimodal, vision: VisionPart, seed: int, measured: Measured) -> None:
    """Reads pictures as the scheduler does, each in a request of its own: parsed, read by a child, put in a message."""
    intake = PictureIntake(vision, MediaSettings(cache_gb=0.0))
    bodies = [body_of(bench, [url_of(seed + at)], "m") for at in range(bench.num_front)]
    pad = vision.rules.token_id

    async def one(body: bytes) -> None:
        request = parse(body, ChatCompletionRequest)
        sources = [Source(*medium) for at, message in enumerate(request.messages) for medium in message.media(at)]
        shown = await intake.place([1, *[pad] * len(sources), 2], sources, "messages")
        msgspec.msgpack.encode(shown.prompt)

    try:
        await asyncio.gather(*(one(body) for body in bodies[:2]))  # which start the children
        async with held(measured.held_s):
            started_s = time.perf_counter()
            await asyncio.gather(*(one(body) for body in bodies))
            measured.images_per_s.append(len(bodies) / (time.perf_counter() - started_s))
    finally:
        await intake.close()


@contextlib.asynccontextmanager
async def held(found: list[float]) -> AsyncIterator[None]:
    """Adds the most CPU time that the event loop's thread takes between two turns of a task that always waits."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - before_s)

    task = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        task.cancel()
        found.append(longest)


# ---- the cluster


def body_of(bench: Multimodal, urls: list[str], model: str, max_tokens: int = 2) -> bytes:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": "What do you see?"}]
    more = {"model": model, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return msgspec.json.encode({"messages": [{"role": "user", "content": content}], **more})


@dataclass(frozen=True, slots=True)
class Asker:
    client: httpx.AsyncClient
    url: str
    model: str
    measured: Measured

    async def picture(self, urls: list[str]) -> float:
        """Returns the TTFT of a prompt with these pictures."""
        sample = await self._ask(msgspec.json.decode(body_of(Multimodal(), urls, self.model)))
        return sample.ttft_s or 0.0

    async def stream(self, num_tokens: int, number: int) -> list[float]:
        """Returns the times between the tokens of a text."""
        body = {"messages": [{"role": "user", "content": f"Hello {number}"}], "model": self.model, "temperature": 0}
        return (await self._ask({**body, "max_tokens": num_tokens, "ignore_eos": True})).itl_s

    async def _ask(self, body: dict[str, Any]) -> Sample:
        return self.measured.kept(await measure(self.client, f"{self.url}/v1/chat/completions", body))


async def pictures(bench: Multimodal, asker: Asker, seed: int, measured: Measured) -> None:
    """Asks with new pictures, then with the same ones again."""
    for at in range(2 if bench.quick else 8):
        urls = [url_of(seed + 1_000 + at)]
        measured.first_s.append(await asker.picture(urls))
        measured.repeated_s.append(await asker.picture(urls))
    for at in range(1 if bench.quick else 3):
        measured.several_s.append(
            await asker.picture([url_of(seed + 2_000 + at * bench.several + each) for each in range(bench.several)])
        )


async def streams(bench: Multimodal, asker: Asker, seed: int, measured: Measured) -> None:
    """Streams a text by itself, and another one while pictures come one after the other."""
    measured.idle_s += await asker.stream(bench.num_tokens, seed)
    urls = [url_of(seed + 3_000 + at) for at in range(bench.num_front)]
    stream = asyncio.ensure_future(asker.stream(bench.num_tokens, seed + 1))
    for url in urls:
        if stream.done():
            break
        await asker.picture([url])
    measured.beside_s += await stream


# ---- figures


def results(bench: Multimodal, measured: Measured, peer: dict[str, float]) -> list[Result]:
    one, many = peer["first_token_1_ms"], peer[f"first_token_{bench.several}_ms"]
    first_ms, several_ms = _least_ms(measured.first_s), _least_ms(measured.several_s)
    idle, beside = (percentile(each, 99) for each in (measured.idle_s, measured.beside_s))
    ratio = _ratio(percentile(measured.repeated_s, 50), percentile(measured.first_s, 50))

    def goal(value: float) -> float | None:
        return None if bench.quick else value

    return [
        Result(
            name="front: pictures read",
            value=max(measured.images_per_s),
            unit="1/s",
            better="higher",
            samples=len(measured.images_per_s),
            spread=spread(measured.images_per_s),
        ),
        Result(
            name="front: event loop held, most",
            value=1e3 * max(measured.held_s),
            unit="ms of CPU",
            better="lower",
            samples=len(measured.held_s),
            goal=goal(HELD_GOAL_MS),
        ),
        _times("ttft, one picture", measured.first_s),
        _times("ttft, the same picture again", measured.repeated_s),
        Result(name="the same, to a first one", value=ratio, unit="ratio", better="lower", goal=goal(REPEATED_GOAL)),
        _times(f"ttft, {bench.several} pictures", measured.several_s),
        Result(name="generate(): first token, one picture", value=one, unit="ms", better="lower"),
        Result(name=f"generate(): first token, {bench.several} pictures", value=many, unit="ms", better="lower"),
        Result(name="least ttft to generate()'s, one", value=_ratio(first_ms, one), unit="ratio", better="lower"),
        Result(
            name=f"least ttft to generate()'s, {bench.several}",
            value=_ratio(several_ms, many),
            unit="ratio",
            better="lower",
        ),
        Result(name="tower: 4 pictures on one rank", value=peer["tower_1_ms"], unit="ms of CPU", better="lower"),
        Result(
            name="the same on the busier of two ranks, to one",
            value=_ratio(peer["tower_2_ms"], peer["tower_1_ms"]),
            unit="ratio",
            better="lower",
            goal=goal(RANKS_GOAL),
        ),
        Result(name="text stream: p99 between tokens, idle", value=_ms(idle), unit="ms", better="lower"),
        Result(name="text stream: p99, while pictures come", value=_ms(beside), unit="ms", better="lower"),
        Result(
            name="the same, to idle", value=_ratio(beside, idle), unit="ratio", better="lower", goal=goal(STREAMS_GOAL)
        ),
    ]


def _times(name: str, times_s: list[float]) -> Result:
    value = _ms(percentile(times_s, 50))
    return Result(name=name, value=value, unit="ms", better="lower", samples=len(times_s), spread=spread(times_s))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _least_ms(times_s: list[float]) -> float | None:
    return 1e3 * min(times_s) if times_s else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
