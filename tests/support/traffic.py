"""Sends many requests to a cluster under faults, and checks each result."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.support.checkpoints import reference_greedy_together
from tests.support.engines import assert_same, random_prompt

INSTANCE = re.compile(r"\b(?:prefill|decode)-\d+\b")
CLIENT_TIMEOUT_S = 90.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One deterministic completion: greedy, or with top_k 1 for several sequences."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    stream: bool = True

    def body(self) -> dict[str, Any]:
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "n": self.n,
            "stream": self.stream,
            **({"temperature": 0} if self.n == 1 else {"temperature": 1.0, "top_k": 1, "seed": 1}),
            "return_token_ids": True,
        }


@dataclass(slots=True)
class Outcome:
    """A request's result. `error`: the server's message, from the response's body or from the stream."""

    ask: Ask
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    choices: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, str] = field(default_factory=dict)
    error: str = ""
    broken: str = ""  # what is malformed: cut off, no JSON, out of order
    sent_s: float = 0.0  # on the monotonic clock
    took_s: float = 0.0

    @property
    def answered(self) -> bool:
        return self.status == 200 and not self.error and not self.broken

    @property
    def served_by(self) -> str:
        return self.headers.get("x-pd-served-by", "")


def make_asks(rng: random.Random, number: int, num_prompts: int, longest: int, max_tokens: int) -> list[Ask]:
    """Makes requests for `num_prompts` prompts, a third with a common prefix; every eighth has two sequences."""
    prompts = [random_prompt(rng, rng.choice((1, rng.randrange(2, 60), rng.randrange(60, longest)))) for _ in range(2)]
    shared = random_prompt(rng, longest // 2)
    for at in range(num_prompts - 2):
        length = rng.choice((rng.randrange(2, 40), rng.randrange(2, longest // 2)))
        prompts.append([*(shared if at % 3 == 0 else []), *random_prompt(rng, length)])
    return [
        Ask(
            tuple(rng.choice(prompts)),
            rng.randrange(4, max_tokens + 1),
            n=2 if rng.random() < 1 / 8 else 1,
            stream=rng.random() < 2 / 3,
        )
        for _ in range(number)
    ]


def ask_once(client: httpx.Client, url: str, ask: Ask) -> Outcome:
    """Sends a request. Never raises; the outcome records any failure."""
    outcome = Outcome(ask, sent_s=time.monotonic())
    try:
        with client.stream("POST", f"{url}/v1/completions", json=ask.body()) as answer:
            outcome.status, outcome.headers = answer.status_code, dict(answer.headers)
            if ask.stream and answer.status_code == 200:
                _read_events(outcome, answer.iter_lines())
            else:
                _read_whole(outcome, answer.read())
    except (httpx.HTTPError, ValueError, KeyError) as error:
        outcome.broken = f"{type(error).__name__}: {error}"
    outcome.took_s = time.monotonic() - outcome.sent_s
    return outcome


def _read_whole(outcome: Outcome, body: bytes) -> None:
    answer = json.loads(body)
    if outcome.status != 200:
        outcome.error = answer["error"]["message"]
        return
    for choice in answer["choices"]:
        outcome.choices[choice["index"]] = choice["token_ids"]
        outcome.finished[choice["index"]] = choice["finish_reason"]


def _read_events(outcome: Outcome, lines: Iterator[str]) -> None:
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        outcome.broken = f"the stream of {len(events)} events does not end with [DONE]"
    for text in events:
        if text == "[DONE]":
            continue
        event = json.loads(text)
        if outcome.error:
            outcome.broken = "an event behind the error"
        if "error" in event:
            outcome.error = event["error"]["message"]
            continue
        for choice in event["choices"]:
            outcome.choices.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
            if choice["finish_reason"] is not None:
                outcome.finished[choice["index"]] = choice["finish_reason"]


class Traffic:
    """Sends `asks` in order, `concurrency` at a time, each only once allowed, so that a fault always hits running
    requests.

    `enter` is called first on each thread.
    """

    def __init__(
        self, url: str, asks: Sequence[Ask], concurrency: int, enter: Callable[[], None] = lambda: None
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._url = url
        self._asks = asks
        self._enter = enter
        self._num_started = self._num_allowed = 0
        self._in_flight: set[int] = set()  # indices of requests
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(concurrency)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:  # after a failure no further request begins
            self._asks = self._asks[: self._num_started]
            self._changed.notify_all()

    def more(self, number: int) -> None:
        """Allows `number` more requests."""
        with self._changed:
            self._num_allowed = max(self._num_allowed, self._num_started + number)
            self._changed.notify_all()

    @property
    def in_flight(self) -> frozenset[int]:
        """Returns the indices of the requests in flight."""
        with self._changed:
            return frozenset(self._in_flight)

    def finish(self, timeout_s: float = 120.0) -> None:
        """Allows all remaining requests and waits for their end."""
        self.more(len(self._asks))
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.outcomes) == len(self._asks), timeout_s), (
                f"{len(self.outcomes)} of {len(self._asks)} requests ended within {timeout_s:g} s"
            )

    def _work(self) -> None:
        self._enter()
        no_reuse = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(timeout=CLIENT_TIMEOUT_S, trust_env=False, limits=no_reuse) as client:
            while (number := self._next()) is not None:
                outcome = ask_once(client, self._url, self._asks[number])
                with self._changed:
                    self._in_flight.remove(number)
                    self.outcomes.append(outcome)
                    self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._num_started < self._num_allowed or self._is_over())
            if self._is_over():
                return None
            number = self._num_started
            self._num_started += 1
            self._in_flight.add(number)
            return number

    def _is_over(self) -> bool:
        return self._num_started >= len(self._asks)


class Judge:
    """Compares outcomes with transformers' tokens, computed once per prompt."""

    def __init__(self, model: Path, asks: Sequence[Ask], request_timeout_s: float) -> None:
        self._model = model
        self._limit_s = request_timeout_s + 5.0
        longest: dict[tuple[int, ...], int] = {}
        for ask in asks:
            longest[ask.prompt] = max(longest.get(ask.prompt, 0), ask.max_tokens)
        together = reference_greedy_together(model, [list(prompt) for prompt in longest], max(longest.values()))
        self._expected = dict(zip(longest, together, strict=True))  # prompts with a difference are computed alone later

    def check(self, outcomes: Sequence[Outcome]) -> Counter[str]:
        """Asserts that each outcome is right, or a named error, in time. Returns counts by kind of ending."""
        for outcome in outcomes:
            assert not outcome.broken, f"{outcome.broken} ({describe(outcome)})"
            assert outcome.took_s < self._limit_s, f"too late: {describe(outcome)}"
            if outcome.answered:
                assert sorted(outcome.choices) == sorted(outcome.finished) == list(range(outcome.ask.n))
            else:
                check_named(outcome)
            for tokens in outcome.choices.values():
                self.check_tokens(outcome, tokens)
        return Counter(kind_of(outcome) for outcome in outcomes)

    def check_tokens(self, outcome: Outcome, tokens: list[int]) -> None:
        """Asserts the right tokens, or a prefix of them before an error in the stream."""
        expected = self._expected[outcome.ask.prompt][: outcome.ask.max_tokens]
        if not outcome.answered:
            expected = expected[: len(tokens)]
        if tokens != expected:
            most = outcome.ask.max_tokens if outcome.answered else len(tokens)
            assert_same(self._model, list(outcome.ask.prompt), tokens, most)


def check_named(outcome: Outcome) -> None:
    """Asserts that the error names the failed instance, or says that there is none and when to retry."""
    if outcome.status == 503:
        assert outcome.error, f"the error gives no reason: {describe(outcome)}"
        assert int(outcome.headers["retry-after"]) >= 1, describe(outcome)
    else:
        assert outcome.status in (200, 500), describe(outcome)
        assert INSTANCE.search(outcome.error), f"the error names no instance: {describe(outcome)}"


def kind_of(outcome: Outcome) -> str:
    """Returns `answered`, or how and at which side the request failed."""
    if outcome.answered:
        return "answered"
    where = "in-band" if outcome.status == 200 else str(outcome.status)
    return f"{where}: {' '.join(dict.fromkeys(INSTANCE.findall(outcome.error)))}"


def describe(outcome: Outcome) -> str:
    ask = outcome.ask
    return (
        f"{len(ask.prompt)} prompt tokens, max_tokens {ask.max_tokens}, n {ask.n}, stream {ask.stream}, "
        f"by {outcome.served_by or 'nobody'}: status {outcome.status} after {outcome.took_s:.1f} s, "
        f"error {outcome.error!r}"
    )
