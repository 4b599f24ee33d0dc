"""Sends requests continuously while a test changes the cluster, and checks that answers stay the same."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt

CONCURRENCY = 4
NUM_PROMPTS = 12


class SteadyStream:
    """Sends requests on several threads; every answer must equal the answer before any change."""

    def __init__(self, cluster: LiveCluster, longest: int = 120) -> None:
        rng = random.Random(5)
        self._url = cluster.url
        self._asks = [
            (random_prompt(rng, rng.randrange(8, longest)), rng.randrange(8, longest)) for _ in range(NUM_PROMPTS)
        ]
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.faults: list[str] = []
        self.num_answered = 0
        with httpx.Client(timeout=60, trust_env=False) as client:
            self._expected = [self._answer(client, at) for at in range(NUM_PROMPTS)]

    @contextmanager
    def running(self) -> Iterator[None]:
        self._stopping.clear()
        self._threads = [threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(CONCURRENCY)]
        for thread in self._threads:
            thread.start()
        before = self.num_answered
        try:
            yield
        finally:
            self._stopping.set()
            for thread in self._threads:
                thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "requests hang"
        assert self.faults == []
        assert self.num_answered - before >= CONCURRENCY

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not self._stopping.is_set():
                at = rng.randrange(NUM_PROMPTS)
                try:
                    if (found := self._answer(client, at)) != self._expected[at]:
                        self.faults.append(f"request {at}: {found} and not {self._expected[at]}")
                except (httpx.HTTPError, AssertionError) as error:
                    self.faults.append(f"request {at}: {error}")
                self.num_answered += 1

    def _answer(self, client: httpx.Client, at: int) -> list[int]:
        prompt, max_tokens = self._asks[at]
        salt = f"{self.num_answered}-{threading.get_ident()}"  # so that no instance is preferred for its cache
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
        answer = client.post(f"{self._url}/v1/completions", json={**body, "return_token_ids": True})
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens
