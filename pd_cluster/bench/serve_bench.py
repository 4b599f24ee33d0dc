"""`pd-cluster bench serve`: sends requests of one shape to a server, `concurrency` at a time, and measures them as a
client.

Each prompt is `input_len` seeded random token ids (below 256, which every vocabulary has), each output exactly
`output_len` tokens, greedy. `concurrency` uncounted requests warm the server up first. Repeating a command sends the
same prompts, so a server that caches prefixes should be restarted in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.client.instance_list import Traffic, fetch_settled
from pd_cluster.client.streaming_client import Sample, make_client, measure
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.errors import ConfigError, GenerationError, PdClusterError
from pd_cluster.result_tables import (
    Report,
    Result,
    check_writable,
    human_nbytes,
    percentiles,
    progress,
)

SEED = 0
NUM_TOKEN_IDS = 256
MAX_TRIES = 100
FEW_ARRIVALS = 0.9  # arrivals per output token; with fewer, the times between arrivals are not times between tokens


@dataclass(frozen=True, slots=True)
class ServeBench:
    """The command's parameters. Without a `url`, the benchmark starts its own cluster."""

    url: str = ""
    admin: str = ""
    model: str = ""
    prefill: int = 1
    decode: int = 1
    num_requests: int = 32
    concurrency: int = 4
    input_len: int = 128
    output_len: int = 64
    routing_policy: str = ""  # this setting and the next two apply to the started cluster
    lend_cores: str = ""
    first_token: str = ""
    more_flags: tuple[str, ...] = ()  # for the started cluster; not shown in the command
    encode: int = 0  # encoders of the started cluster; not shown

    @property
    def flags(self) -> list[str]:
        """The flags of the started cluster."""
        given = {
            "--routing-policy": self.routing_policy,
            "--lend-cores": self.lend_cores,
            "--first-token": self.first_token,
        }
        return [f"{flag}={value}" for flag, value in given.items() if value]

    @property
    def command(self) -> str:
        where = f"--url {self.url}" if self.url else f"--prefill {self.prefill} --decode {self.decode}"
        model = f" --model {self.model}" if self.model and not self.url else ""
        model += "".join(f" {flag}" for flag in self.flags if not self.url)
        return (
            f"pd-cluster bench serve {where}{model} --num-requests {self.num_requests} "
            f"--concurrency {self.concurrency} --input-len {self.input_len} --output-len {self.output_len}"
        )


async def run(bench: ServeBench, json_path: str = "") -> None:
    """Measures, prints, writes. Raises PdClusterError without a server, and for oversized or failed requests."""
    check_writable(json_path)
    with sigterm_ends_it():
        async with _server(bench) as (url, admin):
            measured = await _measure(bench, url, admin)
    report = Report(bench.command, _results(bench, measured))
    report.show(_title(bench))
    _print_notes(measured)
    if json_path:
        report.write(json_path)
    failed = [sample for sample in measured.samples if sample.error]
    if failed:
        raise GenerationError(f"{len(failed)} of {bench.num_requests} requests failed; the first: {failed[0].error}")


# ---- the server


@contextlib.asynccontextmanager
async def _server(bench: ServeBench) -> AsyncIterator[tuple[str, str]]:
    """Yields the addresses of the server and of its admin port; a server started here is stopped afterwards."""
    if bench.url:
        url = bench.url.rstrip("/").removesuffix("/v1")
        yield url, bench.admin or admin_above(url)
        return
    async with started_cluster(bench) as addresses:
        yield addresses


@contextlib.asynccontextmanager
async def started_cluster(bench: ServeBench) -> AsyncIterator[tuple[str, str]]:
    """Yields the address and the admin address. Raises PdClusterError."""
    async with own_cluster(bench) as cluster:
        yield cluster.launch.url, cluster.launch.admin_url


