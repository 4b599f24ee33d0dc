"""`python -m benchmarks hog`: measures three quiet tenants while a fourth attacks.

Runs a real cluster with the small vision model. B sends small chats; C sends thumbnails; D sends schemas, stored
responses and requests to its own adapter. Each sends one request after another. A attacks in several ways in turn:
guides that never compile, pictures from slow servers, requests of many sequences, responses to store, many adapters,
long texts to tokenize, streams that it leaves. All tenants pause between two attacks. Each attack is compared with the
time before the first one. A's client has the lowest priority on the processor, because in reality it would run on
another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.figures import begin, finish, names_of, ratio, result
from benchmarks.png_pictures import url_of
from pd_cluster.bench.serve_bench import running, sigterm_ends_it
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.port_reservations import free_port_pair
from pd_cluster.errors import ConfigError, PdClusterError
from pd_cluster.result_tables import Report, Result, counted, percentile
from pd_cluster.settings.engine_config import SHIPPED_MODEL

HOG, QUIET = "sk-tenant-a", ("sk-tenant-b", "sk-tenant-c", "sk-tenant-d")
MODEL = SHIPPED_MODEL.with_name("tiny-vision")
PAUSE_S = 0.1  # a quiet tenant's pause between two requests
REST_S = 3.0
HOG_AT_ONCE = 24
TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
NUM_ADAPTERS, OWN_ADAPTER = 12, "d"
GOAL = 2.0  # maximum p99, as a multiple of the p99 without A
Asked = tuple[str, dict[str, Any]]  # path and body
_numbers = itertools.count()
_large_picture = functools.cache(lambda number: url_of(number, 1024))


@dataclass(slots=True)
class TenantAnswers:
    """The durations of a quiet tenant's answers in one phase, in seconds, and its requests that got no answer."""

    took_s: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def _chat(content: str | list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"model": MODEL.name, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}


def _shown(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _schema(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"member{number}": {"type": "integer"}}, "required": [f"member{number}"]}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def quiet_requests(key: str) -> Iterator[Asked]:
    """Yields a quiet tenant's requests."""
    for number in itertools.count():
        if key == QUIET[0]:
            yield "/v1/chat/completions", _chat(f"What is {number % 10} + 2?")
        elif key == QUIET[1]:
            content = [_shown(url_of(next(_numbers), 32)), {"type": "text", "text": "What is it?"}]
            yield "/v1/chat/completions", _chat(content)
        elif number % 3 == 0:
            yield "/v1/chat/completions", _chat("Hello", response_format=_schema(next(_numbers)), max_tokens=24)
        elif number % 3 == 1:
            yield "/v1/chat/completions", {**_chat("Hello"), "model": OWN_ADAPTER}
        else:
            yield "/v1/responses", {"model": MODEL.name, "input": "Hello", "store": True, "max_output_tokens": 8}


# ---- attacks: each function makes one request of A, which repeatedly sends HOG_AT_ONCE of them at a time


def slow_guides(dripping: str) -> Asked:
    schema = {"type": "integer", "multipleOf": 99_999_989, "title": str(next(_numbers))}
    return "/v1/chat/completions", _chat("Hello", structured_outputs={"json": schema})


def dripping_pictures(dripping: str) -> Asked:
    return "/v1/chat/completions", _chat([_shown(f"{dripping}/{next(_numbers)}.png")])


def large_pictures(dripping: str) -> Asked:
    picture = _shown(_large_picture(next(_numbers) % 32))
    return "/v1/chat/completions", _chat([picture], cache_salt=str(next(_numbers)))


def many_sequences(dripping: str) -> Asked:
    prompts = [f"{next(_numbers)} is a number" for _ in range(32)]
    body = {"model": MODEL.name, "prompt": prompts, "n": 64, "max_tokens": 32, "ignore_eos": True, "temperature": 1}
    return "/v1/completions", body


def kept_responses(dripping: str) -> Asked:
    return "/v1/responses", {"model": MODEL.name, "input": "word " * 400, "store": True, "max_output_tokens": 1}


def many_adapters(dripping: str) -> Asked:
    return "/v1/chat/completions", {**_chat("Hello"), "model": f"a{next(_numbers) % NUM_ADAPTERS}"}


def long_texts(dripping: str) -> Asked:
    return "/tokenize", {"model": MODEL.name, "prompt": f"{next(_numbers)} " + "word and " * 20_000}


def left_streams(dripping: str) -> Asked:
    return "/v1/chat/completions", _chat("Tell me a story.", stream=True, max_tokens=400, ignore_eos=True)


ATTACKS: dict[str, Callable[[str], Asked]] = {
    "guides": slow_guides, "dripping": dripping_pictures, "pictures": large_pictures, "n": many_sequences,
    "responses": kept_responses, "adapters": many_adapters, "texts": long_texts, "streams": left_streams,
}  # fmt: skip
LEAVES_AFTER_S = {"streams": 0.3}  # attack -> seconds; TIMEOUT_S for the others


