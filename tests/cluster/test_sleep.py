"""A whole cluster sleeps and wakes: memory is released, tokens stay the same, and no request hangs."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.test_control import LONG, Background, Steered, running
from tests.cluster.test_death import Streaming
from tests.support.adapters import make_adapter
from tests.support.cluster import children_of
from tests.support.engines import assert_all_same, random_prompt

Checkpoints = Callable[..., Path]
pytestmark = pytest.mark.slow  # test_control.py has a quick version
MIB = 1 << 20
WEIGHTS_MIB = 71  # of the layers of `model`, in float32
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
}
RANDOM = random.Random(3)
PROMPTS = [random_prompt(RANDOM, num_tokens) for num_tokens in (1, 20, 70)]
LONGEST = [random_prompt(RANDOM, 500) for _ in range(3)]
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", **WIDE)


@pytest.fixture(scope="module")
def sleeper(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steered]:
    """Yields a two-rank prefill instance, a decode instance, two API processes and an adapter."""
    folder = tmp_path_factory.mktemp("sleeper")
    adapter = make_adapter(folder / "french", model, 1, strength=0.05)
    flags = ["--max-model-len=2048", "--num-blocks=640", "--api-workers=2", "--api-key=sk-hidden", "--enable-lora"]
    flags += [f"--lora-modules=french={adapter}", "--swap-space=0.1", "--enable-sleep-mode"]
    with Steered(folder, model, 1, 1, flags, tp_sizes={"prefill-0": 2}) as running:
        running.client.headers["Authorization"] = "Bearer sk-hidden"
        yield running


def told(cluster: Steered) -> list[list[int]]:
    """Returns the tokens given by the model and by the adapter."""
    return [cluster.complete(prompt, NUM_TOKENS, model=name) for prompt in PROMPTS for name in ("tiny", "french")]


def resident_mib(cluster: Steered) -> dict[int, dict[str, float]]:
    """Returns each rank's private and shared resident memory."""
    found = {}
    for name in ("prefill-0", "decode-0"):
        for pid in cluster.rank_pids(name):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
            found[pid] = {kind: int(sizes[f"Rss{kind}"]) / 1024 for kind in ("Anon", "Shmem")}
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_returned_and_the_same_tokens_come_afterwards(sleeper: Steered, model: Path, level: int) -> None:
    before = told(sleeper)
    for prompt in LONGEST:
        sleeper.complete(prompt, 2)
    used = resident_mib(sleeper)
    pool_mib = sum(each["Shmem"] for each in used.values())
    assert pool_mib > 20, used
    assert sleeper.command(f"/sleep?level={level}") == {"status": "asleep", "level": level}
    assert sleeper.ask_admin("GET", "/is_sleeping").json() == {"is_sleeping": True, "level": level}
    left = resident_mib(sleeper)
    assert sum(each["Shmem"] for each in left.values()) < 0.1 * pool_mib, (used, left)
    if level == 2:  # both instances have released the weights
        returned = sum(used[pid]["Anon"] - left[pid]["Anon"] for pid in used)
        assert returned > 1.8 * WEIGHTS_MIB, (used, left)
    for instance in sleeper.instances():
        assert (instance["state"], instance["sleep_level"], instance["num_cached_blocks"]) == ("asleep", level, 0)
    assert sleeper.health()[0] == 503
    sleeper.wait_until("the API processes know", lambda: "asleep" in str(sleeper.health()[1]))
    assert sleeper.command("/wake_up?tags=weights&tags=kv_cache") == {"status": "awake"}
    assert sleeper.ask_admin("GET", "/is_sleeping").json() == {"is_sleeping": False, "level": 0}
    after = told(sleeper)
    assert after == before
    assert_all_same(model, PROMPTS, after[::2], NUM_TOKENS)
    assert after[1::2] != after[::2]
    sleeper.assert_home()