@contextlib.asynccontextmanager
async def own_cluster(bench: ServeBench) -> AsyncIterator[Cluster]:
    """Yields a cluster as `running` does."""
    launch = Launch(
        model=bench.model,
        num_prefill=bench.prefill,
        num_decode=bench.decode,
        num_encode=bench.encode,
        port=free_port_pair(),
        arguments=[*bench.flags, *bench.more_flags],
        restart="no",  # a cluster that lost an instance would give wrong figures
    )
    async with running(launch) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def running(launch: Launch, keep: Callable[[str], None] = lambda line: None) -> AsyncIterator[Cluster]:
    """Yields a ready cluster, which is stopped afterwards. `keep` receives its log's lines. Raises PdClusterError."""
    Checkpoint.open(launch.model_folder)  # reports a faulty model early and in one line
    lines: deque[str] = deque(maxlen=50)

    def say(line: str) -> None:
        lines.append(line)
        keep(line)

    cluster = Cluster(launch, say)
    print(f"starting {launch.instances} and the scheduler …{launch.remark}", flush=True)
    started_s = time.monotonic()
    try:
        await cluster.start()
        await cluster.wait_ready()
        print(f"ready after {time.monotonic() - started_s:.1f} s", flush=True)
        yield cluster
    except PdClusterError:
        print("\n".join(lines), file=sys.stderr, flush=True)
        raise
    finally:
        await cluster.stop()


def admin_above(url: str) -> str:
    """Returns the default admin address. The port is open only on loopback, so only to this machine's processes."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"--url {url}: expected http://HOST:PORT")
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    return str(parsed.copy_with(port=port + 1, path="/"))


@contextlib.contextmanager
def sigterm_ends_it() -> Iterator[None]:
    """Makes SIGTERM stop the started cluster as Ctrl-C does."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        yield
    except asyncio.CancelledError:
        if stopped:
            raise PdClusterError("ended by SIGTERM; nothing was measured") from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


# ---- the requests


@dataclass(frozen=True, slots=True)
class Measured:
    samples: list[Sample]
    took_s: float
    kv_nbytes: int | None  # None: the admin address did not answer, or an instance restarted
    note: str


async def _measure(bench: ServeBench, url: str, admin: str) -> Measured:
    async with make_client(bench.concurrency) as client:
        name, max_model_len = await ask_model(client, url)
        check_shape(bench, max_model_len)
        bodies = make_bodies(bench, name, bench.concurrency + bench.num_requests)
        await send_all(client, url, bodies[: bench.concurrency], bench.concurrency, "warming up")
        before, note = await _traffic(admin)
        started_s = time.monotonic()
        samples = await send_all(client, url, bodies[bench.concurrency :], bench.concurrency, "measuring")
        took_s = time.monotonic() - started_s
        after, note = (await _traffic(admin)) if before else (None, note)
    kv_nbytes = None
    if before and after:
        if before.epochs == after.epochs:
            kv_nbytes = after.received_nbytes - before.received_nbytes
        else:
            note = "KV bytes: an instance was restarted in between"
    return Measured(samples, took_s, kv_nbytes, note)


async def _traffic(admin: str) -> tuple[Traffic | None, str]:
    try:
        return Traffic.of(await fetch_settled(admin)), ""
    except PdClusterError as error:
        return None, f"KV bytes: {error}"


async def ask_model(client: httpx.AsyncClient, url: str) -> tuple[str, int | None]:
    """Returns the served model's name and context length, which is None if the server does not report it."""
    try:
        response = await client.get(f"{url}/v1/models", timeout=5)
        if response.status_code == 401:
            raise ConfigError(f"--url {url}: the server wants an API key; set OPENAI_API_KEY")
        model = response.json()["data"][0]
        return str(model["id"]), model.get("max_model_len")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"--url {url}: no server answers there: {str(error) or type(error).__name__}") from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"--url {url}: /v1/models does not answer as an OpenAI server (USE_OPENAI=1)") from None


