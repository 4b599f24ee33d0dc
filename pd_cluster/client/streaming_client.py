"""Sends one streaming request, and measures it as a client sees it: TTFT, gaps between chunks, TPOT, tokens, text.

Needs only httpx and knows nothing of clusters. `Recorder` is pure: it turns bytes and their arrival times into a
`Sample`.

A token whose text is not final yet (half a character) may arrive with the next one, so a chunk may carry several
tokens. ITL is therefore the time between arrivals, and TPOT the time from the first arrival to the last, divided by the
number of tokens after the first arrival. Tokens are counted by the server's `token_ids` if it sends them; otherwise the
first arrival counts as one token.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from pd_cluster.client.trusted_certificates import reason_of, trusted

REQUEST_DEADLINE_S = 120.0
CONNECT_TIMEOUT_S = 5.0
MAX_EVENT_NBYTES = 16 << 20
MAX_ERROR_CHARS = 300
RESUME_TOKEN, LAST_EVENT = "x-pd-resume-token", "Last-Event-ID"  # headers of a server with --resume-window
RESUME_PAUSE_S, RESUME_FOR_S = 0.5, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The measurements of one request. With an `error`, the other fields show how far the request got."""

    ttft_s: float | None = None  # None: nothing arrived
    tpot_s: float | None = None  # mean time per output token after the first arrival; None if all arrived at once
    itl_s: list[float] = field(default_factory=list)  # between arrivals of tokens
    e2e_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()  # as sent by the server
    served_by: tuple[str, ...] = ()  # x-pd-served-by: prefill, decode
    status: int | None = None  # HTTP status; None: no answer
    retry_after: str | None = None  # the HTTP header
    error: str | None = None
    server_said_so: bool = False  # `error` quotes the server


