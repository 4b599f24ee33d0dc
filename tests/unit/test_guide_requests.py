"""From a request's fields to a guide, and the child process that checks it: deadlines, verdicts, bounds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.errors import ConfigError, GuideError, RequestError
from pd_cluster.service.concurrency.child_pool import MAX_SLOW
from pd_cluster.service.guides.guide_check import GuideCheck
from pd_cluster.service.schema.chat_protocol import ChatCompletionRequest
from pd_cluster.service.schema.completion_protocol import CompletionRequest, GenerateRequest, GenerationRequest
from pd_cluster.service.schema.request_parsing import parse
from pd_cluster.service.schema.structured_outputs.guide_fields import MAX_SCHEMA_DEPTH, Asked, compact, guide_of
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.settings.request_settings import GUIDED_BACKENDS, Assurances
from pd_cluster.settings.serve_options import ServeOptions
from pd_cluster.types import MAX_GUIDE_NUM_CHARS, Guide

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAG = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
ENDLESS = Guide("json", '{"type": "integer", "multipleOf": 99999989}')


def asked(kind: type[GenerationRequest] = CompletionRequest, **fields: Any) -> Any:
    is_chat = kind is ChatCompletionRequest
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": "a"}
    return guide_of(parse(json.dumps({**prompt, **fields}).encode(), kind))


COMPACT = {"type": "object", "x-guidance": {"whitespace_pattern": ""}}
OUTPUTS: list[tuple[dict[str, Any], Guide]] = [  # structured_outputs -> guide
    ({"json": SCHEMA}, Guide("json", TEXT)),
    ({"json": TEXT, "regex": None, "json_object": False}, Guide("json", TEXT)),
    ({"regex": "a", "disable_fallback": True}, Guide("regex", "a")),
    ({"choice": ["b", "a", "b"]}, Guide("choice", '["b","a"]')),
    ({"grammar": 'start: "a"'}, Guide("grammar", 'start: "a"')),
    ({"json_object": True}, Guide("json_object")),
    ({"structural_tag": TAG}, Guide("structural_tag", json.dumps(TAG, separators=(",", ":")))),
    ({"json_object": True, "disable_any_whitespace": True}, Guide("json", json.dumps(COMPACT, separators=(",", ":")))),
]
FORMATS: list[tuple[dict[str, Any], Guide | None]] = [  # response_format -> guide
    ({"type": "text"}, None),
    ({"type": "json_object"}, Guide("json_object")),
    ({"type": "json_object", "schema": SCHEMA}, Guide("json", TEXT)),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, Guide("json", TEXT)),
    ({"type": "structural_tag", **TAG}, Guide("structural_tag", json.dumps(TAG, separators=(",", ":")))),
]
SPELLINGS: list[tuple[dict[str, Any], Guide | None]] = [
    ({}, None),
    ({"guided_json": SCHEMA}, Guide("json", TEXT)),
    ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "auto"}, Guide("json", TEXT)),
    ({"guided_regex": "a+"}, Guide("regex", "a+")),
    ({"guided_choice": ["b", "a", "b"]}, Guide("choice", '["b","a"]')),
    ({"guided_grammar": 'root ::= "a"'}, Guide("grammar", 'root ::= "a"')),
    ({"guided_decoding_backend": "guidance"}, None),
    *(({"structured_outputs": fields}, guide) for fields, guide in OUTPUTS),
    *(({"response_format": fields}, guide) for fields, guide in FORMATS),
    (
        {"response_format": {"type": "json_object"}, "guided_whitespace_pattern": "[ ]?"},
        Guide("json", '{"type":"object","x-guidance":{"whitespace_pattern":"[ ]?"}}'),
    ),
]


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest, GenerateRequest])
def test_every_spelling(kind: type[GenerationRequest]) -> None:
    for fields, guide in SPELLINGS:
        found = asked(kind, **fields)
        assert (found.guide if found else None) == guide, fields


def test_compact_json_leaves_what_a_request_says() -> None:
    own = Guide("json", '{"x-guidance":{"whitespace_pattern":" "},"type":"object"}')
    assert compact(Asked("f", own)).guide == own
    assert compact(Asked("f", Guide("regex", "a"))).guide == Guide("regex", "a")
    made = compact(Asked("f", Guide("json_object"))).guide
    assert json.loads(made.text) == {"x-guidance": {"whitespace_pattern": ""}, "type": "object"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": json.dumps(nested(MAX_SCHEMA_DEPTH + 1))}, "guided_json", "more than 64 deep"),
        ({"guided_json": {"title": "x" * MAX_GUIDE_NUM_CHARS}}, "guided_json", "at most 262144"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex also constrains the output"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "structured_outputs.regex"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "whitespace_pattern": " "}},
            *("structured_outputs", "conflicts with"),
        ),
        ({"structured_outputs": {"structural_tag": {"format": {}}}}, "structured_outputs", "format.type: None"),
        ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern", "guided_json"),
        ({"response_format": {}}, "response_format", "expected text"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, "response_format", "schema"),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_flag_and_the_field_know_the_same_names() -> None:
    def is_refused(backend: str) -> bool:
        try:
            asked(guided_decoding_backend=backend)
            ServeOptions(guided_decoding_backend=backend).read(Assurances)
        except (RequestError, ConfigError):
            return True
        return False

    assert [name for name in (*GUIDED_BACKENDS, "mine") if is_refused(name)] == ["mine"]
    assert asked(guided_json=json.dumps(nested(MAX_SCHEMA_DEPTH))) is not None, "the maximum depth must be accepted"


# ---- the child


def with_check(use: Callable[[GuideCheck], Awaitable[None]], timeout_s: float = 20.0) -> None:
    async def main() -> None:
        check = GuideCheck(SHIPPED_MODEL / "tokenizer.json", 1024, frozenset({0}), timeout_s)
        try:
            await use(check)
        finally:
            await check.close()
        assert not check.children.idle
        assert not check.running

    asyncio.run(main())


async def verdict(check: GuideCheck, guide: Guide) -> str:
    try:
        await check.check(guide)
    except GuideError as error:
        return str(error)
    return ""


def test_a_verdict_is_found_once_and_a_child_that_broke_is_replaced() -> None:
    async def use(check: GuideCheck) -> None:
        good, bad = Guide("regex", "a+"), Guide("regex", "a(")
        assert await asyncio.gather(*(verdict(check, good) for _ in range(5))) == [""] * 5
        for _ in range(2):
            assert "unclosed group" in await verdict(check, bad)
        assert (check.num_checked, check.children.num_killed) == (2, 0)
        (child,) = check.children.idle  # one process checked all of them
        os.kill(child.process.pid, signal.SIGKILL)
        await child.process.wait()
        assert await verdict(check, Guide("regex", "b")) == ""

    with_check(use)


def test_what_takes_too_long_is_killed_and_keeps_nobody_waiting() -> None:
    async def use(check: GuideCheck) -> None:
        await asyncio.gather(*(check.check(Guide("regex", name)) for name in ("warm", "up")))  # one process each
        check.children.timeout_s = 1.0
        endless = asyncio.create_task(verdict(check, ENDLESS))
        await asyncio.sleep(0)
        assert await verdict(check, Guide("choice", '["yes", "no"]')) == ""
        assert not endless.done()
        assert "not ready after 1 s (--guided-timeout)" in await endless
        assert check.children.num_killed == 1
        assert "not ready" in await verdict(check, ENDLESS)  # retried, because another guide may have been in its way
        assert check.num_checked == 5

    with_check(use)


def test_slow_guides_do_not_keep_quick_ones_waiting() -> None:
    """Quick guides are not delayed, although there are more slow ones than places."""

    async def use(check: GuideCheck) -> None:
        await check.check(Guide("regex", "warm"))
        endless = [Guide("json", ENDLESS.text + " " * at) for at in range(6)]
        tasks = [asyncio.create_task(verdict(check, each)) for each in endless]
        await asyncio.sleep(0)
        assert await verdict(check, Guide("choice", '["yes", "no"]')) == ""
        while check.children.slow_turns.num_waiting < len(endless) - MAX_SLOW // 2:
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks), "the others must wait for a place"

    with_check(use, timeout_s=100.0)


def test_the_child_ends_with_its_parent() -> None:
    code = f"""
