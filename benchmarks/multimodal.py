"""`python -m benchmarks multimodal`: what pictures cost, where they are read and where they are computed.

A model of Qwen2-VL's architecture with random weights is made for it. Three parts, each in every round: how many
pictures the front reads, without a cluster; TTFT with pictures; and the time between tokens of streams without
pictures, idle and while pictures come. The longest turn of the event loop, which is this process's, is measured in CPU
time, so that a busy machine does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.child import run_child
from benchmarks.figures import begin, finish, ratio, result
from benchmarks.load import answered
from benchmarks.pictures import url_of
from pd_cluster.bench.serve import ServeBench, ask_model, sigterm_ends_it, started_cluster
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.vision import VisionPart
from pd_cluster.client.streaming import make_client
from pd_cluster.service.prompts.pictures import PictureIntake, Source
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.parse import parse
from pd_cluster.settings.engine import SHIPPED_VISION_MODEL
from pd_cluster.settings.media import MediaSettings
from pd_cluster.tables import Report, Result

REPEATED_GOAL = 0.2  # of a first picture's TTFT
STREAMS_GOAL = 1.5  # of idle TPOT
HELD_GOAL_MS = 50.0
MODEL_DEADLINE_S = 300.0

Figures = defaultdict[str, list[float]]  # name -> values of all rounds


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many pictures a large prompt has and the front reads, and how many tokens a stream has."""

    several: int = 8
    num_front: int = 48
    num_tokens: int = 400
    num_asks: int = 8


QUICK = Sizes(2, 4, 16, 2)


async def run(rounds: int, quick: bool, json: str) -> None:
    """Raises PdClusterError."""
    begin(json)
    sizes, rounds, found = (QUICK, 1, Figures(list)) if quick else (Sizes(), rounds, Figures(list))
    with tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder, sigterm_ends_it():
        model = str(Path(folder, "model"))
        command = [sys.executable, "-m", "benchmarks.peers.vision", model, str(SHIPPED_VISION_MODEL), "quick" * quick]
        await asyncio.to_thread(run_child, command, Path(folder, "vision.log"), MODEL_DEADLINE_S, 1)
        vision = Checkpoint.open(model).vision
        assert vision is not None
        async with started_cluster(ServeBench(model=model)) as (url, _), make_client() as client:
            asker = Asker(client, url, (await ask_model(client, url))[0])
            await asker.ttft_ms([url_of(90_000)])  # warm-up
            for at in range(rounds):
                await front(sizes, vision, 10_000 * at, found)
                await pictures(sizes, asker, 10_000 * at, found)
                await streams(sizes, asker, 10_000 * at, found)
    command_line = "python -m benchmarks multimodal " + ("--quick" if quick else f"--rounds {rounds}")
    report = Report(command_line, results(sizes, found))
    finish(report, f"pictures of 448 x 448 pixels, {rounds} rounds", json, quick)


# ---- the front


async def front(sizes: Sizes, vision: VisionPart, seed: int, found: Figures) -> None:
    """Reads pictures as the scheduler does, each in a request of its own: parsed, read by a child, put in a message."""
    intake = PictureIntake(vision, MediaSettings(cache_gb=0.0))
    bodies = [msgspec.json.encode(body_of([url_of(seed + at)], "m")) for at in range(sizes.num_front)]
    pad = vision.rules.token_id

    async def one(body: bytes) -> None:
        request = parse(body, ChatCompletionRequest)
        sources = [Source(*medium) for at, message in enumerate(request.messages) for medium in message.media(at)]
        shown = await intake.place([1, *[pad] * len(sources), 2], sources, "messages")
        msgspec.msgpack.encode(shown.prompt)

    try:
        await asyncio.gather(*(one(body) for body in bodies[:2]))  # which start the children
        async with held(found["held"]):
            started_s = time.perf_counter()
            await asyncio.gather(*(one(body) for body in bodies))
            found["read"].append(len(bodies) / (time.perf_counter() - started_s))
    finally:
        await intake.close()


@contextlib.asynccontextmanager
async def held(found_ms: list[float]) -> AsyncIterator[None]:
    """Adds the most CPU time that the event loop's thread takes between two turns of a task that always waits."""
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.thread_time() - before_s)

    task = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        task.cancel()
        found_ms.append(1e3 * longest_s)


# ---- the cluster


def body_of(urls: list[str], model: str) -> dict[str, Any]:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": "What do you see?"}]
    more = {"model": model, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": content}], **more}


@dataclass(frozen=True, slots=True)
class Asker:
    client: httpx.AsyncClient
    url: str
    model: str

    async def ttft_ms(self, urls: list[str]) -> float:
        """Returns the time to the first token of a prompt with these pictures. Raises GenerationError."""
        sample = await answered(self.client, f"{self.url}/v1/chat/completions", body_of(urls, self.model))
        return 1e3 * (sample.ttft_s or 0.0)

    async def gaps_ms(self, num_tokens: int, number: int) -> list[float]:
        """Returns the times between the tokens of a text. Raises GenerationError."""
        body = {"messages": [{"role": "user", "content": f"Hello {number}"}], "model": self.model, "temperature": 0}
        body |= {"max_tokens": num_tokens, "ignore_eos": True}
        sample = await answered(self.client, f"{self.url}/v1/chat/completions", body)
        return [1e3 * gap_s for gap_s in sample.itl_s]


async def pictures(sizes: Sizes, asker: Asker, seed: int, found: Figures) -> None:
    """Asks with new pictures, then with the same ones again, then with several."""
    for at in range(sizes.num_asks):
        urls = [url_of(seed + 1_000 + at)]
        found["first"].append(await asker.ttft_ms(urls))
        found["again"].append(await asker.ttft_ms(urls))
    for at in range(sizes.num_asks // 2):
        urls = [url_of(seed + 2_000 + at * sizes.several + each) for each in range(sizes.several)]
        found["several"].append(await asker.ttft_ms(urls))


async def streams(sizes: Sizes, asker: Asker, seed: int, found: Figures) -> None:
    """Streams a text by itself, and another one while pictures come one after the other."""
    found["idle"] += await asker.gaps_ms(sizes.num_tokens, seed)
    stream = asyncio.ensure_future(asker.gaps_ms(sizes.num_tokens, seed + 1))
    for at in range(sizes.num_front):
        if stream.done():
            break
        await asker.ttft_ms([url_of(seed + 3_000 + at)])
    found["beside"] += await stream


def results(sizes: Sizes, found: Mapping[str, list[float]]) -> list[Result]:
    again, idle = ratio(found["again"], found["first"], 50), ratio(found["beside"], found["idle"], 99)
    return [
        result("front: pictures read", found["read"], "1/s", "higher"),
        result("front: event loop held, most", found["held"], "ms of CPU", goal=HELD_GOAL_MS, at=100),
        result("ttft, one picture", found["first"], "ms"),
        result("ttft, the same picture again", found["again"], "ms"),
        result("the same, to a first one", again, "ratio", goal=REPEATED_GOAL),
        result(f"ttft, {sizes.several} pictures", found["several"], "ms"),
        result("text stream: p99 between tokens, idle", found["idle"], "ms", at=99),
        result("text stream: p99, while pictures come", found["beside"], "ms", at=99),
        result("the same, to idle", idle, "ratio", goal=STREAMS_GOAL),
    ]
