"""Measures how much of a transfer streaming hides: two clusters of one prefill and one decode instance, one link slow.

The link's rate is such that a prompt's KV cache takes as long to cross it as the prompt takes to compute. Token two is
then later than over a free link by whatever streaming could not hide: almost nothing, or all of it without streaming.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from statistics import median

import httpx

from benchmarks.child import ChildFailed, make_model
from benchmarks.tiny_model import FP32_NBYTES, ModelShape
from pd_cluster.bench.serve import ServeBench, ask_model, started_cluster
from pd_cluster.client.streaming import Sample, make_client, measure

NUM_PROMPT_TOKENS = 4096
NUM_OUTPUT_TOKENS = 4
NUM_WARM_TOKENS = 512
NUM_TOKEN_IDS = 256
SHAPE = ModelShape(
    hidden_size=640,
    num_layers=16,
    num_heads=8,
    num_kv_heads=4,
    intermediate_size=1792,
    vocab_size=4096,
    max_positions=NUM_PROMPT_TOKENS + 256,
)
TOKEN_NBYTES = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * FP32_NBYTES
PROMPT_NBYTES = NUM_PROMPT_TOKENS * TOKEN_NBYTES
BALANCE = 0.1  # the largest relative difference between computation and transfer
NUM_TRIES = 3  # times as many rounds as wanted, in case the machine's speed changes
REQUEST_DEADLINE_S = 120.0
# The path between hosts, where links are slow.
FLAGS = ("--kv-transport=dist", f"--num-blocks={3 * NUM_PROMPT_TOKENS // 16}", "--no-enable-prefix-caching")


def measure_streaming(folder: Path, rounds: int) -> list[dict[str, float]]:
    """Returns one dict of figures per round. Raises PdClusterError."""
    return asyncio.run(_measure(str(make_model(folder, SHAPE)), rounds))


async def _measure(model: str, rounds: int) -> list[dict[str, float]]:
    """Returns rounds in which computation took as long as the link was made for; repeats others a few times."""
    rng = random.Random()  # for prompts that no prefix cache has seen
    found: list[dict[str, float]] = []
    async with make_client() as client, started_cluster(ServeBench(model=model, more_flags=FLAGS)) as (free, _):
        await _ask(client, free, rng, NUM_WARM_TOKENS)
        compute_s = median([_ttft_s(await _ask(client, free, rng)) for _ in range(3)])
        rate_mb_per_s = PROMPT_NBYTES / compute_s / 1e6
        print(f"streaming: {compute_s:.1f} s to compute, so {rate_mb_per_s:.1f} MB/s", flush=True)
        limited = ServeBench(model=model, more_flags=(*FLAGS, f"--kv-rate-limit={rate_mb_per_s:.3f}"))
        async with started_cluster(limited) as (slow, _):
            await _ask(client, slow, rng, NUM_WARM_TOKENS)
            for number in range(NUM_TRIES * rounds):
                samples = await _both(client, free, slow, rng, number)
                found += _judged(samples[free], samples[slow], compute_s)
                if len(found) == rounds:
                    break
    return found


async def _both(client: httpx.AsyncClient, free: str, slow: str, rng: random.Random, number: int) -> dict[str, Sample]:
    """Asks both, in alternating order."""
    order = (free, slow) if number % 2 == 0 else (slow, free)
    return {url: await _ask(client, url, rng) for url in order}


def _judged(free: Sample, slow: Sample, transfer_s: float) -> list[dict[str, float]]:
    """Returns how late token two was; nothing if computation and link differ, which makes or hides a delay."""
    free_s, slow_s, took_s = free.itl_s[0], slow.itl_s[0], _ttft_s(slow)
    late = 100 * (slow_s - free_s) / transfer_s  # 100 without streaming
    counts = abs(took_s / transfer_s - 1) <= BALANCE
    note = "" if counts else "; not counted: computation and link differ"
    print(
        f"streaming: computed in {took_s:.2f} s, transfer {transfer_s:.2f} s, token two after {slow_s:.2f} s "
        f"(free link {free_s:.2f} s): {late:.1f} % of the transfer{note}",
        flush=True,
    )
    return [{"late _%": late}] if counts else []


async def _ask(client: httpx.AsyncClient, url: str, rng: random.Random, num_tokens: int = NUM_PROMPT_TOKENS) -> Sample:
    """Sends a request. Raises ChildFailed."""
    body = {
        "model": (await ask_model(client, url))[0],
        "prompt": [rng.randrange(NUM_TOKEN_IDS) for _ in range(num_tokens)],
        "max_tokens": NUM_OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    sample = await measure(client, f"{url}/v1/completions", body, deadline_s=REQUEST_DEADLINE_S)
    if sample.error or len(sample.itl_s) < 1 or sample.ttft_s is None:
        raise ChildFailed(f"a request for the streaming measurement failed: {sample.error or 'no second token'}")
    return sample


def _ttft_s(sample: Sample) -> float:
    assert sample.ttft_s is not None
    return sample.ttft_s
