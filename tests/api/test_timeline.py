"""The admin port's timeline of a request served by the running cluster."""

from __future__ import annotations

import itertools
from typing import Any

import openai

from tests.support.cluster import LiveCluster

TOLERANCE_MS = 5.0  # mapping workers' clocks to the scheduler's is limited by message delays


def timeline_of(cluster: LiveCluster, request_id: str) -> dict[str, Any]:
    """Returns the timeline once both legs have reported their end."""
    found: dict[str, Any] = {}

    def is_complete() -> bool:
        answer = cluster.client.get(f"{cluster.admin_url}/requests/{request_id}/timeline")
        assert answer.status_code == 200, answer.text
        found.update(answer.json())
        ended = {event["who"] for event in found["events"] if event["what"] == "finished"}
        return ended == {"scheduler", "prefill-0", "decode-0"}

    cluster.wait_until("every process has told of the end", is_complete)
    return found


def times(timeline: dict[str, Any], who: str, what: str) -> list[float]:
    return [e["at_ms"] for e in timeline["events"] if (e["who"], e["what"]) == (who, what)]


def assert_in_order(timeline: dict[str, Any], *steps: tuple[str, str]) -> None:
    """Asserts that the first events of these (source, event) pairs are in this order."""
    found = [(who, what, times(timeline, who, what)[0]) for who, what in steps]
    for before, after in itertools.pairwise(found):
        tolerance_ms = 0.0 if before[0] == after[0] else TOLERANCE_MS
        assert before[2] <= after[2] + tolerance_ms, (before, after)


def test_a_request_from_end_to_end(cluster: LiveCluster) -> None:
    prompt = [23, 5] * 50
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "cache_salt": "timeline"}
    answer = cluster.client.post(f"{cluster.url}/v1/completions", json=body)
    found = timeline_of(cluster, answer.json()["id"])
    assert (found["status"], found["num_prompt_tokens"], found["num_dropped_events"]) == ("finished", 100, 0)
    assert (found["prefill"], found["decode"]) == ("prefill-0", "decode-0")
    assert [e["at_ms"] for e in found["events"]] == sorted(e["at_ms"] for e in found["events"])
    s, p, d = "scheduler", "prefill-0", "decode-0"
    assert_in_order(found, (s, "received"), (s, "routed"), (s, "first token"), (s, "finished"))
    for who in (p, d):
        assert_in_order(found, (s, "routed"), (who, "submitted"), (who, "finished"))
    assert_in_order(found, (d, "finished"), (s, "finished"))  # prefill may release later
    names = ("submitted", "admitted", "offered", "credited", "sent", "ended", "confirmed", "finished")
    assert_in_order(found, *((p, name) for name in names))
    assert_in_order(found, (p, "admitted"), (p, "chunk"), (p, "first token"), (p, "ended"))
    names = ("offered", "credited", "landed", "landing complete", "confirmed", "decode start", "finished")
    assert_in_order(found, *((d, name) for name in names))
    assert_in_order(found, (p, "offered"), (d, "offered"), (d, "credited"), (p, "credited"))
    assert_in_order(found, (p, "sent"), (d, "landed"), (p, "confirmed"), (d, "confirmed"))
    assert_in_order(found, (p, "first token"), (s, "first token"))


def test_the_numbers_agree(cluster: LiveCluster) -> None:
    body = {"prompt": [29, 7] * 50, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "cache_salt": "numbers"}
    request_id = cluster.client.post(f"{cluster.url}/v1/completions", json=body).json()["id"]
    events = timeline_of(cluster, request_id)["events"]

    def numbers(who: str, what: str) -> list[dict[str, int]]:
        return [e["numbers"] for e in events if (e["who"], e["what"]) == (who, what)]

    assert numbers("prefill-0", "admitted") == [{"num_tokens": 100, "num_cached": 0}]
    assert numbers("prefill-0", "credited") == numbers("decode-0", "credited") == [{"first_token": 0}]
    chunks = [(each["start"], each["stop"]) for each in numbers("prefill-0", "chunk")]
    assert (chunks[0][0], chunks[-1][1]) == (0, 100)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(chunks))
    sent, landed = numbers("prefill-0", "sent"), numbers("decode-0", "landed")
    assert all(each.pop("took_us") >= 0 for each in [*sent, *landed])
    assert sent == landed
    assert (sent[0]["start"], sent[-1]["stop"], sent[0]["first_layer"]) == (0, 100, 0)
    assert sum(each["nbytes"] for each in sent) > 0
    assert numbers("decode-0", "finished") == [{"num_tokens": 5}]


def test_a_stream_is_found_by_its_id(cluster: LiveCluster, client: openai.OpenAI) -> None:
    with client.completions.create(model="tiny", prompt="once", max_tokens=3, stream=True) as stream:
        ids = {chunk.id for chunk in stream}
    (request_id,) = ids
    found = cluster.client.get(f"{cluster.admin_url}/requests/{request_id}/timeline").json()
    listed = cluster.client.get(f"{cluster.admin_url}/requests?limit=1").json()["requests"]
    assert listed[0]["request_id"] == found["request_id"] == request_id
    assert cluster.client.get(f"{cluster.admin_url}/requests/{found['ids'][1]}/timeline").status_code == 200
