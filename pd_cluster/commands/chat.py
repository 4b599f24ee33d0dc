"""`pd-cluster chat`: talks with a served model; streams, remembers, and says how long each answer took and where."""

from __future__ import annotations

import asyncio
import base64
import mimetypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from pd_cluster.client.streaming import Sample, make_client, measure
from pd_cluster.errors import ConfigError, PdClusterError

HELP = "/new forgets what was said, /image FILE adds a picture to the next message, /exit or Ctrl-D ends"
CONNECT_TIMEOUT_S = 5.0
MAX_IMAGE_NBYTES = 24 << 20
LEAST_RATED_TOKENS, LEAST_RATED_S = 8, 0.05  # of fewer, or in less time, a rate says nothing
Say = Callable[[str], None]


class Chat:
    """One conversation. `say` gets text as it arrives; `note` gets lines about it."""

    def __init__(self, url: str, model: str, options: dict[str, Any], system: str, say: Say, note: Say) -> None:
        self._url, self._model, self._options = url.rstrip("/"), model, options
        self._system = [{"role": "system", "content": system}] if system else []
        self._said: list[dict[str, Any]] = []
        self._images: list[str] = []
        self._say, self._note = say, note

    def forget(self) -> None:
        self._said.clear()
        self._images.clear()

    def show(self, file: str) -> None:
        """Adds a picture to the next message. Raises ConfigError."""
        self._images.append(data_url(file))

    async def ask(self, client: httpx.AsyncClient, text: str) -> Sample:
        """Asks and prints the answer; a failed question is forgotten."""
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self._images]
        content: Any = [*images, {"type": "text", "text": text}] if images else text
        body = {"messages": [*self._system, *self._said, {"role": "user", "content": content}], **self._options}
        if self._model:
            body["model"] = self._model
        sample = await measure(client, f"{self._url}/v1/chat/completions", body, self._say, resumes=True)
        self._images.clear()
        if sample.text:
            self._say("\n")
        if sample.error is None:
            self._said += [{"role": "user", "content": content}, {"role": "assistant", "content": sample.text}]
            self._note(timings(sample))
        return sample


def timings(sample: Sample) -> str:
    """Returns one line: tokens, time to the first, tokens a second, and the instances that served it."""
    first = f", first after {sample.ttft_s * 1e3:.0f} ms" if sample.ttft_s is not None else ""
    num_later, rate = sample.num_output_tokens - 1, ""
    if sample.tpot_s and num_later + 1 >= LEAST_RATED_TOKENS and num_later * sample.tpot_s >= LEAST_RATED_S:
        rate = f", {1 / sample.tpot_s:.1f} tokens/s"
    where = f"; {' → '.join(sample.served_by)}" if sample.served_by else ""
    return f"{sample.num_output_tokens} tokens{first}{rate}{where}"


def data_url(file: str) -> str:
    """Returns an image file as a data: URL. Raises ConfigError."""
    kind = mimetypes.guess_type(file)[0] or ""
    if not kind.startswith("image/"):
        raise ConfigError(f"--image {file}: its name is not that of an image file, such as photo.png")
    try:
        if Path(file).stat().st_size > MAX_IMAGE_NBYTES:
            raise ConfigError(f"--image {file}: larger than {MAX_IMAGE_NBYTES >> 20} MiB")
        return f"data:{kind};base64,{base64.b64encode(Path(file).read_bytes()).decode()}"
    except OSError as error:
        raise ConfigError(f"--image {file}: cannot be read: {error.strerror}") from None


def run(url: str, model: str, question: str, images: list[str], system: str, options: dict[str, Any]) -> None:
    """Asks one question, or as many as stdin has lines. Raises PdClusterError for a question that failed, unless a
    person can ask again.
    """
    asyncio.run(_run(url, model, question, images, system, options))


async def _run(url: str, model: str, question: str, images: list[str], system: str, options: dict[str, Any]) -> None:
    def note(line: str) -> None:
        print(f"[{line}]", file=sys.stderr, flush=True)

    chat = Chat(url, model, options, system, lambda text: print(text, end="", flush=True), note)
    for file in images:
        chat.show(file)
    async with make_client() as client:
        await _check_there(client, url)
        if question:
            _raise_failure(await chat.ask(client, question))
            return
        is_person = sys.stdin.isatty()
        if is_person:
            note(HELP)
        while (line := await _read_line(is_person)) is not None:
            try:
                await _take(chat, client, line, is_person)
            except PdClusterError as error:
                if not is_person:
                    raise
                note(str(error))


async def _check_there(client: httpx.AsyncClient, url: str) -> None:
    """Raises PdClusterError if no server answers, which nobody wants to read after a long question."""
    try:
        await client.get(f"{url.rstrip('/')}/live", timeout=CONNECT_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PdClusterError(
            f"no server answers at {url}: {str(error) or type(error).__name__}; give its public address with --url, "
            f"or start one: `pd-cluster up`"
        ) from None


async def _take(chat: Chat, client: httpx.AsyncClient, line: str, is_person: bool) -> None:
    """Does what a line says. Raises PdClusterError for a question that failed."""
    word, _, rest = line.partition(" ")
    if not line:
        return
    if is_person and word == "/new":
        chat.forget()
    elif is_person and word == "/image":
        chat.show(rest.strip())
    elif is_person and word.startswith("/"):
        print(f"[{HELP}]", file=sys.stderr)
    else:
        _raise_failure(await chat.ask(client, line))


def _raise_failure(sample: Sample) -> None:
    if sample.error is not None:
        raise PdClusterError(sample.error)


async def _read_line(is_person: bool) -> str | None:
    """Returns the next line without its end; None at the end of the input, and at /exit or /quit."""
    try:
        line = (await asyncio.to_thread(input, "> " if is_person else "")).strip()
    except EOFError:
        return None
    return None if is_person and line in ("/exit", "/quit") else line
