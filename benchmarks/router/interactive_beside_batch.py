"""`python -m benchmarks batches`: measures times to the first token of interactive requests during a batch of many
lines.

Runs a real cluster with the shipped model. Interactive chats arrive as a Poisson process, first alone and then while a
batch is answered. A step of the batch is the time that one of its prompts takes on the idle cluster.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.figures import begin, finish, ratio, result
from benchmarks.mixed_load import Answer, Load, poisson
from pd_cluster.bench.serve_bench import running, sigterm_ends_it
from pd_cluster.client.streaming_client import Sample, measure
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.errors import ConfigError, GenerationError
from pd_cluster.result_tables import Report, Result, percentile
from pd_cluster.settings.engine_config import SHIPPED_MODEL

MODEL = SHIPPED_MODEL.name
URL = "/v1/chat/completions"
NUM_WORDS, BATCH_MAX_TOKENS, CHAT_MAX_TOKENS = 60, 32, 16
WARM_S, NUM_STEPS = 3.0, 30
MEDIAN_GOAL, P99_GOAL = 1.5, 1.0
TIMEOUT_S = 60.0
WORDS = [
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "four",
    "five",
    "north",
    "south",
    "east",
    "west",
    "day",
    "night",
    "sun",
    "rain",
]


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """A batch's number of lines, and the rate and duration of the interactive requests."""

    num_lines: int
    rate: float
    seconds: float
    seed: int


async def run(load: BatchLoad, quick: bool, json: str) -> None:
    """Measures, prints, writes. Raises PdClusterError: no cluster, failed requests, a batch that ended too soon."""
    if load.seconds <= WARM_S:
        raise ConfigError(f"--seconds {load.seconds:g}: must be above {WARM_S:g}; the first ones do not count")
    begin(json)
    with sigterm_ends_it(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        launch = Launch(
            model=str(SHIPPED_MODEL),
            port=free_port_pair(),
            served_model_names=[MODEL],
            arguments=[f"--files-dir={folder}/files"],
            restart="no",
        )
        async with running(launch) as cluster, _client(cluster.launch.url) as client:
            await _interactive(client, load, WARM_S + 2)
            step_s = await _steps_s(client, load.seed)
            alone = await _interactive(client, load, load.seconds)
            batch_id = await _create(client, load)
            beside = await _interactive(client, load, load.seconds)
            batch = (await client.get(f"/v1/batches/{batch_id}")).json()
    counts = batch["request_counts"]
    print(f"the batch: {batch['status']}, {counts['completed']} of {counts['total']} answered", flush=True)
    if batch["status"] != "in_progress" and not quick:
        raise GenerationError(f"the batch was {batch['status']} before the load ended; give more --lines")
    asked = f"--lines {load.num_lines} --rate {load.rate:g} --seconds {load.seconds:g} --seed {load.seed}"
    results = [
        *_results(alone, beside, step_s),
        result("lines answered", [counts["completed"] / load.seconds], "lines/s", "higher"),
    ]
    title = f"one prefill and one decode instance, {load.rate:g} chats a second beside {load.num_lines} lines"
    finish(Report(f"python -m benchmarks batches {asked}", results), title, json, quick)


def _results(alone: list[float], beside: list[float], step_s: list[float]) -> Iterator[Result]:
    yield result("first token, alone", alone, "s", "lower")
    yield result("first token, beside the batch", beside, "s", "lower")
    yield result("first token p99, alone", alone, "s", "lower", at=99)
    yield result("first token p99, beside the batch", beside, "s", "lower", at=99)
    yield result("step of the batch", step_s, "s", "lower")
    yield result("first token, beside ÷ alone", ratio(beside, alone, 50), "x", "lower", MEDIAN_GOAL)
    p99, beside_p99, step = percentile(alone, 99), percentile(beside, 99), percentile(step_s, 50)
    share = [] if p99 is None or beside_p99 is None or step is None else [beside_p99 / (2 * p99 + step)]
    yield result("first token p99, beside ÷ (twice alone + a step)", share, "x", "lower", P99_GOAL)


async def _interactive(client: httpx.AsyncClient, load: BatchLoad, seconds: float) -> list[float]:
    """Returns the times to the first token, without the first seconds' requests. Raises GenerationError."""
    draw, started_s = random.Random(load.seed), time.monotonic()

    def body_of(number: int) -> dict[str, Any]:
        return _chat(draw, CHAT_MAX_TOKENS)

    async def send(body: Mapping[str, Any]) -> Sample:
        return await measure(client, URL, body, deadline_s=TIMEOUT_S)

    sending = Load(body_of, poisson(draw, load.rate), send)
    await sending.run(lambda _: time.monotonic() - started_s >= seconds)
    counted = [each for each in sending.answers if each.sent_s - started_s >= WARM_S]
    return [_first_token_s(each) for each in counted]


def _first_token_s(answer: Answer) -> float:
    if answer.sample.error is not None or answer.sample.ttft_s is None:
        raise GenerationError(f"a request failed: {answer.sample.error}")
    return answer.sample.ttft_s


async def _steps_s(client: httpx.AsyncClient, seed: int) -> list[float]:
    """Sends prompts of the batch one after another, each for one output token, and returns their durations."""
    draw, found = random.Random(f"{seed} steps"), []
    for _ in range(NUM_STEPS):
        started_s = time.monotonic()
        answer = await client.post(URL, json=_chat(draw, 1))
        answer.raise_for_status()
        found.append(time.monotonic() - started_s)
    return found


def _chat(draw: random.Random, max_tokens: int) -> dict[str, Any]:
    """Returns a chat with a prompt that no other chat has."""
    text = " ".join(draw.choice(WORDS) for _ in range(NUM_WORDS))
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


async def _create(client: httpx.AsyncClient, load: BatchLoad) -> str:
    """Uploads the lines and begins the batch; returns its id."""
    draw = random.Random(f"{load.seed} batch")
    lines = [
        {"custom_id": str(at), "method": "POST", "url": URL, "body": _chat(draw, BATCH_MAX_TOKENS)}
        for at in range(load.num_lines)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    answer = await client.post("/v1/files", files={"file": ("lines.jsonl", data)}, data={"purpose": "batch"})
    answer.raise_for_status()
    asked = {"input_file_id": answer.json()["id"], "endpoint": URL, "completion_window": "24h"}
    answer = await client.post("/v1/batches", json=asked)
    answer.raise_for_status()
    found: str = answer.json()["id"]
    while (await client.get(f"/v1/batches/{found}")).json()["status"] == "validating":
        await asyncio.sleep(0.1)
    return found


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False)