def check_shape(bench: ServeBench, max_model_len: int | None) -> None:
    total = bench.input_len + bench.output_len
    if max_model_len is not None and total > max_model_len:
        raise ConfigError(
            f"--input-len {bench.input_len} --output-len {bench.output_len}: together {total} tokens; "
            f"the model's context is {max_model_len} tokens"
        )


def make_bodies(bench: ServeBench, model: str, count: int) -> list[dict[str, Any]]:
    rng = random.Random(SEED)
    prompts = ([rng.randrange(NUM_TOKEN_IDS) for _ in range(bench.input_len)] for _ in range(count))
    return [body_of(model, prompt, bench.output_len) for prompt in prompts]


def body_of(model: str, prompt: list[int], num_output_tokens: int) -> dict[str, Any]:
    """Returns a request for exactly this many tokens, each of which has text and so can be timed."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }


async def send_all(
    client: httpx.AsyncClient, url: str, bodies: list[dict[str, Any]], concurrency: int, what: str
) -> list[Sample]:
    """Sends all bodies, `concurrency` at a time."""
    waiting = iter(bodies)
    samples: list[Sample] = []

    async def worker(advance: Callable[[], None]) -> None:
        for body in waiting:
            samples.append(await measure(client, f"{url}/v1/completions", body))
            advance()

    with progress(what, len(bodies)) as advance:
        await asyncio.gather(*(worker(advance) for _ in range(min(concurrency, len(bodies)))))
    return samples


# ---- the figures


def _results(bench: ServeBench, measured: Measured) -> list[Result]:
    good = [sample for sample in measured.samples if sample.error is None]
    ttft_ms = [1e3 * s.ttft_s for s in good if s.ttft_s is not None]
    tpot_ms = [1e3 * s.tpot_s for s in good if s.tpot_s is not None]
    itl_ms = [1e3 * gap_s for s in good for gap_s in s.itl_s]
    num_tokens = sum(s.num_output_tokens for s in good)
    num_errors = len(measured.samples) - len(good)
    return [
        *percentiles("ttft", ttft_ms, "ms"),
        *percentiles("tpot", tpot_ms, "ms"),
        *percentiles("itl", itl_ms, "ms", percents=(99,)),
        _rate("output_tokens", num_tokens, "tokens/s", measured.took_s),
        _rate("requests", len(good), "requests/s", measured.took_s),
        Result(name="kv_moved", value=measured.kv_nbytes, unit="bytes", better="lower"),
        Result(name="errors", value=num_errors, unit="requests", better="lower", samples=bench.num_requests, goal=0),
    ]


def _rate(name: str, count: int, unit: str, took_s: float) -> Result:
    value = count / took_s if count and took_s > 0 else None
    return Result(name=name, value=value, unit=unit, better="higher")


def _title(bench: ServeBench) -> str:
    return (
        f"{bench.num_requests} requests of {bench.input_len} + {bench.output_len} tokens, {bench.concurrency} at a time"
    )


def _print_notes(measured: Measured) -> None:
    good = [sample for sample in measured.samples if sample.error is None]
    num_tokens = sum(s.num_output_tokens for s in good)
    num_arrivals = sum(len(s.itl_s) + 1 for s in good)
    num_prompt_tokens = sum(s.num_prompt_tokens for s in good)
    if num_tokens and num_arrivals < FEW_ARRIVALS * num_tokens:
        print(
            f"note: {num_arrivals / num_tokens:.2f} arrivals per output token, because a token that ends within a "
            "character is sent with the next one; TTFT is the time to the first arrival, ITL the time between arrivals"
        )
    if measured.kv_nbytes is not None and num_prompt_tokens:
        per_token = measured.kv_nbytes / num_prompt_tokens
        print(f"KV cache moved: {human_nbytes(measured.kv_nbytes)}, {human_nbytes(per_token)} a prompt token")
    if measured.note:
        print(f"note: {measured.note}")
