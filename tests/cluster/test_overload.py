"""Beyond a cluster's capacity, answers are exact, excess requests are refused, and a guest is served beside a hog."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.cluster import LiveCluster, together
from tests.support.engines import assert_same

HOG, GUEST = "sk-hog", "sk-guest"
METRICS = "sk-metrics"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
NUM_OUTPUT = 48
NUM_ASKED = 120
DRAWN = {"temperature": 1, "seed": 1}


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields one prefill and one decode instance, with few places and short waits."""
    flags = ["--max-num-seqs=4", "--max-queue-time=0.5", "--max-model-len=160", f"--metrics-key={METRICS}"]
    flags += [f"--api-key={HOG}", f"--api-key={GUEST}"]
    with LiveCluster(tmp_path_factory.mktemp("overload"), model, 1, 1, flags) as running:
        running.client = httpx.Client(timeout=60, trust_env=False, limits=httpx.Limits(max_connections=None))
        yield running
        running.assert_home()


def ask(cluster: LiveCluster, key: str, **more: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": NUM_OUTPUT, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {key}"}
    return cluster.client.post(f"{cluster.url}/v1/completions", json={**body, **more}, headers=headers)


def flood(cluster: LiveCluster, **more: Any) -> list[httpx.Response]:
    """Sends all of the hog's requests at once."""
    return together([partial(ask, cluster, HOG, **more)] * NUM_ASKED)


def test_what_is_answered_is_exact_and_the_rest_is_told_when_to_come_back(cluster: LiveCluster, model: Path) -> None:
    answers = flood(cluster)
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(served) + len(refused) == NUM_ASKED
    assert served
    assert refused
    choices = {tuple(choice["token_ids"]) for answer in served for choice in answer.json()["choices"]}
    assert len(choices) == 1
    assert_same(model, PROMPT, list(choices.pop()), NUM_OUTPUT)
    for answer in refused:
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "overloaded"
    headers = {"Authorization": f"Bearer {METRICS}"}

    def num_told() -> float:
        lines = cluster.client.get(f"{cluster.url}/metrics", headers=headers).text.splitlines()
        (line,) = [each for each in lines if each.startswith("pd_cluster:requests_refused_total") and "queue" in each]
        return float(line.split()[-1])

    cluster.wait_until("they are counted", lambda: num_told() == len(refused))


def test_a_guest_is_served_beside_a_hog(cluster: LiveCluster) -> None:
    """Uses openai's client without retries."""
    fields: Any = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    with (
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=GUEST, max_retries=0, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        hogs = pool.submit(flood, cluster, n=4, **DRAWN)
        for _ in range(8):
            assert len(client.completions.create(**fields).choices) == 1
        assert {answer.status_code for answer in hogs.result()} == {200, 429}


def test_retry_after_is_true(cluster: LiveCluster) -> None:
    """Without other clients, a request repeated after Retry-After is admitted."""
    refused = [answer for answer in flood(cluster, n=4, **DRAWN) if answer.status_code == 429]
    assert refused
    time.sleep(max(int(answer.headers["retry-after"]) for answer in refused))  # as clients do
    assert ask(cluster, HOG, n=4, **DRAWN).status_code == 200
