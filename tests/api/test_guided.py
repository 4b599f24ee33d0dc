"""Guided outputs over HTTP with real prefill and decode processes: every request form, streams, hostile guides."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

from pd_cluster.service.concurrency.child_pool import MAX_CHILDREN
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Guide, Request, RequestSpec, Sampling
from tests.support.api_cases import nothing_left
from tests.support.canary import Canary
from tests.support.checkpoints import EOS_ID
from tests.support.cluster import LiveCluster, children_of
from tests.support.engines import make_core, run
from tests.support.sse import chunks_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "size": {"enum": [1, 22, 333]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
PROMPT = "Please provide details for this character"
CHAT = [{"role": "user", "content": "hello"}]
REGEX = "[a-z]{3,5}[0-9]"


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(cluster: LiveCluster) -> Iterator[None]:
    with nothing_left(cluster):
        yield


def post(cluster: LiveCluster, route: str = "completions", **fields: Any) -> httpx.Response:
    prompt = {"messages": CHAT} if route == "chat/completions" else {"prompt": PROMPT}
    body = {**prompt, "temperature": 0, "max_tokens": 120, **fields}
    return cluster.client.post(f"{cluster.url}/v1/{route}", json=body)


def texts(answer: httpx.Response) -> list[str]:
    """Returns the choices' texts; asserts that each choice has ended."""
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}, choices
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def test_json(cluster: LiveCluster) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    for route, fields in (
        ("completions", {"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "auto"}),
        ("completions", {"response_format": form}),
        ("chat/completions", {"response_format": form}),
        ("chat/completions", {"structured_outputs": {"json": SCHEMA}}),
    ):
        (text,) = texts(post(cluster, route, **fields))
        jsonschema.validate(json.loads(text), SCHEMA)
    (text,) = texts(post(cluster, guided_json=SCHEMA, guided_whitespace_pattern=""))
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize(("route", "temperature"), [("completions", 0), ("chat/completions", 1)])
def test_the_other_kinds(cluster: LiveCluster, route: str, temperature: float) -> None:
    fields = {"temperature": temperature, "seed": 3}
    for by_regex in ({"guided_regex": REGEX}, {"structured_outputs": {"regex": REGEX}}):
        assert re.fullmatch(REGEX, texts(post(cluster, route, **by_regex, **fields))[0])
    for by_choice in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        assert texts(post(cluster, route, **by_choice, **fields))[0] in ("yes", "no")
    grammar = 'root ::= "SELECT " col " FROM t"\ncol ::= "a" | "b"'
    assert texts(post(cluster, route, guided_grammar=grammar, **fields))[0] in ("SELECT a FROM t", "SELECT b FROM t")
    lark = '?start: "SELECT " COL\nCOL: "a" | "b"'
    assert texts(post(cluster, route, structured_outputs={"grammar": lark}, **fields))[0] in ("SELECT a", "SELECT b")
    bias = {"34": 20, "125": 100}  # prefers quotes and braces, so that the model closes what it opens
    answer = post(cluster, route, response_format={"type": "json_object"}, logit_bias=bias, **fields)
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert text.startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


class Pet(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=4)
    kind: str = pydantic.Field(pattern="^(cat|dog)$")


def test_openais_client_parses_into_a_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        response_format=Pet,
        temperature=0,
        max_tokens=120,
    )
    assert answer.choices[0].message.parsed is not None
    assert answer.choices[0].message.parsed.kind in ("cat", "dog")
    again = client.completions.create(
        model="tiny", prompt="a", max_tokens=120, extra_body={"guided_json": Pet.model_json_schema()}
    )
    Pet.model_validate_json(again.choices[0].text)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_stream_is_the_same(cluster: LiveCluster, route: str) -> None:
    fields = {"guided_json": SCHEMA, "temperature": 1, "seed": 8}
    (whole,) = texts(post(cluster, route, **fields))
    chunks = [each["choices"][0] for each in chunks_of(post(cluster, route, stream=True, **fields))]
    assert "".join(chunk.get("text") or chunk.get("delta", {}).get("content", "") for chunk in chunks) == whole
    assert chunks[-1]["finish_reason"] == "stop"


@pytest.mark.usefixtures("one_thread")
def test_tokens_are_those_of_one_process(cluster: LiveCluster, model: Path) -> None:
    """Prefill chooses token one and decode the rest, with the same result as a single engine."""
    core = make_core(model, num_blocks=200)
    prompt = Tokenizer(model).encode(PROMPT)
    schema = json.dumps(SCHEMA, separators=(",", ":"))
    for temperature, seed in ((0, 0), (1, 0), (1, 1)):
        sampling = Sampling(temperature=temperature, seed=seed, max_tokens=120, guide=Guide("json", schema))
        request = Request("r", RequestSpec(prompt, sampling))
        run(core, [request])
        answer = post(cluster, guided_json=SCHEMA, temperature=temperature, seed=seed, return_token_ids=True)
        (choice,) = answer.json()["choices"]
        assert choice["token_ids"] == request.output_token_ids
        assert (choice["token_ids"][-1] == EOS_ID) == (choice["finish_reason"] == "stop")


def test_max_tokens_cuts_it_and_ignore_eos_does_not_stretch_it(cluster: LiveCluster) -> None:
    (choice,) = post(cluster, guided_regex=REGEX, max_tokens=2).json()["choices"]
    assert (choice["finish_reason"], len(choice["text"])) == ("length", 2)
    assert len(texts(post(cluster, guided_regex="a{7}", ignore_eos=True, min_tokens=50))[0]) == 7


def test_nothing_to_choose_is_an_error_of_that_request(cluster: LiveCluster) -> None:
    answer = post(cluster, guided_regex="a{7}", allowed_token_ids=[0, 1])
    assert answer.status_code == 400
    assert "its guide and its other constraints leave no token to choose" in answer.json()["error"]["message"]
    assert texts(post(cluster, guided_regex="a{7}")) == ["aaaaaaa"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}}, "response_format"),
    ],
)
def test_what_is_no_guide_is_refused_by_name(cluster: LiveCluster, fields: dict[str, Any], param: str) -> None:
    answer = post(cluster, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
    assert "\n" not in error["message"]


HOSTILE: list[dict[str, Any]] = [
    {"guided_json": {"type": "integer", "multipleOf": 99999989}},
    {"guided_regex": "(a{1,999}){999}(.*b){200}" + "a{1000000}"},
    {"guided_json": {"enum": [f"v{i}" for i in range(20_000)], "title": "x" * 100_000}},
    {"guided_json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"guided_grammar": "root ::= a\na ::= b\nb ::= a"},
    {"guided_grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
    {"guided_grammar": 'root ::= root root | root "a" | "a"{1000000}'},
]


def test_a_canary_streams_on_while_hostile_guides_are_cut_off(cluster: LiveCluster) -> None:
    with Canary(cluster).singing() as canary:
        for fields in HOSTILE:
            began_s = time.monotonic()
            answer = post(cluster, **fields)
            assert answer.status_code == 400, (fields, answer.text[:300])
            assert answer.json()["error"]["param"] in fields
            assert time.monotonic() - began_s < 10
        assert texts(post(cluster, guided_regex="b{3}")) == ["bbb"]
    assert canary.longest_gap_s < 3
    cluster.wait_until("the extra children end", lambda: num_guide_children(cluster) <= MAX_CHILDREN)


def num_guide_children(cluster: LiveCluster) -> int:
    """Counts guide-checking children only, because templates and pictures also have children."""
    pids = children_of(cluster.processes["scheduler"].pid)
    return sum(b"guide_child" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