class Recorder:
    """Reads a stream of server-sent events. `start_s` and every `now_s` come from one monotonic clock."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._buffer = b""
        self._arrivals_s: list[float] = []
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._num_first_tokens = 1  # output tokens in the first arrival
        self._usage: dict[str, int] = {}
        self._done = False
        self._error: str | None = None
        self._server_said_so = False
        self.last_id = self._id = ""  # the last complete event's id, and the id of the event being read

    @property
    def ended(self) -> bool:
        """Whether the stream has ended; anything that follows is ignored."""
        return self._done or self._error is not None

    def feed(self, data: bytes, now_s: float) -> str:
        """Returns the new text in `data`, which may end in the middle of a line."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_EVENT_NBYTES:
            self._error = f"an event is longer than {MAX_EVENT_NBYTES >> 20} MiB"
        before = len(self._token_ids)
        new = "".join([self._event(line) for line in lines if not self.ended])
        if new or len(self._token_ids) > before:
            if not self._arrivals_s:
                self._num_first_tokens = max(1, len(self._token_ids))
            self._arrivals_s.append(now_s)
            self._texts.append(new)
        return new

    def reconnects(self) -> None:
        """Discards a partially received event: the server sends it again."""
        self._buffer = b""

    @property
    def has_begun(self) -> bool:
        """Whether a token or its text has arrived."""
        return bool(self._arrivals_s)

    def fail(self, reason: str, server_said_so: bool = False) -> None:
        """Records why the request failed; the first reason is kept."""
        if self._error is None:
            self._error, self._server_said_so = reason, server_said_so

    def finish(
        self,
        now_s: float,
        status: int | None = None,
        served_by: tuple[str, ...] = (),
        retry_after: str | None = None,
    ) -> Sample:
        """Returns the sample. A stream that ends without [DONE] and without an error counts as an error."""
        if not self.ended:
            self._error = "the stream ended without [DONE]"
        arrivals_s = self._arrivals_s
        num_output = self._usage.get("completion_tokens", 0)
        num_later = num_output - self._num_first_tokens
        tpot_s = None
        if num_later > 0 and len(arrivals_s) > 1:
            tpot_s = (arrivals_s[-1] - arrivals_s[0]) / num_later
        return Sample(
            ttft_s=arrivals_s[0] - self._start_s if arrivals_s else None,
            tpot_s=tpot_s,
            itl_s=[later - earlier for earlier, later in itertools.pairwise(arrivals_s)],
            e2e_s=now_s - self._start_s,
            num_prompt_tokens=self._usage.get("prompt_tokens", 0),
            num_output_tokens=num_output,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            served_by=served_by,
            status=status,
            retry_after=retry_after,
            error=self._error,
            server_said_so=self._server_said_so,
        )

    def _event(self, line: bytes) -> str:
        """Returns the text of one line; "" for comments and other fields of the format."""
        if line.startswith(b"id:"):
            self._id = line[3:].strip().decode("latin-1")
        if not line.startswith(b"data:"):
            return ""
        self.last_id = self._id
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self._done = True
            return ""
        try:
            event = json.loads(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self._error = f"an event is not a JSON object: {payload[:60]!r}"
            return ""
        if event.get("error"):
            self.fail(error_message(event), server_said_so=True)
            return ""
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        choices = event.get("choices") or ()
        for choice in choices:
            self._token_ids += choice.get("token_ids") or ()
        return "".join(_text_of(choice) for choice in choices)


def _text_of(choice: dict[str, Any]) -> str:
    """Returns the text of a chunk of a completion or a chat."""
    text = choice["text"] if "text" in choice else choice.get("delta", {}).get("content")
    return text or ""


def error_message(body: Any) -> str:
    """Returns the message of an OpenAI error; for any other body, the truncated body."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:MAX_ERROR_CHARS]


@dataclass(frozen=True, slots=True)
class StreamWatch:
    """Functions that a stream calls: `on_text` with each text, and `on_first` when the first token arrives, with the
    instances that serve the request.
    """

    on_text: Callable[[str], None] = lambda text: None
    on_first: Callable[[tuple[str, ...]], None] = lambda served_by: None


NOT_WATCHED = StreamWatch()


async def measure(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    watch: StreamWatch = NOT_WATCHED,
    deadline_s: float = REQUEST_DEADLINE_S,
    resumes: bool = False,
) -> Sample:
    """Sends `body` to `url` (/v1/completions or /v1/chat/completions), asking for a stream, usage and token ids.

    Never raises for failures of the network or the server: they become the sample's `error`. `resumes`: if the
    connection breaks and the server can resume the stream (--resume-window), the rest is read over a new connection.
    """
    start_s = time.monotonic()
    recorder = Recorder(start_s)
    status: int | None = None
    served_by: tuple[str, ...] = ()
    retry_after: str | None = None
    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    try:
        async with asyncio.timeout(deadline_s), client.stream("POST", url, json=streaming) as response:
            status = response.status_code
            served_by = tuple(filter(None, response.headers.get("x-pd-served-by", "").split(",")))
            retry_after = response.headers.get("retry-after")
            if status != 200:
                recorder.fail(f"HTTP {status}: {_refusal(await response.aread())}", server_said_so=True)
            elif not response.headers.get("content-type", "").startswith("text/event-stream"):
                recorder.fail("the server did not answer with a stream of events")
            else:
                await _read(response, recorder, watch.on_text, lambda: watch.on_first(served_by), resumes)
            token = response.headers.get(RESUME_TOKEN, "") if resumes else ""
            if token and status == 200 and not recorder.ended:
                await _resume(client, url, token, recorder, watch.on_text)
    except TimeoutError:
        recorder.fail(f"not finished within {deadline_s:g} s")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        recorder.fail(f"{url}: {reason_of(error)}")
    return recorder.finish(time.monotonic(), status, served_by, retry_after)


async def _read(
    response: httpx.Response,
    recorder: Recorder,
    on_text: Callable[[str], None],
    on_first: Callable[[], None] = lambda: None,
    may_break: bool = False,
) -> None:
    """Reads to the end of the stream, or of the connection. `may_break`: a broken connection is not an error."""
    try:
        async for data in response.aiter_bytes():
            had_begun = recorder.has_begun
            if text := recorder.feed(data, time.monotonic()):
                on_text(text)
            if recorder.has_begun and not had_begun:
                on_first()
            if recorder.ended:
                return
    except httpx.TransportError:
        if not (may_break and response.headers.get(RESUME_TOKEN)):
            raise


async def _resume(
    client: httpx.AsyncClient, url: str, token: str, recorder: Recorder, on_text: Callable[[str], None]
) -> None:
    """Reads the rest of a stream over new connections, as long as the server answers or may come back.

    Raises httpx.HTTPError if the server does neither.
    """
    address = f"{url.rpartition('/v1/')[0]}/v1/streams"
    until_s = time.monotonic() + RESUME_FOR_S
    while not recorder.ended:
        recorder.reconnects()
        headers = {RESUME_TOKEN: token, **({LAST_EVENT: recorder.last_id} if recorder.last_id else {})}
        try:
            async with client.stream("GET", address, headers=headers) as response:
                if response.status_code == 200:
                    await _read(response, recorder, on_text, may_break=True)
                elif response.status_code != 503 or time.monotonic() > until_s:
                    recorder.fail(f"HTTP {response.status_code}: {_refusal(await response.aread())}", True)
        except httpx.TransportError:
            if time.monotonic() > until_s:
                raise
        if not recorder.ended:
            await asyncio.sleep(RESUME_PAUSE_S)


def _refusal(content: bytes) -> str:
    try:
        return error_message(json.loads(content))
    except ValueError:
        return content[:MAX_ERROR_CHARS].decode(errors="replace")


def key_header(env: Mapping[str, str]) -> dict[str, str]:
    """Returns a header with the key from VLLM_API_KEY, as a server reads it, or OPENAI_API_KEY, as OpenAI's client
    does.
    """
    key = env.get("VLLM_API_KEY") or env.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def make_client(concurrency: int = 1, address: str | None = None) -> httpx.AsyncClient:
    """Makes a client without proxies and without a read timeout: `measure` sets one deadline for the whole request.

    `address`: this host's address from which to connect. Raises PdClusterError for an SSL_CERT_FILE that cannot be
    used.
    """
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=concurrency + 2, max_keepalive_connections=concurrency + 2)
    headers, verify = key_header(os.environ), trusted(os.environ)
    transport = httpx.AsyncHTTPTransport(verify=verify, limits=limits, trust_env=False, local_address=address)
    return httpx.AsyncClient(timeout=timeout, transport=transport, trust_env=False, headers=headers)
