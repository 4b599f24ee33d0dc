"""Random walks through guides for tool calls and reasoning: the parser finds everything that they permit."""

from __future__ import annotations

import functools
import json
import random
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema.validators
import numpy as np
import pytest
from jsonschema.protocols import Validator
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pd_cluster.errors import GuideError, RequestError
from pd_cluster.parsers.reply_format import ReplyFormat, Tool, ToolChoice
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part
from pd_cluster.text.grammar import Compiler, Matcher
from pd_cluster.types import MAX_GUIDE_NUM_CHARS, Guide
from tests.support.schemas import random_schema

PARSERS = ("", "hermes", "llama3_json", "mistral", "qwen3")
MARKERS = sorted(ReplyFormat("hermes", "qwen3").markers | ReplyFormat("mistral").markers | {"<|python_tag|>"})
# Tokens that cross the borders of markup, calls and arguments.
LONG_TOKENS = ['{"', '":', '": ', '": {"', '"}', "}}", "}\n", "\n<", "</", ", ", '", "', "]}", '"}}', "}]", "[{", "> {"]
ADDER = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}, "b": {"$ref": "#/$defs/number"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"number": {"type": "integer", "minimum": 0, "maximum": 999}},
}
NAMER = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/number"}},
    "$defs": {"number": {"enum": ["one", "two"]}},
    "additionalProperties": False,
}
TOOLS = [Tool("add", ADDER, strict=True), Tool("add_all", NAMER), Tool("free-1.x", {})]
CALLS = {  # parser -> a call of `add`
    "": '[{"name": "add", "parameters": %s}]',
    "hermes": '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": %s}]',
    "qwen3": '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>',
}
GOOD, BAD = '{"a": 1, "b": 22}', '{"a": 1, "b": "22"}'
ANSWER = Guide("json", '{"type":"object","properties":{"yes":{"type":"boolean"}},"required":["yes"]}')


class World:
    """A tokenizer with bytes, some longer texts and the markers, and its compiler."""

    def __init__(self, folder: Path, markers_are: str, markers: Sequence[str] = MARKERS) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        written = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        longer = ["".join(piece for piece, _ in written.pre_tokenize_str(text)) for text in LONG_TOKENS]
        vocab = {text: at for at, text in enumerate([*alphabet, *longer])}
        self.tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        self.tokenizer.pre_tokenizer = written
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens(["<eos>"])
        if markers_are != "text":
            self.tokenizer.add_tokens([AddedToken(text, special=markers_are == "special") for text in markers])
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self.eos_id = self.tokenizer.token_to_id("<eos>")
        self.compiler = Compiler(folder / "tokenizer.json", self.tokenizer.get_vocab_size(), [self.eos_id])
        self.free, self.closing = {*self.ids("aZ~")}, self.ids('"}]<')
        self._words = np.zeros(self.compiler.num_words, dtype=np.uint32)

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def allowed(self, matcher: Matcher) -> list[int]:
        matcher.write_mask(self._words)
        return np.flatnonzero(np.unpackbits(self._words.view(np.uint8), bitorder="little")).tolist()

    def verdict(self, guide: Guide | None, text: str) -> str:
        """Returns the guide's verdict on a text: whole, begun, or the part before the first refused token."""
        assert guide is not None
        matcher = self.compiler.compile(guide)
        ids = self.ids(text)
        for at, token_id in enumerate(ids):
            if token_id not in self.allowed(matcher):
                return str(self.tokenizer.decode(ids[:at], skip_special_tokens=False))
            matcher.take([token_id])
        return "whole" if self.eos_id in self.allowed(matcher) else "begun"

    def walk(self, guide: Guide, rng: random.Random, goals: list[str]) -> str:
        """Walks randomly over permitted tokens; in free text, sometimes takes one of the goals."""
        matcher = self.compiler.compile(guide)
        output: list[int] = []
        while len(output) < 3000:
            allowed = self.allowed(matcher)
            if self.eos_id in allowed and (len(allowed) == 1 or rng.random() < 0.1):
                return str(self.tokenizer.decode(output, skip_special_tokens=False))
            allowed = [token_id for token_id in allowed if token_id != self.eos_id]
            may_follow = {*allowed}
            is_free = self.free <= may_follow
            if is_free and rng.random() < 0.2 and self._take(matcher, goal := self.ids(rng.choice(goals))):
                output += goal
                continue
            closing = [token_id for token_id in self.closing if token_id in may_follow]
            longer = allowed[bisect_left(allowed, 256) :]
            (token_id,) = rng.choices(
                [rng.choice(allowed), rng.choice(closing or allowed), rng.choice(longer or allowed)]
            )
            matcher.take([token_id])
            output.append(token_id)
        raise AssertionError(f"no end: {self.tokenizer.decode(output, skip_special_tokens=False)[-300:]!r}")

    def _take(self, matcher: Matcher, token_ids: list[int]) -> bool:
        trial = matcher.copy()
        try:
            trial.take(token_ids)
        except GuideError:
            return False
        matcher.take(token_ids)
        return True


