"""Drafts in clusters of real processes: answers are the same through deaths, takeovers and role changes.

Slow tests cover gloo, ranks and deaths: `pytest -m slow tests/cluster/test_drafts.py`, two minutes.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.cluster.test_death import Streaming
from tests.support.cluster import LiveCluster, together
from tests.support.engines import random_prompt
from tests.support.resuming import EventReader, id_of, resuming, token_ids_of

Checkpoints = Callable[..., Path]
FLAGS = ["--num-blocks=512", "--no-enable-prefix-caching"]
NGRAM = ['--speculative-config={"method": "ngram"}']
OTHER = ["--spec-method=suffix", "--spec-tokens=5"]
LETTERS = list(range(65, 91))  # tokens whose text tokenizes to the same tokens
PLAIN = {"speculative": False}
LONG = 2000
ASKS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.3, "seed": 15, "ignore_eos": True},
    {"temperature": 0, "ignore_eos": True, "repetition_penalty": 0.8, "allowed_token_ids": LETTERS},
)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", max_position_embeddings=4096)


def test_predictions_and_copies(model: Path, tmp_path: Path) -> None:
    """Over shared memory and openai's client: tokens, logprobs and text are equal; `usage` counts predicted tokens."""
    with LiveCluster(tmp_path, model, arguments=[*FLAGS, *NGRAM]) as cluster:
        client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)
        messages: Any = [{"role": "user", "content": "Write it again."}]
        settings: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 120}
        more = {"allowed_token_ids": LETTERS, "ignore_eos": True}

        def answer(extra: dict[str, Any], **fields: Any) -> Any:
            return client.chat.completions.create(
                **settings, logprobs=True, top_logprobs=2, extra_body={**more, **extra}, **fields
            )

        plain = answer(PLAIN)
        text = plain.choices[0].message.content
        expected = text[:50] + "!" + text[51:]

        def mostly_predicted() -> bool:  # on a busy machine, measured costs may prevent drafts for a while
            predicted = answer({}, prediction={"type": "content", "content": expected})
            assert predicted.choices == plain.choices
            assert predicted.usage.completion_tokens == plain.usage.completion_tokens == 120
            details = predicted.usage.completion_tokens_details
            return details.accepted_prediction_tokens > 60 and details.rejected_prediction_tokens >= 1

        cluster.wait_until("most tokens were drafts", mostly_predicted)
        for fields in ASKS:
            ask = {"prompt": [7, 8, 9], "max_tokens": 200, "return_token_ids": True, "logprobs": 1, **fields}
            choices = [cluster.ask("/v1/completions", {**ask, **own})["choices"] for own in (PLAIN, {})]
            assert choices[0] == choices[1]
        cluster.assert_home()


