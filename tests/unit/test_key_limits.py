"""Limits of API keys at the public port, over a real router: admission, reported limits, and refunds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster import wire
from pd_cluster.api.middleware.cors import EXPOSED_HEADERS
from pd_cluster.api.middleware.metering import RATE_HEADERS
from pd_cluster.extras.key_file.shared_rate_limits import tag_of
from pd_cluster.types import LegEnd
from tests.support.keyed_port import COMPLETION, PROMPT, SECOND_NS, Port, key_of
from tests.support.public_port import Answer
from tests.support.router_world import token

Make = Callable[..., Port]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda *keys, **more: Port(tmp_path, keys, **more)


def rates(answer: Answer, limit: str) -> tuple[str, str, str]:
    name = "x-ratelimit-{}-" + limit
    found = tuple(answer.headers[name.format(what)] for what in ("limit", "remaining", "reset"))
    return found[0], found[1], found[2]


# ---- requests


async def test_requests_are_counted_before_their_bodies_are_read(make: Make) -> None:
    port = make(key_of("k", requests_per_minute=2), key_of("other", requests_per_minute=2, tenant="b"))
    for _ in range(5):
        models = await port.ask("k", "GET", "/v1/models")
        assert models.status == 200
        assert not set(RATE_HEADERS) & set(models.headers)
        assert (await port.ask("k", "GET", "/health")).status in (200, 503)
    for left, reset in (("1", "30s"), ("0", "1m0s")):
        answer = await port.ask("k", "POST", "/tokenize", prompt="a")
        assert (answer.status, rates(answer, "requests")) == (200, ("2", left, reset))
        assert "x-ratelimit-limit-tokens" not in answer.headers
    for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"):
        answer = await port.ask("k", "POST", path, prompt="a")
        assert (answer.status, answer.headers["retry-after"], answer.num_received) == (429, "30", 0)
        assert rates(answer, "requests") == ("2", "0", "1m0s")
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await port.ask("other", "POST", "/tokenize", prompt="a")).status == 200
    for wait_s, status in ((29, 429), (1, 200)):
        port.now_ns += wait_s * SECOND_NS
        assert (await port.ask("k", "POST", "/tokenize", prompt="a")).status == status
    assert port.counted("limited") == port.counted("limited_by_requests") == {"team": 5}
    assert port.counted("finished") == {"team": 3, "b": 1}
    assert set(RATE_HEADERS) < set(EXPOSED_HEADERS)


async def test_a_key_without_limits_has_no_headers_of_limits(make: Make) -> None:
    port = make(key_of("k"), api_keys=("flag",))
    for key in ("k", "flag"):
        answer = await port.ask(key, "POST", "/tokenize", prompt="a")
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    assert port.counted("finished") == {"team": 1, "other": 1}


# ---- tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_finished_request_did_not_use_goes_back(make: Make, stream: bool) -> None:
    port = make(key_of("k", tokens_per_minute=60, requests_per_minute=9))
    asking = asyncio.ensure_future(port.ask("k", "POST", "/v1/completions", **COMPLETION, stream=stream, n=2))
    request_id = await port.submitted()
    assert port.left("k") == (8, 60 - 3 - 2 * 10), "expected both sequences at their maximum length"
    port.answer(request_id, 4)
    port.answer(request_id, 2, index=1)
    answer = await asking
    assert answer.status == 200
    remaining = "37" if stream else "51"  # a stream's headers precede its usage
    assert rates(answer, "tokens") == ("60", remaining, "23s" if stream else "9s")
    assert rates(answer, "requests") == ("9", "8", "6.667s")
    assert port.left("k") == (8, 60 - 3 - 4 - 2)
    assert port.counted("finished") == {"team": 1}
    assert (port.counted("prompt_tokens"), port.counted("generation_tokens")) == ({"team": 3}, {"team": 6})
    stats = port.world.router.stats.snapshot().counters
    assert (stats["prompt_tokens"], stats["generation_tokens"]) == (3, 6), "expected the sum of all requests' usage"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("end", "status", "outcome", "num_used"),
    [
        ("client gone", 0, "aborted", 3 + 2),
        ("failed", 500, "failed", 3 + 2),
        ("refused by an engine", 400, "refused", 3),
        ("nobody there", 503, "refused", 0),
    ],
)
async def test_however_it_ends(make: Make, end: str, status: int, outcome: str, num_used: int, stream: bool) -> None:
    port = make(key_of("k", tokens_per_minute=100))
    if end == "nobody there":
        for instance in port.world.instances:
            instance.state = "unreachable"
    fields = {**COMPLETION, "stream": stream, "ignore_eos": True}
    asking = asyncio.ensure_future(port.ask("k", "POST", "/v1/completions", **fields))
    if end != "nobody there":
        request_id = await port.submitted()
        assert port.left("k") == (0, 87)
        (prefill, _), (decode, _) = port.world.mailbox.of(wire.Submit)
        if end == "refused by an engine":
            refusal = LegEnd(request_id, 0, error="prompt: no", is_refusal=True)
            port.world.outputs(prefill, ended=refusal)
        else:
            port.world.outputs(prefill, token(request_id, 0))
            port.world.outputs(decode, token(request_id, 1))
            for _ in range(20):
                await asyncio.sleep(0)
        if end == "failed":
            port.world.router.end_all()
        elif end == "client gone":
            asking.cancel()
    if end == "client gone":
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert port.world.mailbox.of(wire.Abort)
    else:
        answer = await asking
        is_in_band = stream and end == "failed"
        assert answer.status == (200 if is_in_band else status), answer.body
        if not is_in_band:
            assert answer.headers["x-ratelimit-remaining-tokens"] == str(100 - num_used)
    num_untold = 8 if end == "client gone" and not stream else 0  # upper bound of the tokens computed meanwhile
    assert port.left("k") == (0, 100 - num_used - num_untold)
    assert port.counted(outcome) == {"team": 1}
    assert port.world.router.num_streams == 0


async def test_a_request_larger_than_the_bucket_is_told_so(make: Make) -> None:
    port = make(key_of("k", tokens_per_minute=50))
    beams = {"use_beam_search": True, "best_of": 5, "n": 1, "temperature": 0}
    for fields in ({"max_tokens": 48}, {"n": 5}, {"prompt": [PROMPT] * 4}, {"best_of": 6, "n": 1}, beams):
        answer = await port.ask("k", "POST", "/v1/completions", **{**COMPLETION, **fields})
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "larger_than_rate_limit", "max_tokens")
        assert "retry-after" not in answer.headers
        assert rates(answer, "tokens") == ("50", "50", "0s")
    assert "are 53 tokens" in error["message"], "all beams must count"
    assert not port.world.mailbox.sent


async def test_prompts_of_a_list_are_let_in_together_or_not_at_all(make: Make) -> None:
    port = make(key_of("k", tokens_per_minute=60, requests_per_minute=60))
    asking = asyncio.ensure_future(port.ask("k", "POST", "/v1/completions", **{**COMPLETION, "prompt": [PROMPT] * 3}))
    await port.submitted(4)
    assert port.left("k") == (59, 60 - 3 * 13)
    answer = await port.ask("k", "POST", "/v1/completions", **{**COMPLETION, "prompt": [PROMPT] * 2})
    assert (answer.status, answer.headers["retry-after"]) == (429, "5")
    assert "60 tokens a minute, and 21 left; prompts and max_tokens" in answer.json()["error"]["message"]
    assert len(port.world.mailbox.of(wire.Submit)) == 6, "no instance may get it"
    for request_id in dict.fromkeys(body.request_id for _, body in port.world.mailbox.of(wire.Submit)):
        port.answer(request_id, 1)
    assert (await asking).status == 200
    assert port.left("k") == (58, 60 - 3 * 4)
    assert port.counted("limited_by_tokens") == {"team": 1}


async def test_who_lacks_tokens_waits_for_a_request_too(make: Make) -> None:
    """A request refused for tokens counts as a request, so an immediate retry waits for the request limit, too."""
    port = make(key_of("k", tokens_per_minute=60, requests_per_minute=1))
    port.store.memory.take(port.store.keys.slots[0], tag_of(port.store.keys.keys[0].digest), 0, 55)
    answer = await port.ask("k", "POST", "/v1/completions", **COMPLETION)
    assert (answer.status, answer.headers["retry-after"]) == (429, "60"), "tokens alone would suffice after 8 s"
    assert rates(answer, "tokens") == ("60", "5", "55s")


@pytest.mark.parametrize("seed", range(2))
async def test_after_retry_after_the_same_request_is_let_in(make: Make, seed: int) -> None:
    """With a single client, whichever limit refused the request, it is admitted after Retry-After.

    Requests that wait for instances are cancelled at once.
    """
    rng = random.Random(seed)
    port = make(key_of("k", tokens_per_minute=rng.randrange(30, 200), requests_per_minute=rng.randrange(1, 9)))
    for instance in port.world.instances:
        instance.state = "unreachable"  # 503: admitted, and all its tokens are refunded
    memory, key = port.store.memory, port.store.keys.keys[0]
    num_refused = 0
    for _ in range(60):
        port.now_ns += rng.randrange(3 * SECOND_NS)
        memory.take(port.store.keys.slots[0], tag_of(key.digest), 0, rng.randrange(20))
        fields = {**COMPLETION, "max_tokens": rng.randrange(1, 27)}
        answer = await port.ask("k", "POST", "/v1/completions", **fields)
        if answer.status == 429:
            num_refused += 1
            port.now_ns += int(answer.headers["retry-after"]) * SECOND_NS
            answer = await port.ask("k", "POST", "/v1/completions", **fields)
        assert answer.status == 503, answer.body
    assert num_refused > 5


async def test_the_plain_api_has_the_same_limits(make: Make) -> None:
    port = make(key_of("k", tokens_per_minute=20), key_of("no", models=("gone",)), openai=False)
    fields = {"prompt": "abc", "max_tokens": 10, "ignore_eos": True}
    asking = asyncio.ensure_future(port.ask("k", "POST", "/generate", **fields))
    request_id = await port.submitted()
    (num_left,) = {20 - 10 - len(body.order.prompt_token_ids) for _, body in port.world.mailbox.of(wire.Submit)}
    assert port.left("k") == (0, num_left)
    assert (await port.ask("k", "POST", "/generate", **fields)).status == 429
    port.answer(request_id, 2)
    answer = await asking
    assert (answer.status, answer.headers["x-ratelimit-remaining-tokens"]) == (200, str(num_left + 8))
    assert (await port.ask("no", "POST", "/generate", **fields)).status == 404


async def test_a_beam_search_is_charged_for_all_its_beams(make: Make) -> None:
    port = make(key_of("k", tokens_per_minute=100))
    beams = {"use_beam_search": True, "best_of": 4, "n": 1, "temperature": 0}
    asking = asyncio.ensure_future(port.ask("k", "POST", "/v1/completions", **{**COMPLETION, **beams}))
    request_id = await port.submitted()
    assert port.left("k") == (0, 57)
    for index in range(port.world.mailbox.of(wire.Submit)[-1][1].order.sampling.n):
        port.answer(request_id, 5 - index, index)
    assert (await asking).status == 200
    assert port.left("k") == (0, 100 - 3 - 4 * 5)
    asking = asyncio.ensure_future(port.ask("k", "POST", "/v1/completions", **{**COMPLETION, **beams}))
    await port.submitted(2)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert port.left("k") == (0, 77 - 43), "with unknown progress all tokens must count"
