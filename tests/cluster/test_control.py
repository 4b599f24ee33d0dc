"""Commands to a cluster with two API processes: emptying caches, ending or pausing requests, showing settings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import LiveCluster, together
from tests.support.engines import assert_all_same

Checkpoints = Callable[..., Path]
LONG = {"prompt": [5] * 40, "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
ENDLESS = {**LONG, "max_tokens": 16_000}  # for requests that a command ends


class Steered(LiveCluster):
    def command(self, path: str, **fields: Any) -> Any:
        answer = self.ask_admin("POST", path, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def load(self) -> int:
        return int(self.client.get(f"{self.url}/load").json()["server_load"])

    def num_cached(self) -> list[int]:
        return [instance["num_cached_blocks"] for instance in self.instances()]


@pytest.fixture(scope="module")
def steered(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steered]:
    """Yields a cluster with two API processes; tests/api/test_one_process.py tests a part with one."""
    flags = ["--max-model-len=16384", "--num-blocks=3200", "--api-workers=2", "--api-key=sk-hidden"]
    folder = tmp_path_factory.mktemp("steered")
    model = checkpoint("llama", max_position_embeddings=16384)
    with Steered(folder, model, 1, 1, flags) as running:
        running.client.headers["Authorization"] = "Bearer sk-hidden"
        yield running
        running.assert_home()


class Background:
    """Sends requests on separate connections, and records their results."""

    def __init__(self, cluster: LiveCluster, num: int, **body: Any) -> None:
        self.answers: list[httpx.Response] = []
        self._url, self._body = f"{cluster.url}/v1/completions", body
        self._client = httpx.Client(timeout=90, trust_env=False)  # made once, so that requests begin together
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(num)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        headers = {"Authorization": "Bearer sk-hidden"}
        answer = self._client.post(self._url, json=self._body, headers=headers)
        self.answers.append(answer)

    def end(self) -> list[httpx.Response]:
        for thread in self._threads:
            thread.join(90)
        self._client.close()
        assert len(self.answers) == len(self._threads), "requests hang"
        return self.answers


def running(cluster: LiveCluster) -> int:
    """Counts decoding sequences at decode instances only, since prefill's older load may still include them."""
    return sum(int(each["num_running"]) for each in cluster.instances() if each["role"] == "decode")


def test_an_empty_cache_is_computed_again(steered: Steered) -> None:
    """After the reset the same prompt gives the same tokens, with nothing cached in instances or scheduler views."""
    prompt = [7] * 100
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}

    def ask() -> tuple[list[int], int]:
        answer = steered.client.post(f"{steered.url}/v1/completions", json=body).json()
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    first = ask()
    assert ask() == (first[0], 96)
    assert steered.command("/reset_prefix_cache?reset_external=true") == {"success": True}
    steered.wait_until("nothing is cached", lambda: steered.num_cached() == [0, 0])
    assert ask() == (first[0], 0)
    assert ask() == (first[0], 96)
    steered.assert_home()


def test_caches_are_emptied_while_requests_run(steered: Steered, checkpoint: Checkpoints) -> None:
    model = checkpoint("llama", max_position_embeddings=16384)
    prompts = [[at + 3] * 50 for at in range(6)]
    asks = [partial(steered.complete, prompt, 120, ignore_eos=True) for prompt in prompts]
    reset: Callable[[], Any] = partial(steered.command, "/reset_prefix_cache")
    found: list[Any] = together([each for ask in asks for each in (ask, reset)], concurrency=4)
    assert_all_same(model, prompts, found[::2], 120)
    steered.assert_home()


