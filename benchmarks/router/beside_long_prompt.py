"""`python -m benchmarks long-prompts`: measures times to the first token of 200-token requests while one long prompt is
computed.

Runs a real cluster of one prefill and one decode instance, with a random model of one layer with one head of 16. The
short requests arrive as a Poisson process, first alone and then while the long prompt is computed.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.child_process import make_model
from benchmarks.figures import begin, finish, ratio, result
from benchmarks.mixed_load import NUM_TOKEN_IDS, Load, answered, poisson
from benchmarks.model_shapes import ModelShape
from pd_cluster.bench.serve_bench import running, sigterm_ends_it
from pd_cluster.client.instance_list import fetch_instances
from pd_cluster.client.streaming_client import Sample, measure
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.errors import GenerationError
from pd_cluster.result_tables import Report

URL = "/v1/completions"
NUM_SHORT_TOKENS, MAX_TOKENS, STEP_TOKENS, BLOCK_SIZE = 200, 4, 512, 16
HEAD_DIM, WARM_S, PROGRESS_S = 16, 3.0, 30.0
TOKEN_NBYTES = 2 * 4 * HEAD_DIM  # key and value in float32
P99_GOAL = 3.0


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """The long prompt's tokens and its maximum duration; the rate and duration of the short requests."""

    num_tokens: int
    rate: float
    seconds: float
    seed: int
    timeout_s: float = 3600.0


async def run(load: LongPrompt, quick: bool, json: str) -> None:
    """Measures, prints, writes. Raises PdClusterError: no cluster, failed requests, a prompt that ended too soon."""
    begin(json)
    with sigterm_ends_it(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        launch = _launch(load, Path(folder))
        async with running(launch) as cluster, _client(load, cluster.launch.url) as client:
            await _short(client, load, WARM_S)
            alone = await _short(client, load, load.seconds)
            sent = asyncio.create_task(_one(client, load, cluster.launch.admin_url))
            await asyncio.sleep(WARM_S)
            beside = await _short(client, load, load.seconds)
            if sent.done() and not quick:
                raise GenerationError("the long prompt ended before the load; give more --tokens or fewer --seconds")
            long_s = (await sent).ttft_s or 0.0
    results = [
        result("first token p99, alone", alone, "s", at=99),
        result("first token p99, beside the long prompt", beside, "s", at=99),
        result("first token of the long prompt", [long_s], "s"),
        result("first token p99, beside ÷ alone", ratio(beside, alone, 99), "x", "lower", P99_GOAL),
    ]
    asked = f"--tokens {load.num_tokens} --rate {load.rate:g} --seconds {load.seconds:g} --seed {load.seed}"
    title = f"one prefill and one decode instance, {load.rate:g} short requests a second"
    finish(Report(f"python -m benchmarks long-prompts {asked}", results), title, json, quick)


def _launch(load: LongPrompt, folder: Path) -> Launch:
    most = load.num_tokens + 1024
    shape = ModelShape(
        hidden_size=HEAD_DIM,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        intermediate_size=HEAD_DIM,
        vocab_size=512,
        max_positions=most,
    )
    return Launch(
        model=str(make_model(folder, shape)),
        port=free_port_pair(),
        served_model_names=["tiny"],
        arguments=[
            f"--max-model-len={most}",
            f"--max-num-batched-tokens={STEP_TOKENS}",
            f"--num-gpu-blocks-override={2 * most // BLOCK_SIZE}",
            f"--request-timeout={load.timeout_s:g}",
            "--skip-tokenizer-init",
        ],
        restart="no",
    )


async def _short(client: httpx.AsyncClient, load: LongPrompt, seconds: float) -> list[float]:
    """Returns the times to the first token. Raises GenerationError."""
    draw, started_s = random.Random(f"{load.seed} {time.monotonic()}"), time.monotonic()

    async def send(body: Mapping[str, Any]) -> Sample:
        return await answered(client, URL, body)

    sending = Load(lambda number: _body(draw, NUM_SHORT_TOKENS), poisson(draw, load.rate), send)
    await sending.run(lambda _: time.monotonic() - started_s >= seconds)
    return [each.sample.ttft_s for each in sending.answers if each.sample.ttft_s is not None]


async def _one(client: httpx.AsyncClient, load: LongPrompt, admin_url: str) -> Sample:
    """Sends the long prompt, and prints how much of it has been computed. Raises GenerationError."""
    telling = asyncio.create_task(_tell(load.num_tokens, admin_url))
    try:
        body = _body(random.Random(load.seed), load.num_tokens)
        sample = await measure(client, URL, body, deadline_s=load.timeout_s)
    finally:
        telling.cancel()
    if sample.error is not None:
        raise GenerationError(f"the long prompt failed: {sample.error}")
    return sample


async def _tell(num_tokens: int, admin_url: str) -> None:
    """Prints the progress by the bytes that the prefill instance has sent: computed blocks are sent at once."""

    async def sent_nbytes() -> int:
        return sum(entry.get("kv_sent_nbytes", 0) for entry in await fetch_instances(admin_url))

    started_s, before = time.monotonic(), await sent_nbytes()
    while True:
        await asyncio.sleep(PROGRESS_S)
        num_sent = (await sent_nbytes() - before) // TOKEN_NBYTES
        print(f"{num_sent:,} of {num_tokens:,} tokens after {time.monotonic() - started_s:.0f} s", flush=True)


def _body(draw: random.Random, num_tokens: int) -> dict[str, Any]:
    prompt = [draw.randrange(NUM_TOKEN_IDS) for _ in range(num_tokens)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}


def _client(load: LongPrompt, url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=load.timeout_s, trust_env=False)
