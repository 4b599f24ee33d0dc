"""`pd-cluster chat`: a conversation with a served model, with the time and the instances of each answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import mimetypes
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from pd_cluster.client.streaming_client import Sample, StreamWatch, make_client, measure
from pd_cluster.client.trusted_certificates import reason_of
from pd_cluster.errors import ConfigError, PdClusterError

HELP = (
    "/new forgets what was said, /image FILE adds a picture to the next message, Ctrl-C stops an answer, "
    "/exit or Ctrl-D ends"
)
CONNECT_TIMEOUT_S = 5.0
ANSWER_DEADLINE_S = 3600.0  # a server's --request-timeout ends answers much earlier, and Ctrl-C at any time
NOT_UTF8 = "the question is not UTF-8 text"
MAX_IMAGE_NBYTES = 24 << 20
LEAST_RATED_TOKENS, LEAST_RATED_S = 8, 0.05  # with fewer tokens, or in less time, a rate means nothing
Say = Callable[[str], None]


class Chat:
    """One conversation. `say` gets the answer's text as it arrives; `note` gets lines about the conversation."""

    def __init__(self, url: str, model: str, options: dict[str, Any], system: str, say: Say, note: Say) -> None:
        self._url, self.model, self._options = url.rstrip("/").removesuffix("/v1"), model, options
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

    async def find_server(self, client: httpx.AsyncClient) -> None:
        """If no model was named, takes the first that the server lists, because a server may require a name.

        Raises PdClusterError if no server answers, so that the user sees it before typing a question.
        """
        try:
            answer = await client.get(f"{self._url}/v1/models", timeout=CONNECT_TIMEOUT_S)
        except httpx.ReadTimeout:  # the server is busy
            return
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PdClusterError(
                f"no server answers at {self._url}: {reason_of(error)}; give its public address with "
                f"--url, or start one: `pd-cluster up`"
            ) from None
        self.model = self.model or _first_model(answer)

    async def ask(self, client: httpx.AsyncClient, text: str) -> Sample:
        """Asks and prints the answer.

        A failed question is removed from the conversation. Raises ConfigError if `text` is not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(NOT_UTF8) from None
        images = [{"type": "image_url", "image_url": {"url": url}} for url in self._images]
        self._images.clear()
        content: Any = [*images, {"type": "text", "text": text}] if images else text
        body = {"messages": [*self._system, *self._said, {"role": "user", "content": content}], **self._options}
        if self.model:
            body["model"] = self.model
        address = f"{self._url}/v1/chat/completions"
        sample = await measure(
            client, address, body, StreamWatch(self._say), deadline_s=ANSWER_DEADLINE_S, resumes=True
        )
        if sample.text:
            self._say("\n")
        if sample.error is None:
            self._said += [{"role": "user", "content": content}, {"role": "assistant", "content": sample.text}]
            self._note(timings(sample))
        return sample


def _first_model(answer: httpx.Response) -> str:
    """Returns "" if the server lists no models or requires a key; its refusal of the question then gives the reason."""
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        return ""


def timings(sample: Sample) -> str:
    """Returns one line: tokens, time to the first token, tokens per second, and the instances that served it."""
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
        raise ConfigError(f"--image {file}: give a file with an image's extension, such as photo.png")
    try:
        if Path(file).stat().st_size > MAX_IMAGE_NBYTES:
            raise ConfigError(f"--image {file}: larger than {MAX_IMAGE_NBYTES >> 20} MiB")
        return f"data:{kind};base64,{base64.b64encode(Path(file).read_bytes()).decode()}"
    except OSError as error:
        raise ConfigError(f"--image {file}: cannot be read: {error.strerror}") from None


def print_text(text: str) -> None:
    """Prints a model's text; on a terminal, removes control characters, which could rewrite the screen."""
    if sys.stdout.isatty():
        text = "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def run(url: str, model: str, question: str, images: list[str], system: str, options: dict[str, Any]) -> None:
    """Asks one question, or each line of stdin. Raises PdClusterError for a question that failed, unless a user at a
    terminal can ask again. Raises KeyboardInterrupt, unless Ctrl-C stopped an answer.
    """

    def note(line: str) -> None:
        print(f"[{line}]", file=sys.stderr, flush=True)

    chat = Chat(url, model, options, system, print_text, note)
    for file in images:
        chat.show(file)
    client = make_client()
    # Lines are read in this thread, between runs of the loop, because Ctrl-C can interrupt a read only there.
    with asyncio.Runner() as runner:
        try:
            runner.run(chat.find_server(client))
            if question:
                _raise_failure(runner.run(chat.ask(client, question)))
            elif sys.stdin.isatty():
                _talk(chat, client, runner, note)
            else:
                while (line := _read_line("")) is not None:
                    if line:
                        _raise_failure(runner.run(chat.ask(client, line)))
        finally:
            runner.run(client.aclose())


def _talk(chat: Chat, client: httpx.AsyncClient, runner: asyncio.Runner, note: Say) -> None:
    """Answers a user at a terminal until the input ends."""
    with contextlib.suppress(ImportError):  # Python may have been built without readline
        importlib.import_module("readline")  # lets `input` edit lines, recall earlier ones, and read any length
    note(HELP)
    while True:
        try:
            if (line := _read_line("> ")) is None or line in ("/exit", "/quit"):
                return
            word, _, rest = line.partition(" ")
            if word == "/new":
                chat.forget()
            elif word == "/image":
                chat.show(rest.strip())
            elif word.startswith("/"):
                note(HELP)
            elif line:
                _ask(chat, client, runner, line)
        except PdClusterError as error:
            note(str(error))


def _ask(chat: Chat, client: httpx.AsyncClient, runner: asyncio.Runner, line: str) -> None:
    """Raises PdClusterError for a question that failed or was stopped."""
    try:
        _raise_failure(runner.run(chat.ask(client, line)))
    except KeyboardInterrupt:
        print()
        raise PdClusterError("stopped; question and answer are forgotten") from None


def _raise_failure(sample: Sample) -> None:
    if sample.error is not None:
        raise PdClusterError(sample.error)


def _read_line(prompt: str) -> str | None:
    """Returns the next line without its end; None at the end of the input. Raises ConfigError."""
    try:
        return input(prompt).strip()
    except UnicodeDecodeError:
        raise ConfigError(NOT_UTF8) from None
    except EOFError:
        if prompt:
            print()
        return None
