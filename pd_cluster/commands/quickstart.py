"""`python -m pd_cluster.commands.quickstart`: a local cluster, one question, and the instances that answered it.

Starts the same processes as `pd-cluster up`. Knows nothing of engines; everything that it shows comes from the public
and admin addresses.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import mimetypes
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.client.instance_list import Entries, Traffic, fetch_settled, links_of
from pd_cluster.client.streaming_client import Sample, StreamWatch, make_client, measure
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.commands.chat_command import print_text
from pd_cluster.commands.settings_flags import given_model
from pd_cluster.errors import ConfigError, GenerationError, PdClusterError
from pd_cluster.result_tables import human_nbytes, print_table
from pd_cluster.settings.engine_config import SHIPPED_VISION_MODEL
from pd_cluster.settings.lora_settings import SHIPPED_ADAPTER, SHIPPED_ADAPTER_FLAGS
from pd_cluster.transport.transport_table import BY_NAME

QUESTION = "What is 3 + 4?"
IMAGE_QUESTION, VIDEO_QUESTION = "What is in the picture?", "Which colors come in which order?"
Content = str | list[dict[str, Any]]
MAX_TOKENS = 64
WARM_UP_TOKENS = 3
NUM_KEPT_LINES = 100
CHILD_LINE = re.compile(r"\S+ *\| ")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(context_settings={"help_option_names": ["-h", "--help"]})
def quickstart(
    model: Annotated[str, typer.Option(callback=given_model, help="Model folder; default: the shipped model.")] = "",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill instances.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode instances.")] = 1,
    port: Annotated[int, typer.Option(help="Public port; the admin port is the next one.")] = 9000,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Also serve the shipped LoRA adapter, as the model pirate, and ask it."),
    ] = False,
    image: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Ask the shipped vision model, or --model, about this image or video. The shipped model knows one "
            "to four circles, squares or triangles of one color, and the order of a clip's colors.",
        ),
    ] = "",
    once: Annotated[bool, typer.Option("--once", help="Stop after the first answer.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every process's log.")] = False,
) -> None:
    """Start a prefill/decode cluster on this machine, ask it one question and show what each instance did.

    Then serves OpenAI's API at http://127.0.0.1:PORT/v1 until Ctrl-C, which stops all processes.
    Exit code: 0; 1 with one line on stderr if the cluster cannot start.
    """
    if image and adapter:
        raise ConfigError("--image: the adapter's model takes no images; leave out one of the two")
    question = _question_about(image) if image else QUESTION
    if adapter and model:
        raise ConfigError("--adapter: the adapter is for the shipped model; leave out --model")
    name = SHIPPED_ADAPTER.name if adapter else ""
    flags = SHIPPED_ADAPTER_FLAGS if adapter else []
    model = model or (str(SHIPPED_VISION_MODEL) if image else "")
    launch = Launch(model=model, num_prefill=prefill, num_decode=decode, port=port, arguments=flags)
    asyncio.run(_until_signal(launch, Question(question, image, name), once, verbose))


@dataclass(frozen=True, slots=True)
class Question:
    """`content`: the message. `file`: its image or video, if any. `adapter`: an adapter that is also asked, if any."""

    content: Content
    file: str
    adapter: str

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else f"{self.content[-1]['text']} ({self.file})"


def _question_about(file: str) -> Content:
    """Returns the content of a message with the file. Raises ConfigError."""
    kind, _ = mimetypes.guess_type(file)
    part = (kind or "image/png").partition("/")[0]
    if part not in ("image", "video"):
        raise ConfigError(f"--image {file}: {kind}; give an image or a video")
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"--image {file}: cannot be read: {error.strerror}") from None
    url = f"data:{kind or 'image/png'};base64,{base64.b64encode(data).decode()}"
    return [
        {"type": f"{part}_url", f"{part}_url": {"url": url}},
        {"type": "text", "text": IMAGE_QUESTION if part == "image" else VIDEO_QUESTION},
    ]


@dataclass(slots=True)
class Lines:
    """Handles the cluster's lines: shows them once it serves, and keeps the processes' logs in case it fails."""

    verbose: bool
    serving: bool = False
    kept: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_KEPT_LINES))

    def say(self, line: str) -> None:
        if self.verbose or (self.serving and not CHILD_LINE.match(line)):
            print(line, flush=True)
        else:
            self.kept.append(line)

    def show_kept(self) -> None:
        for line in self.kept:
            print(line, file=sys.stderr, flush=True)
        self.kept.clear()


async def _until_signal(launch: Launch, asked: Question, once: bool, verbose: bool) -> None:
    """Runs everything until SIGINT or SIGTERM; a second signal ends it at once. Always ends all processes."""
    Checkpoint.open(launch.model_folder)  # reports a faulty model in one line, before anything starts
    lines = Lines(verbose)
    cluster = Cluster(launch, lines.say)
    stopping, hurried = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: hurried.set() if stopping.is_set() else stopping.set())
    record = contextlib.ExitStack()
    working = asyncio.ensure_future(_work(cluster, lines, asked, once, record))
    waiting = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        print("stopping", flush=True)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        lines.serving = False
        record.close()
        await _stop(cluster, hurried)
        waiting.cancel()


async def _stop(cluster: Cluster, hurried: asyncio.Event) -> None:
    ending = asyncio.ensure_future(cluster.stop())
    hurrying = asyncio.ensure_future(hurried.wait())
    await asyncio.wait({ending, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    if not ending.done():
        await cluster.stop(kill=True)
    await ending
    hurrying.cancel()


async def _work(cluster: Cluster, lines: Lines, asked: Question, once: bool, record: contextlib.ExitStack) -> None:
    launch = cluster.launch
    started_s = time.monotonic()
    await cluster.start()
    record.enter_context(cluster.recorded())
    print(
        f"starting {launch.num_prefill} prefill, {launch.num_decode} decode and the scheduler …{launch.remark}",
        flush=True,
    )
    try:
        await cluster.wait_ready()
        print(f"ready after {time.monotonic() - started_s:.1f} s", flush=True)
        lines.serving = True
        await _ask_and_show(launch, asked)
        if asked.adapter:
            await _ask_adapter(launch, asked.adapter)
    except PdClusterError:
        lines.show_kept()
        raise
    if once:
        return
    print(_invitation(launch, await cluster.dashboard_link()), flush=True)
    try:
        await cluster.wait_failure()
    except PdClusterError:
        lines.show_kept()
        raise


# ---- question


async def _ask_and_show(launch: Launch, asked: Question) -> None:
    """Asks and prints. Raises GenerationError if there is no answer."""
    await _ask(launch.url, WARM_UP_TOKENS, lambda text: None, QUESTION)  # warm-up: the first request imports modules
    before = Traffic.of(await fetch_settled(launch.admin_url))
    print(f"\n> {asked.text}", flush=True)
    sample = await _ask(launch.url, MAX_TOKENS, print_text, asked.content)
    print(flush=True)
    _check(sample)
    entries = await fetch_settled(launch.admin_url)
    _show(sample, entries, Traffic.of(entries).received_nbytes - before.received_nbytes)


async def _ask_adapter(launch: Launch, adapter: str) -> None:
    """Asks an adapter the same question, and prints. Raises GenerationError if there is no answer."""
    print(f"> {QUESTION} (to the model {adapter}, a LoRA adapter)", flush=True)
    sample = await _ask(launch.url, MAX_TOKENS, print_text, QUESTION, adapter)
    print("\n", flush=True)
    _check(sample)


def _check(sample: Sample) -> None:
    if sample.error:
        raise GenerationError(f"the question was not answered: {sample.error}")


async def _ask(
    url: str, max_tokens: int, on_text: Callable[[str], None], content: Content, adapter: str = ""
) -> Sample:
    """Asks in a chat or, if the model has no chat template, by a plain completion."""
    async with make_client() as client:
        body: dict[str, Any] = {"temperature": 0, "max_tokens": min(max_tokens, await _num_output_tokens(client, url))}
        if adapter:
            body["model"] = adapter
        messages = [{"role": "user", "content": content}]
        sample = await measure(
            client, f"{url}/v1/chat/completions", {**body, "messages": messages}, StreamWatch(on_text)
        )
        if sample.status == 400 and isinstance(content, str):
            sample = await measure(client, f"{url}/v1/completions", {**body, "prompt": content}, StreamWatch(on_text))
    return sample


async def _num_output_tokens(client: httpx.AsyncClient, url: str) -> int:
    """Returns a number of output tokens that leaves half of the context for the question."""
    try:
        models = (await client.get(f"{url}/v1/models", timeout=5)).json()
        return max(1, int(models["data"][0]["max_model_len"]) // 2)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise GenerationError(f"{url}/v1/models does not answer: {error!r}") from None


# ---- table


def _show(sample: Sample, entries: Entries, kv_nbytes: int) -> None:
    prefill, decode = sample.served_by if len(sample.served_by) == 2 else ("?", "?")
    num_later = max(0, sample.num_output_tokens - 1)
    transport = _transport(entries, prefill, decode)
    rows = [
        ["time to first token (TTFT)", _ms(sample.ttft_s), f"{prefill} computed the prompt and token 1"],
        ["time per output token (TPOT)", _ms(sample.tpot_s), f"{decode} computed {num_later} more"],
        ["prompt tokens", str(sample.num_prompt_tokens), prefill],
        ["output tokens", str(sample.num_output_tokens), f"1 by {prefill}, {num_later} by {decode}"],
        ["KV cache moved", human_nbytes(kv_nbytes), f"{prefill} → {decode} over {transport}"],
    ]
    print(flush=True)
    print_table("What happened", ["", "", "by"], rows)
    print(flush=True)


def _transport(entries: Entries, prefill: str, decode: str) -> str:
    """Returns `shm (shared memory of this host)`, as in the prefill instance's entry."""
    state = next((links_of(each).get(decode) for each in entries if each["instance_id"] == prefill), None)
    if state is None:
        return "an unknown link"
    if not state.is_up:
        return str(state)
    name = f"{state.over}, {state.precision}" if state.precision else state.over
    title = BY_NAME[name].title if name in BY_NAME else ""
    return f"{name} ({title})" if title else name


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _invitation(launch: Launch, dashboard: str) -> str:
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": MAX_TOKENS})
    return (
        f"serving OpenAI's API at {launch.url}/v1, admin at {launch.admin_url}; Ctrl-C stops everything\n"
        f"try: curl {launch.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        "or:  pd-cluster chat; pd-cluster status\n"
        f"dashboard: {dashboard or 'not installed'}"
    )


def main() -> None:
    try:
        app(prog_name="python -m pd_cluster.commands.quickstart")
    except PdClusterError as error:
        print(f"quickstart: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