import asyncio, os
from pathlib import Path
from pd_cluster.service.guides.guide_check import GuideCheck
from pd_cluster.types import Guide
async def main():
    check = GuideCheck(Path({str(SHIPPED_MODEL / "tokenizer.json")!r}), 1024, frozenset({{0}}))
    await check.check(Guide("regex", "a"))
    print(check.children.idle[0].process.pid, flush=True)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    child = Path(f"/proc/{int(parent.stdout)}/stat")
    for _ in range(200):
        if not child.exists() or child.read_text().split()[2] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError("the child outlived its parent")


def test_hostile_guides_have_a_verdict_in_time() -> None:
    """Each hostile guide is refused or small enough to compile; none crashes or blocks the process."""
    links = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}, {"items": {"$ref": f"#/$defs/d{i - 1}"}}]}
             for i in range(1, 300)}  # fmt: skip
    hostile = [
        Guide("regex", "a{1000000}"),
        Guide("regex", "((a{1,100}){1,100}){1,100}"),
        Guide("regex", "(a|a)*(a|aa)+b{1,1000}"),
        Guide("regex", "(" * 5000 + "a" + ")" * 5000),
        Guide("json", json.dumps({"enum": [f"v{i}" for i in range(100_000)]})),
        Guide("json", '{"$ref": "#"}'),
        Guide("json", json.dumps({"$defs": {"d0": {"type": "integer"}, **links}, "$ref": "#/$defs/d299"})),
        Guide("json", json.dumps({"allOf": [{"pattern": f"^({'.' * i})*$"} for i in (3, 5, 7, 11, 13, 17, 19)]})),
        Guide("grammar", 'root ::= root root | "a"'),
        Guide("grammar", 'root ::= "a"{1000000}'),
        Guide("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    ]

    async def use(check: GuideCheck) -> None:
        verdicts = [await verdict(check, guide) for guide in hostile]
        assert check.num_checked == len(hostile)
        assert "too many expressions" in verdicts[0]
        assert sum(bool(each) for each in verdicts) >= 6, verdicts
        assert all("\n" not in each and len(each) < 350 for each in verdicts)
        assert await verdict(check, Guide("regex", "a+")) == ""

    with_check(use)


def test_formats_that_constrain_nothing_are_left_out() -> None:
    secret = {"type": "string", "format": "password"}
    schema = {
        "type": "object",
        "properties": {"format": secret, "at": {"type": "string", "format": "date"}},
        "$defs": {"a": {"anyOf": [secret, {"items": {"format": "binary"}}], "const": {"format": "path"}}},
    }
    found = asked(guided_json=schema)
    assert found is not None
    assert json.loads(found.guide.text) == {
        "type": "object",
        "properties": {"format": {"type": "string"}, "at": {"type": "string", "format": "date"}},
        "$defs": {"a": {"anyOf": [{"type": "string"}, {"items": {}}], "const": {"format": "path"}}},
    }
