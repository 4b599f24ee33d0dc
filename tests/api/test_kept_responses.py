"""Stored responses over two API processes and two tenants, with OpenAI's unmodified client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from tests.api.conftest import KEYS, client_of
from tests.support.cluster import LiveCluster
from tests.support.kept import ids_in

ITEMS: TypeAdapter[Any] = TypeAdapter(list[ResponseItem])
NUM_TRIES = 6  # enough new connections for both processes
HELLO: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 8, "temperature": 0}


def kept_ids(cluster: LiveCluster) -> list[str]:
    return ids_in(cluster.folder / "kept")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_kept_and_found_by_every_process(guarded: LiveCluster, one: openai.OpenAI, stream: bool) -> None:
    made: Response
    if stream:
        *_, last = list(one.responses.create(**HELLO, stream=True))
        made = last.response
    else:
        made = one.responses.create(**HELLO)
    assert made.model_extra == {"store": True}
    for _ in range(NUM_TRIES):
        with client_of(guarded, "one") as client:
            assert client.responses.retrieve(made.id) == made
            assert not hasattr(made, "items")
            listed = client.responses.input_items.list(made.id)
            (item,) = listed.data
            assert item.type == "message"
            assert item.content[0].text == "hello"  # type: ignore[union-attr]
    one.responses.delete(made.id)
    for _ in range(NUM_TRIES):
        with client_of(guarded, "one") as client, pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)


def test_a_conversation_goes_on(guarded: LiveCluster, one: openai.OpenAI) -> None:
    """The second response's prompt has the whole conversation, without the first one's instructions."""
    first = one.responses.create(**HELLO, instructions="s")
    items: Any = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    second = one.responses.create(**{**HELLO, "input": items}, previous_response_id=first.id)
    third = one.responses.create(**{**HELLO, "input": "c"}, previous_response_id=second.id, stream=False)
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.output_text},
        *items,
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "c"},
    ]
    headers = {"Authorization": f"Bearer {KEYS['one']}"}
    count = guarded.client.post(f"{guarded.url}/tokenize", json={"messages": chat}, headers=headers).json()["count"]
    assert third.usage is not None
    assert third.usage.input_tokens == count
    assert third.previous_response_id == second.id
    one.responses.delete(first.id)  # later responses do not need the deleted one
    assert one.responses.create(**HELLO, previous_response_id=second.id).usage is not None
    alone = {name: value for name, value in HELLO.items() if name != "input"}
    usage = one.responses.create(**alone, previous_response_id=second.id).usage
    assert usage is not None
    counted = one.responses.input_tokens.count(model="tiny", previous_response_id=second.id)
    assert counted.input_tokens == usage.input_tokens
    page = one.responses.input_items.list(third.id, order="asc", limit=2)
    assert page.has_more
    ids = [item.id for item in page]
    assert len(ids) == len(set(ids)) == 6
    raw = guarded.client.get(f"{guarded.url}/v1/responses/{third.id}/input_items?limit=100", headers=headers).json()
    assert [item.id for item in ITEMS.validate_python(raw["data"])] == ids[::-1]


def test_another_tenants_response_is_unknown_everywhere(guarded: LiveCluster, one: openai.OpenAI) -> None:
    made = one.responses.create(**HELLO)
    with client_of(guarded, "two") as two:
        for found in (
            lambda: two.responses.retrieve(made.id),
            lambda: two.responses.delete(made.id),
            lambda: two.responses.cancel(made.id),
            lambda: two.responses.input_items.list(made.id),
            lambda: two.responses.create(**HELLO, previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                found()
            assert caught.value.code == "response_not_found"
    assert one.responses.retrieve(made.id) == made
    answer = guarded.client.get(f"{guarded.url}/v1/responses/{made.id}")
    assert answer.status_code == 401
    with pytest.raises(openai.BadRequestError, match="background"):
        one.responses.cancel(made.id)


def test_a_refused_request_and_a_client_that_leaves_keep_nothing(guarded: LiveCluster, one: openai.OpenAI) -> None:
    before = kept_ids(guarded)
    with pytest.raises(openai.BadRequestError):
        one.responses.create(**{**HELLO, "max_output_tokens": 0})
    long: Any = {**HELLO, "max_output_tokens": 200, "extra_body": {"ignore_eos": True}, "stream": True}
    for _ in range(10):  # an answer may end before its client leaves
        with one.responses.create(**long) as stream:
            next(iter(stream))
        guarded.assert_home()
        if kept_ids(guarded) == before:
            return
        before = kept_ids(guarded)
    raise AssertionError("all ten answers were stored although their clients had left")


def test_made_up_ids_and_lists_that_are_none(guarded: LiveCluster, one: openai.OpenAI) -> None:
    headers = {"Authorization": f"Bearer {KEYS['one']}"}
    for name in ("x", "..%2f..%2fetc%2fpasswd", "resp_" + "0" * 48, "resp_%00", ".lock"):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = guarded.client.request(method, f"{guarded.url}/v1/responses/{name}{path}", headers=headers)
            assert answer.status_code == 404, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
    made = one.responses.create(**HELLO)
    for query in ("limit=0", "limit=101", "order=up", "after=nothing"):
        answer = guarded.client.get(f"{guarded.url}/v1/responses/{made.id}/input_items?{query}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])
