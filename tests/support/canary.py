"""Repeats a greedy stream while a test disturbs the cluster, and checks that its tokens stay the same.

Does not know what the test does.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.support.cluster import LiveCluster

BODY: dict[str, Any] = {"prompt": "canary", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
TIMEOUT_S = 60.0


class Canary:
    """`with Canary(cluster).singing() as canary:`; each stream ("song") must have the same tokens as the first one."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._url = f"{cluster.url}/v1/completions"
        self._stopping = threading.Event()
        self.num_songs = 0
        self.longest_gap_s = 0.0  # longest time between two lines of a stream
        self.faults: list[str] = []
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            answer = client.post(self._url, json={**BODY, "return_token_ids": True})
            self._expected: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
        assert len(self._expected) == BODY["max_tokens"]

    @contextmanager
    def singing(self) -> Iterator[Canary]:
        thread = threading.Thread(target=self._sing, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "the canary's thread did not end"
        assert self.faults == [], "\n".join(self.faults)
        assert self.num_songs > 0

    def _sing(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client:
            while not self._stopping.is_set() or not self.num_songs:
                try:
                    found = self._song(client)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    self.faults.append(f"song {self.num_songs}: {error!r}")
                    return
                if found != self._expected:
                    self.faults.append(f"song {self.num_songs}: {found} and not {self._expected}")
                self.num_songs += 1

    def _song(self, client: httpx.Client) -> list[int]:
        tokens: list[int] = []
        with client.stream("POST", self._url, json={**BODY, "stream": True, "return_token_ids": True}) as answer:
            lines, at_s = [], time.monotonic()
            for line in answer.raise_for_status().iter_lines():
                self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - at_s)
                at_s = time.monotonic()
                if line:
                    lines.append(line.removeprefix("data: "))
        if lines.pop() != "[DONE]":
            raise ValueError("the stream ended without [DONE]")
        for line in lines:
            for choice in json.loads(line)["choices"]:
                tokens += choice.get("token_ids") or []
        return tokens