def test_requests_are_refused_while_it_sleeps_and_kept_ones_go_on(sleeper: Steered) -> None:
    headers = {"Authorization": "Bearer sk-hidden"}
    alone = Streaming(sleeper.url, 300, headers=headers)
    expected = tokens_of(alone)
    streams = [Streaming(sleeper.url, 300, headers=headers) for _ in range(3)]
    first = [tokens_in(stream.next()[1]) for stream in streams]
    assert sleeper.command("/sleep?level=2&mode=keep") == {"status": "asleep", "level": 2}
    for path, body in (
        ("/v1/completions", {"prompt": [5], "max_tokens": 1}),
        ("/v1/embeddings", {"input": [5]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = sleeper.client.post(f"{sleeper.url}{path}", json=body)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10"), answer.text
        assert "the cluster is asleep" in answer.text
    assert sleeper.ask_admin("POST", "/resume").status_code == 409
    assert not any(stream.has_ended for stream in streams)
    assert sleeper.command("/sleep?level=1") == {"status": "asleep", "level": 1}  # the weights come back
    sleeper.command("/wake_up")
    for begun, stream in zip(first, streams, strict=True):
        assert begun + tokens_of(stream) == expected
    sleeper.assert_home()


def test_requests_that_are_kept_can_be_ended(sleeper: Steered) -> None:
    unwanted = Background(sleeper, 1, **LONG, request_id="unwanted")
    others = Background(sleeper, 1, **{**LONG, "max_tokens": 200})
    sleeper.wait_until("they run", lambda: running(sleeper) >= 2)
    sleeper.command("/pause?mode=keep&clear_cache=false")
    sleeper.assert_home()
    waiting = Background(sleeper, 1, prompt=[5, 6], max_tokens=2)
    sleeper.wait_until("it is there", lambda: sleeper.load() == 3)
    sleeper.command("/abort_requests", json={"request_ids": ["cmpl-unwanted"]})
    assert [answer.status_code for answer in unwanted.end()] == [410]
    assert not others.answers
    sleeper.command("/resume")
    assert [answer.status_code for answer in (*others.end(), *waiting.end())] == [200, 200]


def test_an_instance_that_dies_asleep_comes_back_asleep(sleeper: Steered) -> None:
    before = told(sleeper)
    sleeper.command("/sleep?level=2")
    epoch = sleeper.instance("decode-0")["epoch"]
    sleeper.kill("decode-0")
    sleeper.await_exit("decode-0")
    sleeper.start_member("decode-0")

    def is_back() -> bool:
        found = sleeper.instance("decode-0")
        return found["state"] == "asleep" and found["epoch"] != epoch

    sleeper.wait_until("another life of it sleeps", is_back, 90)
    assert sleeper.client.post(f"{sleeper.url}/v1/completions", json={"prompt": [5]}).status_code == 503
    sleeper.command("/wake_up")
    sleeper.await_ready()
    assert told(sleeper) == before


def test_a_scheduler_that_starts_again_wakes_all_up(sleeper: Steered) -> None:
    before = told(sleeper)
    sleeper.command("/sleep?level=2")
    children = children_of(sleeper.processes["scheduler"].pid)
    assert children
    sleeper.kill("scheduler", signal.SIGKILL)
    sleeper.restart("scheduler")
    assert told(sleeper) == before
    assert sleeper.ask_admin("GET", "/is_sleeping").json()["is_sleeping"] is False
    sleeper.assert_home()


@pytest.mark.parametrize(
    ("path", "what"), [("/sleep?level=3", "level: '3'"), ("/wake_up?tags=everything", "tags: 'everything'")]
)
def test_commands_that_cannot_be_followed(sleeper: Steered, path: str, what: str) -> None:
    answer = sleeper.ask_admin("POST", path)
    assert (answer.status_code, answer.json()["error"]["message"].startswith(what)) == (400, True), answer.text
    assert sleeper.ask_admin("POST", path, token="wrong").status_code == 401
    assert httpx.post(f"{sleeper.url}/sleep", trust_env=False).status_code in (401, 404)
    assert sleeper.ask_admin("GET", "/is_sleeping").json()["is_sleeping"] is False


def tokens_in(event: str) -> list[int]:
    if event == "[DONE]":
        return []
    found: dict[str, Any] = json.loads(event)
    assert "error" not in found, event
    return [token for choice in found["choices"] for token in choice["token_ids"]]


def tokens_of(stream: Streaming) -> list[int]:
    tokens: list[int] = []
    while (event := stream.next()[1]) != "[DONE]":
        tokens += tokens_in(event)
    return tokens