@pytest.fixture(scope="module", params=["text", "added", "special"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp(request.param), request.param)


def parts_of(form: ReplyFormat, choice: ToolChoice, text: str, prompt_end: str = "") -> list[Part]:
    reader = form.reader(choice, prompt_end)
    return [*reader.feed(text), *reader.finish()]


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    texts = [
        "".join(p.text for p in parts if isinstance(p, CallArguments) and p.index == at) for at in range(len(names))
    ]
    return list(zip(names, map(json.loads, texts), strict=True))


def content_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def must_fit(calls: list[tuple[str, Any]], tools: list[Tool]) -> None:
    schemas = {tool.name: tool.parameters for tool in tools}
    for name, arguments in calls:
        assert isinstance(arguments, dict)
        validator_of(json.dumps(schemas[name])).validate(arguments)


@functools.cache
def validator_of(schema_text: str) -> Validator:
    """Returns a cached validator, because jsonschema.validate() checks the schema each time."""
    schema = json.loads(schema_text)
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


# ---- walks


@pytest.mark.parametrize("reasoning", ["", "qwen3", "deepseek_r1"])
@pytest.mark.parametrize("parser", PARSERS)
def test_required_calls_are_found_and_fit_their_schemas(world: World, parser: str, reasoning: str) -> None:
    """Every required call is found and satisfies its schema; a named tool is called once."""
    form = ReplyFormat(parser, reasoning)
    choices: list[ToolChoice] = ["required", "required", "named"]
    for seed, choice in enumerate(choices):
        tools = [Tool("add", ADDER), Tool("one", random_schema(seed)), Tool("other", random_schema(seed + 100))]
        most = [None, 1, 3][(seed + len(parser)) % 3]
        guide = form.guide(tools[:1] if choice == "named" else tools, choice, "", most)
        assert guide is not None
        text = world.walk(guide, random.Random(seed), ["</think>"])
        parts = parts_of(form, choice, text)
        calls = calls_of(parts)
        assert 1 <= len(calls) <= (1 if choice == "named" else most or 16), text
        assert content_of(parts) == "", text
        must_fit(calls, tools)


@pytest.mark.parametrize("reasoning", ["", "qwen3"])
@pytest.mark.parametrize("parser", PARSERS[1:])
def test_calls_in_free_text_fit_where_a_tool_is_strict(world: World, parser: str, reasoning: str) -> None:
    form = ReplyFormat(parser, reasoning)
    guide = form.guide(TOOLS, "auto", "")
    assert guide is not None
    goals, num_calls = ["</think>", "<tool_call>", "[TOOL_CALLS]", "text ", " {", '{"name"'], 0
    for seed in range(40):
        calls = calls_of(parts_of(form, "auto", world.walk(guide, random.Random(seed), goals)))
        must_fit([call for call in calls if call[0] == "add"], TOOLS)
        assert {name for name, _ in calls} <= {tool.name for tool in TOOLS}
        num_calls += len(calls)
        if num_calls >= 2 and seed >= 3:
            return
    raise AssertionError(f"only {num_calls} calls")


# ---- permitted and forbidden texts


@pytest.mark.parametrize("parser", PARSERS)
def test_a_required_call_keeps_to_its_schema_and_to_its_name(world: World, parser: str) -> None:
    """A call must use its schema and name; special characters in the name are not grammar."""
    guide = ReplyFormat(parser).guide(TOOLS, "required", "")
    call = CALLS[parser]
    assert world.verdict(guide, call % GOOD) == "whole"
    assert world.verdict(guide, (call % GOOD).replace(": ", ":")) == "whole"
    assert world.verdict(guide, call % BAD) == call[: call.index("%s")] + '{"a": 1, "b": '
    assert world.verdict(guide, (call % GOOD).replace("add", "sub")).endswith('"name": "')
    assert world.verdict(guide, "Well") == ""
    name = 'a" | /.*/ | "\n%ignore /x/'
    guide = ReplyFormat(parser).guide([Tool(name, ADDER)], "required", "", 1)
    assert world.verdict(guide, "x") == ""
    assert world.verdict(guide, (call % GOOD).replace('"add"', json.dumps(name))) == "whole"


@pytest.mark.parametrize("parser", PARSERS)
def test_no_more_calls_than_asked_for(world: World, parser: str) -> None:
    for most, fits in ((None, 16), (1, 1), (2, 2)):
        guide = ReplyFormat(parser).guide(TOOLS, "required", "", most)
        assert world.verdict(guide, several(parser, fits)) == "whole"
        assert world.verdict(guide, several(parser, fits + 1)) not in ("whole", "begun")


def several(parser: str, num_calls: int) -> str:
    call = CALLS[parser] % GOOD
    if parser in ("", "mistral"):
        start = call.index("[{") + 1
        return call[:start] + ", ".join([call[start:-1]] * num_calls) + "]"
    return ("; " if parser == "llama3_json" else "\n").join([call] * num_calls)


def test_newer_mistral_calls(world: World) -> None:
    form = ReplyFormat("mistral")
    for guide, before in ((form.guide(TOOLS, "required", "", 2), ""), (form.guide(TOOLS, "auto", ""), "So: ")):
        for args in ("", "[ARGS]"):
            text = f"{before}[TOOL_CALLS]add{args}{GOOD}[TOOL_CALLS]add_all{args}" + '{"a": "two"}'
            assert world.verdict(guide, text) == "whole"
            assert len(calls_of(parts_of(form, "auto", text))) == 2
            assert world.verdict(guide, f"{before}[TOOL_CALLS]add{args}{BAD}").endswith('"b": ')
        assert world.verdict(guide, f"{before}[TOOL_CALLS]adder") == f"{before}[TOOL_CALLS]add"


@pytest.mark.parametrize("parser", PARSERS[1:])
def test_free_text_around_calls_that_keep_to_strict_schemas(world: World, parser: str) -> None:
    guide = ReplyFormat(parser).guide(TOOLS, "auto", "")
    call, before = CALLS[parser], "Let me see {2 < 3}.\n"
    other = call.replace("add", "add_all") % '{"a": 5, "more": [{}]}'  # this tool is not strict
    for good in (before, before + call % GOOD, before + other, f"{before}{call % GOOD} and {call % GOOD} so."):
        assert world.verdict(guide, good) == "whole"
    for bad in (before + call % BAD, f"{before}{call % GOOD} and {call % BAD}"):
        assert world.verdict(guide, bad).endswith('"b": ')
    if parser == "llama3_json":
        assert world.verdict(guide, call % BAD).endswith('"b": ')
        assert world.verdict(guide, f"{before}<|python_tag|>{call % GOOD}") == "whole"
        assert world.verdict(guide, f"{before}<|python_tag|>{call % BAD}").endswith('"b": ')


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize("parser", ["", "hermes", "mistral"])
def test_reasoning_comes_first_and_is_free(world: World, parser: str, reasoning: str) -> None:
    form = ReplyFormat(parser, reasoning)
    call, thought = CALLS[parser] % GOOD, 'so {"name": <tool_cal x\n[a]'
    free_guide = form.guide(TOOLS, "required", "")
    for start in ("<think>", "\n<think>\n"):
        assert world.verdict(free_guide, f"{start}{thought}</think>\n\n{call}") == "whole"
    assert world.verdict(free_guide, f"<think>{thought}") == "begun"
    if reasoning == "qwen3":
        assert world.verdict(free_guide, call) == "whole"
        assert world.verdict(free_guide, thought) == ""
    else:
        assert world.verdict(free_guide, f"{thought}</think>{call}") == "whole"
        assert world.verdict(free_guide, thought) == "begun"
    open_guide = form.guide(TOOLS, "required", "user: hi\n<think>\n")
    assert world.verdict(open_guide, f"{thought}</think>{call}") == "whole"
    assert world.verdict(open_guide, f"{thought}</think>{thought}") == f"{thought}</think>"
    closed_guide = form.guide(TOOLS, "required", "<think>\n\n</think>\n\n")
    assert world.verdict(closed_guide, call) == "whole"
    assert world.verdict(closed_guide, f"<think>{thought}</think>{call}") in ("", "<t")


NULL = {"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}


ANSWERS = [
    (Guide("regex", "^(ab)+$"), "abab", "aba!"),
    (Guide("choice", '["yes","no"]'), "no", "none"),
    (Guide("grammar", 'root ::= "a" root "b" | "1"'), "a1b", "a1a"),
    (Guide("json_object"), '{"x": [1]}', "[1]"),
    (ANSWER, '{"yes": true}', '{"yes": 1}'),
    (Guide("structural_tag", json.dumps({"structures": [NULL], "triggers": ["<f"]})), "x<f>null</f>", "x<f>1</f>"),
]


@pytest.mark.parametrize(("answer", "good", "bad"), ANSWERS, ids=lambda value: getattr(value, "kind", ""))
def test_every_kind_of_answer_goes_with_reasoning_and_tools(world: World, answer: Guide, good: str, bad: str) -> None:
    form = ReplyFormat("hermes", "qwen3")
    call = CALLS["hermes"] % GOOD
    with_tools = form.guide(TOOLS, "auto", "", None, answer)
    alone = form.guide([], "none", "", None, answer)
    for thought in ("", "<think>\n…</think>\n\n"):
        for guide in (with_tools, alone):
            assert world.verdict(guide, thought + good) == "whole"
            assert world.verdict(guide, thought + bad) not in ("whole", "begun")
        assert world.verdict(with_tools, thought + call) == "whole"


# ---- when there is a guide


def test_without_need_there_is_none_and_an_answer_alone_stays_as_it_is() -> None:
    lenient = [Tool(tool.name, tool.parameters) for tool in TOOLS]
    for form in (ReplyFormat(), ReplyFormat("hermes", "qwen3")):
        assert form.guide(TOOLS, "none", "") is None
        assert form.guide([], "auto", "") is None
        assert form.guide(lenient, "auto", "") is None
    assert ReplyFormat().guide(TOOLS, "auto", "") is None  # no parser would read the calls
    assert ReplyFormat("hermes").guide(TOOLS, "none", "", None, ANSWER) is ANSWER
    assert ReplyFormat("hermes", "qwen3").guide([], "auto", "</think>\n", None, ANSWER) is ANSWER
    wrapped = ReplyFormat("hermes", "qwen3").guide([], "auto", "", None, ANSWER)
    assert wrapped is not None
    assert wrapped.kind == "reply"


@pytest.mark.parametrize(
    ("tool", "choice", "answer", "said", "param"),
    [
        (TOOLS[0], "required", ANSWER, "leaves no room for an answer", "tool_choice"),
        (TOOLS[0], "named", ANSWER, "leaves no room for an answer", "tool_choice"),
        (Tool("large", {"description": "x" * MAX_GUIDE_NUM_CHARS}), "required", None, "tools: a guide of", "tools"),
    ],
    ids=["required", "named", "large"],
)
def test_a_guide_that_cannot_be_made(tool: Tool, choice: ToolChoice, answer: Any, said: str, param: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        ReplyFormat().guide([tool], choice, "", None, answer)
    assert caught.value.param == param


def test_a_guide_that_cannot_be_followed_says_why(world: World) -> None:
    guide = ReplyFormat("hermes").guide([Tool("f", {"properties": {"a": {"not": {}}}})], "required", "")
    assert guide is not None
    with pytest.raises(GuideError, match="not"):
        world.compiler.compile(guide)
    for text in ('["seq", ["song", "x"]]', '["any", 5]', "{}", "[]"):
        with pytest.raises(GuideError, match="not a guide of kind reply"):
            world.compiler.compile(Guide("reply", text))


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "granite"])
def test_a_budget_leaves_only_the_closing_mark(world: World, reasoning: str) -> None:
    """Covers each form of the marker, partly written markers, and guides with and without an inner guide."""
    form = ReplyFormat("hermes", reasoning)
    opening = {"granite": "Here is my thought process:"}.get(reasoning, "<think>")
    close = {"granite": "Here is my response:"}.get(reasoning, "</think>")
    is_inside = reasoning == "deepseek_r1"
    for inner in (None, form.guide([], "none", "", None, Guide("choice", '["yes","no"]'))):
        for thought in ("abcdefgh", "ab </thin", "\nabc"):
            guide = form.budgeted(inner, len(world.ids(thought)), "")
            assert guide is not None
            before = thought if is_inside else opening + thought
            answer = "yes" if inner is not None else "anything at all"
            assert world.verdict(guide, f"{before}{close}{answer}") == "whole"
            assert world.verdict(guide, f"{before}x") == before
            enough = form.budgeted(inner, len(world.ids(thought + close)), "")
            assert world.verdict(enough, f"{before}{close}{answer}") == "whole"
            if inner is None:  # the answer's length is free
                assert world.verdict(enough, f"{before}{close}{thought * 20}") == "whole"


def test_a_budget_is_nothing_to_a_reply_without_reasoning(world: World) -> None:
    form = ReplyFormat("hermes", "qwen3")
    guide = form.budgeted(None, 2, "")
    assert world.verdict(guide, "no thought <think>abcdefg") == "whole"
    assert form.budgeted(None, 2, "<think>\n\n</think>\n\n") is None
    for name in ("", "openai_gptoss"):
        with pytest.raises(RequestError, match=r"^thinking_token_budget: 2 "):
            ReplyFormat("openai" if name else "", name).budgeted(None, 2, "")


def test_a_budget_s_progress_follows_from_the_tokens(world: World) -> None:
    """Copies are independent, and many tokens at once equal single ones, so a request may continue elsewhere."""
    guide = ReplyFormat("", "deepseek_r1").budgeted(None, 4, "")
    assert guide is not None
    one, ids = world.compiler.compile(guide), world.ids("abcd</think>efghijk")
    for at in range(len(ids)):
        other = world.compiler.compile(guide)
        other.take(ids[:at])
        assert world.allowed(other.copy()) == world.allowed(one)
        one.take([ids[at]])