@pytest.mark.parametrize("names", [True, False])
def test_requests_end_when_the_operator_says_so(steered: Steered, names: bool) -> None:
    others = Background(steered, 1, **(LONG if names else ENDLESS))
    ended = Background(steered, 2, **ENDLESS, request_id="unwanted")
    steered.wait_until("they run", lambda: running(steered) >= 3 - len(others.answers))
    ids = {"json": {"request_ids": ["cmpl-unwanted", "cmpl-unknown"]}} if names else {}
    path = "/inference/v1/abort_requests" if names else "/abort_requests"
    assert steered.command(path, **ids) == {"status": "aborted"}
    for answer in ended.end():
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "aborted")
    (other,) = others.end()
    assert other.status_code == (200 if names else 410)
    steered.assert_home()


def test_new_requests_wait_while_it_is_paused(steered: Steered) -> None:
    running_ones = Background(steered, 2, **{**LONG, "max_tokens": 1200})
    steered.wait_until("they run", lambda: running(steered) >= 2)
    assert steered.command("/pause?mode=wait&clear_cache=true") == {"status": "paused"}
    assert [answer.status_code for answer in running_ones.end()] == [200, 200]
    assert steered.ask_admin("GET", "/is_paused").json() == {"is_paused": True}
    steered.wait_until("nothing is cached", lambda: steered.num_cached() == [0, 0])
    steps = [instance["num_steps"] for instance in steered.instances()]
    waiting = Background(steered, 4, prompt=[5, 6], max_tokens=2)
    steered.wait_until("they are there", lambda: steered.load() == 4)
    assert not waiting.answers
    assert [instance["num_steps"] for instance in steered.instances()] == steps
    assert steered.command("/resume") == {"status": "resumed"}
    assert [answer.status_code for answer in waiting.end()] == [200] * 4
    assert steered.ask_admin("GET", "/is_paused").json() == {"is_paused": False}
    steered.assert_home()


def test_running_requests_end_when_it_is_paused(steered: Steered) -> None:
    running_ones = Background(steered, 2, **ENDLESS)
    steered.wait_until("they run", lambda: running(steered) >= 2)
    steered.command("/pause")
    assert [answer.status_code for answer in running_ones.end()] == [410, 410]
    steered.command("/resume")
    assert len(steered.complete([5], 2, ignore_eos=True)) == 2


def test_a_sleep_keeps_what_runs(steered: Steered) -> None:
    """Running requests continue after a sleep; test_sleep.py has more tests."""
    body = {**LONG, "max_tokens": 800, "return_token_ids": True}
    (alone,) = Background(steered, 1, **body).end()
    kept = Background(steered, 2, **body)
    steered.wait_until("they run", lambda: running(steered) >= 2)
    assert steered.command("/sleep?level=2&mode=keep") == {"status": "asleep", "level": 2}
    assert steered.ask_admin("GET", "/is_sleeping").json() == {"is_sleeping": True, "level": 2}
    refused = steered.client.post(f"{steered.url}/v1/completions", json={"prompt": [5], "max_tokens": 1})
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
    assert "the cluster is asleep" in refused.text
    assert steered.health()[0] == 503
    assert not kept.answers
    assert steered.command("/wake_up") == {"status": "awake"}
    texts = [answer.json()["choices"][0]["token_ids"] for answer in kept.end()]
    assert texts == [alone.json()["choices"][0]["token_ids"]] * 2
    steered.assert_home()


@pytest.mark.parametrize(
    ("path", "status", "what"),
    [
        ("/pause?mode=later", 400, "mode: 'later'"),
        ("/pause?level=1", 400, "'level': not known"),
    ],
)
def test_commands_that_cannot_be_followed(steered: Steered, path: str, status: int, what: str) -> None:
    answer = steered.ask_admin("POST", path)
    assert (answer.status_code, answer.json()["error"]["message"].startswith(what)) == (status, True), answer.text
    assert steered.ask_admin("GET", "/is_paused").json() == {"is_paused": False}
    assert steered.ask_admin("POST", path, token="wrong").status_code == 401
    shown = steered.ask_admin("GET", "/server_info")
    assert (shown.json()["settings"]["num_blocks"], "sk-hidden" in shown.text) == (3200, False)
