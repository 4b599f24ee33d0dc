"""guidellm's side of `pd-cluster bench load`: `PYTHON guidellm_plugin.py check|run SCENARIO.json`.

Registers a backend in guidellm that sends prompts of token ids (or messages) unchanged, with the request's own id, and
records when each token came. Runs in guidellm's interpreter, which may not have pd_cluster, and so imports nothing from
it. guidellm's worker processes import this file again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import guidellm.entrypoints
import httpx
from guidellm.backends import Backend
from guidellm.backends.openai.http import OpenAIHTTPBackend
from guidellm.backends.openai.request_handlers import (
    ChatCompletionsRequestHandler,
    OpenAIRequestHandlerFactory,
    TextCompletionsRequestHandler,
)
from guidellm.schemas.backends import BackendArgs, OpenAIHTTPBackendArgs
from guidellm.schemas.benchmark import BenchmarkArgs, BenchmarkScenario
from pydantic import ValidationError

COMPLETIONS, CHAT = "pd_cluster/completions", "pd_cluster/chat"
API_KEY = "OPENAI_API_KEY"  # a variable of the environment, to keep the key out of files
WRONG_SCENARIO = 3  # exit code


class TokenTimes:
    """When an answer's tokens came: the first event's Unix time in seconds, later events in microseconds after it."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self.after_us: list[int] = []
        self.num_tokens = 0

    def heard(self, has_text: bool, has_choice: bool, usage: dict[str, Any] | None) -> int:
        """Records an event. Returns its number of tokens, or one if the server does not report the number.

        An event without text may be a token that is part of a character; the final usage event has no token.
        """
        counted = int((usage or {}).get("completion_tokens") or 0) if has_choice else 0
        num = max(counted - self.num_tokens, int(has_text))
        if num:
            now_s = time.time()
            self.first_s = self.first_s or now_s
            self.after_us.append(round(1e6 * (now_s - self.first_s)))
            self.num_tokens += num
        return num


class RequestLog:
    """Writes a JSON line for each ended request, to this process's own file.

    guidellm's own report omits the times of failed requests, and sometimes the last request of a run.
    """

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"requests-{os.getpid()}.jsonl").open("a")

    def write(self, info: Any, response: Any, error: str, is_cut_off: bool) -> None:
        timings, times = info.timings, getattr(response, "response_metrics", None) or {}
        usage_in, usage_out = getattr(response, "input_metrics", None), getattr(response, "output_metrics", None)
        line = {
            "request_id": info.request_id,
            "response_id": getattr(response, "response_id", None),
            "run_s": info.scheduler_start_time,
            "planned_s": timings.targeted_start,
            "sent_s": timings.request_start or timings.resolve_start,
            "first_s": times.get("first_s") or timings.first_token_iteration,
            "last_s": timings.last_token_iteration,
            "after_us": times.get("after_us", []),
            "num_prompt_tokens": getattr(usage_in, "text_tokens", None) or 0,
            "num_cached_tokens": getattr(usage_in, "cached_tokens", None) or 0,
            "num_output_tokens": getattr(usage_out, "text_tokens", None) or times.get("num_tokens", 0),
            "error": error,
            "is_cut_off": is_cut_off,
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()


def finish_arguments(arguments: Any, request: Any) -> Any:
    """Replaces guidellm's prompt by the row's part of the body, and sets the request's id."""
    body = arguments.body
    body.update(json.loads(request.columns["text_column"][0]))
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    arguments.headers = {**(arguments.headers or {}), "x-request-id": request.request_id}
    if key := os.environ.get(API_KEY):
        arguments.headers["Authorization"] = f"Bearer {key}"
    return arguments


def finish_response(response: Any, times: TokenTimes) -> Any:
    """Adds the times; drops the prompt and the text, which guidellm would send between processes."""
    response.request_args = None
    response.text = "" if response.output_metrics.total_tokens else response.text
    response.response_metrics = {
        "first_s": times.first_s, "after_us": times.after_us, "num_tokens": times.num_tokens
    }  # fmt: skip
    return response


def timed(base: Any) -> Any:
    """Returns guidellm's request handler of an API, with the row's body, the request's id and the tokens' times."""

    class TimedHandler(base):
        def __init__(self) -> None:
            super().__init__()
            self._times = TokenTimes()
            self._has_choice = self._is_done = False

        def format(self, data: Any, history: Any = None, **kwargs: Any) -> Any:
            return finish_arguments(super().format(data, history, **kwargs), data)

        def extract_choices_and_usage(self, response: Any) -> Any:
            choices, usage = super().extract_choices_and_usage(response)
            self._has_choice = bool(choices)
            return choices, usage

        def add_streaming_line(self, line: str) -> int | None:
            self._has_choice = False
            counted: int | None = super().add_streaming_line(line)
            if counted is None:
                self._is_done = True
                return None
            return self._times.heard(counted > 0, self._has_choice, self.streaming_usage)

        def post_validation(self, response: Any) -> None:
            if not self._is_done:
                raise ValueError("the stream ended without [DONE]")
            super().post_validation(response)

        def compile_streaming(self, request: Any, arguments: Any) -> Any:
            return finish_response(super().compile_streaming(request, arguments), self._times)

    return TimedHandler


OpenAIRequestHandlerFactory.register_decorator(timed(TextCompletionsRequestHandler), COMPLETIONS)
OpenAIRequestHandlerFactory.register_decorator(timed(ChatCompletionsRequestHandler), CHAT)


@BackendArgs.register("pd_cluster")
class TimedBackendArgs(OpenAIHTTPBackendArgs):
    kind: Literal["pd_cluster"] = "pd_cluster"
    request_format: Literal["pd_cluster/completions", "pd_cluster/chat"] = "pd_cluster/completions"


@Backend.register("pd_cluster")
class TimedBackend(OpenAIHTTPBackend):
    _log: RequestLog | None = None  # opened in each of guidellm's processes

    async def validate(self) -> None:
        """Sends one request in each process before the load, because a client's first request spends half a second on
        imports.

        Ignores the server's answer, which the command has already checked.
        """
        with contextlib.suppress(httpx.HTTPError, ValueError, LookupError):
            await self.available_models()

    async def resolve(self, request: Any, request_info: Any, history: Any = None) -> AsyncIterator[Any]:
        """Yields guidellm's answers, and records the request, however it ends."""
        self._log = self._log or RequestLog(Path.cwd())
        last, error, is_cut_off = None, "", False
        try:
            async for response, info in super().resolve(request, request_info, history):
                last = response
                yield response, info
        except asyncio.CancelledError:
            is_cut_off = True
            raise
        except Exception as fault:
            error = str(fault) or type(fault).__name__
            raise
        finally:
            self._log.write(request_info, last, error, is_cut_off)


BenchmarkArgs.reload_schema()  # so that the fields accept the backend
BenchmarkScenario.reload_schema()


def checked(file: str) -> BenchmarkScenario:
    """Reads the scenario; exits with one line if it is invalid."""
    try:
        return BenchmarkScenario.create(Path(file))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "spec")
        print(f"{where}: {first['msg']}", file=sys.stderr)
        sys.exit(WRONG_SCENARIO)


def main() -> None:
    command, file = sys.argv[1:3]
    scenario = checked(file)
    if command == "run":
        asyncio.run(guidellm.entrypoints.benchmark_generative_text(args=scenario, progress=False, console=None))


if __name__ == "__main__":
    main()