async def run(seconds: float, attacks: str, json: str) -> None:
    """Measures, prints and writes. Raises PdClusterError without a cluster, and for an unknown attack."""
    names = names_of("--attacks", attacks, ATTACKS)
    if seconds <= 0:
        raise ConfigError(f"--seconds {seconds:g}: must be above 0")
    begin(json)
    with sigterm_ends_it(), tempfile.TemporaryDirectory(prefix="pd-cluster-bench-") as folder:
        async with (
            _dripping_server() as dripping,
            running(_launch(folder)) as cluster,
            _client(cluster.launch.url) as client,
        ):
            await _phase(client, 2.0, None, dripping)  # a warm-up that starts child processes and compiles kernels
            alone = await _phase(client, seconds, None, dripping)
            _tell("without A", alone, alone)
            results: list[Result] = []
            for name in names:
                seen = await _phase(client, seconds, name, dripping)
                _tell(name, seen, alone)
                results += _results(name, seen, alone)
                await asyncio.sleep(REST_S)
    report = Report(f"python -m benchmarks hog --seconds {seconds:g} --attacks {','.join(names)}", results)
    finish(report, f"one prefill and one decode instance, {seconds:g} s for each attack", json)


async def _phase(
    client: httpx.AsyncClient, seconds: float, attack: str | None, dripping: str
) -> dict[str, TenantAnswers]:
    """Returns the answers of each quiet tenant during `seconds`, while A attacks or, with None, does not."""
    seen = {key: TenantAnswers() for key in QUIET}
    with _attacking(str(client.base_url), attack, dripping) if attack else contextlib.nullcontext():
        until_s = time.monotonic() + seconds
        await asyncio.gather(*(_quiet(client, key, seen[key], until_s) for key in QUIET))
    return seen


@contextlib.contextmanager
def _attacking(url: str, attack: str, dripping: str) -> Iterator[None]:
    """Runs A's client in a process; yields when it sends. Raises PdClusterError if it does not start."""
    context = multiprocessing.get_context("spawn")
    has_begun = context.Event()
    process = context.Process(target=_attack, args=(url, attack, dripping, has_begun), daemon=True)
    process.start()
    try:
        if not has_begun.wait(START_TIMEOUT_S):
            raise PdClusterError(f"the client of the attack {attack!r} did not start within {START_TIMEOUT_S:g} s")
        yield
    finally:
        process.kill()
        process.join()


def _attack(url: str, attack: str, dripping: str, has_begun: Any) -> None:
    os.nice(19)
    for number in range(32 if attack == "pictures" else 0):
        _large_picture(number)
    has_begun.set()

    async def attack_for_ever() -> None:
        async with _client(url) as client:
            await asyncio.gather(*(_hog(client, attack, dripping) for _ in range(HOG_AT_ONCE)))

    asyncio.run(attack_for_ever())


async def _hog(client: httpx.AsyncClient, attack: str, dripping: str) -> None:
    while True:
        path, body = ATTACKS[attack](dripping)
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(LEAVES_AFTER_S.get(attack, TIMEOUT_S)):
                await client.post(path, json=body, headers={"Authorization": f"Bearer {HOG}"})
        await asyncio.sleep(0.02)


async def _quiet(client: httpx.AsyncClient, key: str, seen: TenantAnswers, until_s: float) -> None:
    for path, body in quiet_requests(key):
        if (began_s := time.monotonic()) >= until_s:
            return
        try:
            answer = await client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        except httpx.HTTPError as error:
            seen.refused.append(f"{type(error).__name__} {error}")
        else:
            if answer.is_success:
                seen.took_s.append(time.monotonic() - began_s)
            else:
                seen.refused.append(f"{answer.status_code} {answer.text[:200]}")
        await asyncio.sleep(PAUSE_S)


def _tell(name: str, seen: Mapping[str, TenantAnswers], alone: Mapping[str, TenantAnswers]) -> None:
    parts = []
    for key, each in seen.items():
        found = ratio(each.took_s, alone[key].took_s, 99)
        shown = f"p99 {percentile(each.took_s, 99):.3f} s, {found[0]:.2f} x" if found else "no answer"
        parts.append(f"{key[-1]}: {len(each.took_s)} answered, {len(each.refused)} not, {shown}")
    print(f"{name}: " + "; ".join(parts), flush=True)
    for each in seen.values():
        for line in each.refused[:2]:
            print(f"  {line}", flush=True)


def _results(name: str, seen: Mapping[str, TenantAnswers], alone: Mapping[str, TenantAnswers]) -> Iterator[Result]:
    for key, each in seen.items():
        tenant, number = key[-1].upper(), len(each.took_s)
        found = result(f"{name}: {tenant}, p99", ratio(each.took_s, alone[key].took_s, 99), "x", goal=GOAL)
        refused = counted(f"{name}: {tenant}, refused", len(each.refused), "", 0.0)
        yield replace(found, samples=number)
        yield replace(refused, samples=number)


@contextlib.asynccontextmanager
async def _client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        yield client


def _launch(folder: str) -> Launch:
    flags = ["--allowed-media-domains=127.0.0.1", f"--response-store={folder}/responses", "--resume-window=30"]
    from benchmarks.peers.lora import LoraFolders

    place = Path(folder) / "adapters"
    place.mkdir()
    adapters = LoraFolders(place, MODEL)
    names = [*(f"a{at}" for at in range(NUM_ADAPTERS)), OWN_ADAPTER]
    flags += ["--enable-lora", "--max-loras=2", "--max-cpu-loras=2"]
    flags += ["--lora-modules", *(f"{name}={adapters.next()}" for name in names)]
    return Launch(
        model=str(MODEL),
        port=free_port_pair(),
        served_model_names=[MODEL.name],
        arguments=flags,
        api_keys=[HOG, *QUIET],
        restart="no",
    )


@contextlib.asynccontextmanager
async def _dripping_server() -> AsyncIterator[str]:
    """Serves pictures at a rate of one byte a second."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 100000\r\n\r\n")
            for _ in range(100):
                writer.write(b"\x89")
                await writer.drain()
                await asyncio.sleep(1.0)
        writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