# ---- slow


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a decode instance of two ranks over shared memory, and one with another drafter over gloo."""
    own = {"decode-0": NGRAM, "decode-1": [*OTHER, "--kv-transport=dist"], "prefill-0": NGRAM}
    folder = tmp_path_factory.mktemp("drafts")
    with LiveCluster(
        folder, model, num_decode=2, arguments=FLAGS, member_arguments=own, tp_sizes={"decode-0": 2}
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(cluster: LiveCluster) -> list[list[int]]:
    """Returns the long answers to ASKS without drafts."""
    return together([partial(cluster.complete, [5, 6, 7], LONG, **PLAIN, **fields) for fields in ASKS])


def streams(cluster: LiveCluster) -> list[Streaming]:
    return [Streaming(cluster.url, LONG, prompt=[5, 6, 7], **fields) for fields in ASKS]


def begun(stream: Streaming) -> list[int]:
    found: list[int] = []
    while len(found) < 50:
        found += json.loads(stream.next()[1])["choices"][0]["token_ids"]
    return found


@pytest.mark.slow
def test_over_both_transports_and_ranks(cluster: LiveCluster) -> None:
    """Sends many short and long requests at once, so that prompts, drafts and single tokens share steps."""
    rng = random.Random(3)
    asks = [
        {"prompt": (random_prompt(rng, 1 + at) * 3)[:60], "max_tokens": 60 + 7 * at, **ASKS[at % len(ASKS)]}
        for at in range(12)
    ]
    plain, drafted = (together([partial(cluster.complete, **ask, **own) for ask in asks]) for own in (PLAIN, {}))
    assert drafted == plain
    cluster.await_received("decode-0", "decode-1")
    cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", ["decode-0", "decode-1", "prefill-0"])
def test_kill_9_in_mid_answer(cluster: LiveCluster, expected: list[list[int]], victim: str) -> None:
    """Answers continue at an instance with another drafter; the dead one restarts with a different drafter."""
    running = streams(cluster)
    first = [begun(stream) for stream in running]
    assert not all(stream.has_ended for stream in running)
    cluster.kill(victim)
    for tokens, stream, whole in zip(first, running, expected, strict=True):
        assert tokens + stream.to_the_end()[0] == whole
    own = dict(cluster.member_arguments)
    cluster.member_arguments = {**own, victim: OTHER if victim == "decode-0" else NGRAM}
    cluster.restart(victim)
    found = together([partial(cluster.complete, [5, 6, 7], LONG, **fields) for fields in ASKS])
    assert found == expected
    cluster.member_arguments = own
    cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_role_that_changes_in_mid_answer(cluster: LiveCluster, expected: list[list[int]]) -> None:
    running = streams(cluster)
    first = [begun(stream) for stream in running]
    assert not all(stream.has_ended for stream in running)
    cluster.order("/instances/decode-1/role", role="prefill")
    again = together([partial(cluster.complete, [5, 6, 7], LONG, **fields) for fields in ASKS])
    for tokens, stream, whole in zip(first, running, expected, strict=True):
        assert tokens + stream.to_the_end()[0] == whole
    assert again == expected
    cluster.order("/instances/decode-1/role", role="decode")
    cluster.await_ready()
    cluster.assert_home()


def decoding(cluster: LiveCluster) -> list[str]:
    return [i["instance_id"] for i in cluster.instances() if i["role"] == "decode" and i["num_running"]]


def goes_on(cluster: LiveCluster, dead: str) -> bool:
    return bool(set(decoding(cluster)) - {dead})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_streams_that_are_resumed(model: Path, tmp_path: Path) -> None:
    """Streams continue at a decode instance with another drafter after kill -9, then at another scheduler."""
    own = {"decode-0": NGRAM, "decode-1": OTHER}
    with LiveCluster(
        tmp_path, model, 1, 2, [*FLAGS, "--resume-window=60", "--dead-after=2"], num_schedulers=2, member_arguments=own
    ) as cluster:
        first, second = cluster.launch.urls
        for fields in ASKS:
            ask = {"prompt": [5, 6, 7], "max_tokens": LONG, "return_token_ids": True, **fields}
            whole = cluster.ask("/v1/completions", {**ask, **PLAIN})["choices"][0]["token_ids"]
            with EventReader(first, ask) as reader:
                events = reader.take(10)
                cluster.wait_until("it decodes", lambda: len(decoding(cluster)) == 1)
                (name,) = decoding(cluster)
                cluster.kill_rank(name)
                cluster.wait_until("another one goes on", partial(goes_on, cluster, name))
                events += reader.take(10)
                cluster.kill("scheduler-0")
                cluster.await_exit("scheduler-0")
                with contextlib.suppress(httpx.HTTPError):
                    events += list(reader)  # events in transit
            with resuming(second, id_of(events[-1]), patience_s=30.0) as reader:
                assert reader.answer.status_code == 200, (reader.answer.text, events[-1])
                events += list(reader)
            assert token_ids_of(events) == whole
            for dead in ("scheduler-0", name):
                cluster.await_exit(dead)
                cluster.start_member(dead)
            cluster.await_ready()
        cluster.assert_home()
