"""Measures a cluster on one device as its clients: first prefill and decode apart, then one engine that does both in
chunks.

For the second, the prefill instance is taken out of service, so that the decode instance does everything, in the same
process, with the same memory, next to an idle process. Both get the same requests at the same times: first single long
prompts, then streams that decode while long prompts keep arriving. The processes are started as by `pd-cluster up`.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx

from benchmarks.gpu.gpu_messages import GpuSpec, Writer, child_main
from benchmarks.mixed_load import answered
from benchmarks.workloads import random_prompt
from pd_cluster.bench.serve_bench import ServeBench, ask_model, own_cluster
from pd_cluster.client.admin_client import Admin
from pd_cluster.client.instance_commands import is_drained
from pd_cluster.client.instance_list import Traffic, fetch_instances, fetch_settled
from pd_cluster.client.streaming_client import Sample, make_client
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.errors import GenerationError
from pd_cluster.result_tables import percentile

DRAIN_TIMEOUT_S = 15.0
POLL_S = 0.1
SPLIT, COLOCATED = "split", "colocated"
SEED = 11


@dataclass(frozen=True, slots=True)
class Load:
    """`interval_s`: the time between two long prompts. `num_streams` streams decode all the time."""

    long_len: int = 4096
    num_alone: int = 12  # number of long prompts, one at a time
    num_streams: int = 16
    stream_len: int = 128
    stream_output: int = 384
    num_long: int = 12
    interval_s: float = 0.4
    long_output: int = 4


GPU_FLAGS = ["--max-model-len=8192", "--gpu-memory-utilization=0.4", "--max-num-batched-tokens=2048"]
QUICK_LOAD = Load(128, 2, 2, 8, 12, 2, 0.05, 2)


def cluster_of(spec: GpuSpec) -> ServeBench:
    """Returns the benchmark of one prefill and one decode instance, which share the device."""
    flags = [f"--device={spec.device}", f"--dtype={spec.dtype}", "--no-enable-prefix-caching"]
    flags += ["--num-blocks=512", "--max-model-len=2048"] if spec.quick else GPU_FLAGS
    if spec.device != "cpu":
        flags.append("--kv-transport=ipc")  # only this transport, so that no fallback is measured instead
    return ServeBench(model=spec.model, more_flags=tuple(flags))


class Client:
    """Sends requests of seeded token ids, the same to both clusters."""

    def __init__(self, client: httpx.AsyncClient, url: str, model: str, vocab_size: int) -> None:
        self._client, self._url, self._model, self._vocab_size = client, url, model, vocab_size
        self._rng = random.Random(SEED)

    async def ask(self, prompt_len: int, output_len: int) -> Sample:
        """Sends a request. Raises GenerationError."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": random_prompt(self._rng, self._vocab_size, prompt_len),
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
        }
        return await answered(self._client, f"{self._url}/v1/completions", body)

    async def ttfts_s(self, load: Load) -> list[float]:
        """Returns the TTFT of long prompts, sent one after the other; the first few are not counted."""
        found = []
        for at in range(2 + load.num_alone):
            sample = await self.ask(load.long_len, 2)
            if at >= 2 and sample.ttft_s is not None:
                found.append(sample.ttft_s)
        return found

    async def under_load(self, load: Load) -> list[Sample]:
        """Returns samples of streams that decode while long prompts arrive at fixed times."""
        streams = [asyncio.create_task(self.ask(load.stream_len, load.stream_output)) for _ in range(load.num_streams)]
        long = [asyncio.create_task(self._later(i, load)) for i in range(load.num_long)]
        samples = await asyncio.gather(*streams)
        await asyncio.gather(*long)
        return list(samples)

    async def _later(self, number: int, load: Load) -> Sample:
        await asyncio.sleep((number + 1) * load.interval_s)
        return await self.ask(load.long_len, load.long_output)


async def measure_all(spec: GpuSpec, results: Writer) -> None:
    load = QUICK_LOAD if spec.quick else Load()
    num_open = load.num_streams + load.num_long
    async with own_cluster(cluster_of(spec)) as cluster, make_client(num_open) as http:
        name, _ = await ask_model(http, cluster.launch.url)
        await note_links(cluster.launch.admin_url, results)
        for mode in spec.sections:
            with results.section(mode):
                if mode == COLOCATED:
                    await drain_prefill(cluster)
                client = Client(http, cluster.launch.url, name, spec.shape.vocab_size)
                await measure_mode(client, load, mode, spec, cluster, results)


async def measure_mode(client: Client, load: Load, mode: str, spec: GpuSpec, cluster: Cluster, results: Writer) -> None:
    """Measures a mode. Raises GenerationError if requests were not served in this mode."""
    await asyncio.gather(*(client.ask(load.stream_len, 8) for _ in range(load.num_streams)))  # warm-up
    before = await received_nbytes(cluster)
    ttfts_ms = [1e3 * each for each in await client.ttfts_s(load)]
    moved = await received_nbytes(cluster) - before
    if (moved > 0) != (mode == SPLIT):
        raise GenerationError(f"{mode}: {moved} bytes of KV cache were handed over")
    results.figure(f"{mode}: TTFT of long prompts", median(ttfts_ms), "ms", "lower", ttfts_ms)
    await client.under_load(load)  # warm-up, which captures graphs for the sizes that occur
    streams = await client.under_load(load)
    report_streams(streams, mode, results)


async def received_nbytes(cluster: Cluster) -> int:
    return Traffic.of(await fetch_settled(cluster.launch.admin_url)).received_nbytes


async def drain_prefill(cluster: Cluster) -> None:
    """Takes the prefill instance out of service, and waits until it is drained. Raises GenerationError."""
    admin = Admin(cluster.launch.admin_url, str(cluster.admin_token_file))
    response = await admin.ask("/instances/prefill-0/drain", {"force": True})
    deadline_s = time.monotonic() + DRAIN_TIMEOUT_S
    while response.status_code == 200 and time.monotonic() < deadline_s:
        entries = await fetch_instances(admin)
        if all(is_drained(entry) for entry in entries if entry["instance_id"] == "prefill-0"):
            return
        await asyncio.sleep(POLL_S)
    raise GenerationError(f"the prefill instance could not be taken out of service: {response.text[:300]}")


async def note_links(admin_url: str, results: Writer) -> None:
    for entry in await fetch_instances(admin_url):
        links = ", ".join(f"{peer.split('@')[0]} {state}" for peer, state in entry["links"].items())
        results.note(f"{entry['instance_id']}: links {links or 'none'}")


def report_streams(streams: list[Sample], mode: str, results: Writer) -> None:
    gaps_ms = [1e3 * gap_s for sample in streams for gap_s in sample.itl_s]
    tpots_ms = [1e3 * sample.tpot_s for sample in streams if sample.tpot_s is not None]
    for what, values in (("TPOT of streams", tpots_ms), ("time between tokens", gaps_ms)):
        for percent in (50, 99):
            value = percentile(values, percent)
            if value is not None:
                results.figure(f"{mode}: {what} under long prompts, p{percent}", value, "ms", "lower", values)


if __name__ == "__main__":
    child_main(lambda spec, results: asyncio.run(measure_all(spec, results)))
