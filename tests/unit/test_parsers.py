"""Parsing replies into reasoning, content and calls, however their text is split into pieces."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

import pytest

from pd_cluster.parsers.format_table import FORMATS, begins_of
from pd_cluster.parsers.reply_format import ReplyFormat, Tool, ToolChoice, own_tool_parser
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning
from pd_cluster.parsers.text_stream import TextStream

TOOL_PARSERS = ("", "hermes", "llama3_json", "mistral", "qwen3")
REASONING_PARSERS = ("", "deepseek_r1", "qwen3")


def joined(parts: list[Part]) -> list[Part]:
    """Merges adjacent parts of one kind."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and type(last) is type(part) and not isinstance(part, CallBegin) and last[:-1] == part[:-1]:
            found[-1] = last._replace(text=last[-1] + part[-1])
        else:
            found.append(part)
    return found


def read(
    form: ReplyFormat,
    pieces: list[str],
    choice: ToolChoice = "auto",
    prompt_end: str = "",
    most_calls: int | None = None,
    tools: Sequence[Tool] = (),
) -> list[Part]:
    reader = form.reader(choice, prompt_end, most_calls, tools)
    parts = [part for piece in pieces for part in reader.feed(piece)]
    parts += reader.finish()
    begun = [part.index for part in parts if isinstance(part, CallBegin)]
    assert begun == list(range(reader.num_calls))
    return joined(parts)


def call(index: int, name: str, arguments: str = "{}") -> list[Part]:
    return [CallBegin(index, name), CallArguments(index, arguments)]


# ---- tool calls, format by format

Case = tuple[str, list[Part]]
F, G = '{"name":"f","arguments":{}}', '{"name":"g","arguments":{}}'
BOTH = [*call(0, "f"), *call(1, "g")]


def tagged(*texts: str) -> str:
    return "\n".join(f"<tool_call>{text}</tool_call>" for text in texts)


def plain(*texts: str) -> list[Case]:
    """Returns cases for texts without a call."""
    return [(text, [Content(text)]) for text in texts]


HERMES: list[Case] = [
    ("", []),
    (tagged('\n{"name": "f", "arguments": {"a": [1]}}\n'), call(0, "f", '{"a": [1]}')),
    (f"Yes.\n{tagged(F, G)}\n", [Content("Yes.\n"), *BOTH]),
    (f"{tagged(F)}\n so \n{tagged(G)}.", [*call(0, "f"), Content("\n so \n"), *call(1, "g"), Content(".")]),
    (tagged(F.replace("{}", '{"a":"}</tool_call>\\"{"}')), call(0, "f", '{"a":"}</tool_call>\\"{"}')),
    (tagged('{"id":[{}],"name":"\\u00e9","parameters": {"a" : 1 } , "x":1}'), call(0, "é", '{"a" : 1 }')),
    (tagged(F.replace("{}", '" {\\"a\\": \\"\\\\n\\ud83d\\ude00\\"}"')), call(0, "f", '{"a": "\\n😀"}')),
    (tagged('{"name":"f"}'), call(0, "f")),
    # almost a call
    (tagged(F.replace("{}}", '{"a":1}')) + "ok", [*call(0, "f", '{"a":1}'), Content("ok")]),
    (tagged(F.replace("{}}", '{"a":1}}}')) + "ok", [*call(0, "f", '{"a":1}'), Content("ok")]),
    (f"{tagged(F.replace('{}', '{a}'))}ok", [*call(0, "f", "{a}}"), Content("ok")]),
    (f"<tool_call>{F}<tool_call>{G}", BOTH),
    (f"<tool_call><tool_call>{F}", [Content("<tool_call>"), *call(0, "f")]),
    (f"<tool_call>{F}\nI asked.", [*call(0, "f"), Content("\nI asked.")]),
    (f"{tagged(F + ' so')}.", [*call(0, "f"), Content(" so.")]),
    *((text, BOTH) for text in (tagged(f"{F}\n{G}"), tagged(f"[{F},{G}]"), f"<tool_call>{F}}}, {G}\n")),
    (tagged(F + ', {"a":1}'), [*call(0, "f"), Content(', {"a":1}')]),
    ("<tool_call>" + F.replace("{}}", '{"a" ') + tagged(G), [*call(0, "f", '{"a" '), *call(1, "g")]),
    (f'<tool_call>{{"name": "f", "argu{tagged(G)}', [Content('<tool_call>{"name": "f", "argu'), *call(0, "g")]),
    ("So.\n<tool_call>\n</tool_call>", [Content("So.\n")]),
    *plain(" \n", tagged("hello"), "a <tool_cal b", '<tool_call>\n{"na', tagged('{"arguments": {oops}, "name": "f"}')),
    *plain(*(tagged(F.replace("{}", wrong)) for wrong in ("[1]", '"a {"'))),
    *plain(*(tagged(F.replace('"f"', wrong)) for wrong in ('""', "5")), tagged('{"arguments": {"a": 1}}')),
]
LLAMA3: list[Case] = [
    ('{"name": "f", "parameters": {"a": 1}}', call(0, "f", '{"a": 1}')),
    ('\n<|python_tag|> {"name": "f", "arguments": {}}\n', call(0, "f")),
    ('{"type":"function","name":"f","parameters":{}}; {"name":"g","parameters":{}} ;\n', BOTH),
    ('{"name":"f","parameters":{}}\n{"name":"g","parameters":{}}', BOTH),
    ('{"name":"f","parameters":{}} done', [*call(0, "f"), Content(" done")]),
    ('{"name":"f","parameters":{}};{"a":1}', [*call(0, "f"), Content(';{"a":1}')]),
    ('{"name":"f","parameters":{"a":tru}} ; x', call(0, "f", '{"a":tru}} ; x')),
    ('So {: {"name": "f", "parameters": {}} done', [Content("So {: "), *call(0, "f"), Content(" done")]),
    ('So.<|python_tag|>{"name":"f","parameters":{}}', [Content("So."), *call(0, "f")]),
    *plain("Hello {", '{"name": "Bob"}', '{"name": "Bob", "parameters": 3}', '{"answer": [1, 2]}\n', " ; x", "{"),
    *plain("<|python_tag|>print(1)", '{"name": "f", "parameters": {invalid json}', '{"name": "f", "parameters": { x'),
]
MISTRAL: list[Case] = [
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', call(0, "f", '{"a": 1}')),
    (f'Well.[TOOL_CALLS][{{"arguments":{{}},"name":"f"}}, {G}]\n', [Content("Well."), *BOTH]),
    ('[TOOL_CALLS]f{"a": 1}', call(0, "f", '{"a": 1}')),
    ('[TOOL_CALLS]f.x-1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS] {}', [*call(0, "f.x-1", '{"a": 1}'), *call(1, "g")]),
    ("[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}", call(0, "f")),
    (f"[TOOL_CALLS][{F}] so", [*call(0, "f"), Content(" so")]),
    (f"[TOOL_CALLS][{F}, oops]", [*call(0, "f"), Content(", oops]")]),
    ("[TOOL_CALLS]f{oops}[TOOL_CALLS]g{}", [*call(0, "f", "{oops}"), *call(1, "g")]),
    ('[TOOL_CALLS][{"name":"f","arguments":{oops', call(0, "f", "{oops")),
    (f"[TOOL_CALLS]{F}", call(0, "f")),
    (f"[TOOL_CALLS] {F}, {G} so", [*BOTH, Content(" so")]),
    ("Hm.[TOOL_CALLS][ ] so", [Content("Hm. so")]),
    (f"[TOOL_CALLS] [TOOL_CALLS] [{F}]", call(0, "f")),
    ("[TOOL_CALLS]", []),
    ("[TOOL_CALLS] so I", [Content(" so I")]),
    ("[TOOL_CALLS]f g{}", [Content("f g{}")]),
    ('f[TOOL_CALLS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [Content('f{"a": 1}'), *call(0, "g")]),
    ("f[TOOL_CALLS][ARGS]{}", [Content("f{}")]),
    ("[TOOL_CALLS]{}", [Content("{}")]),
    *plain("a [TOOL_"),
]
CASES = [
    (parser, text, parts)
    for parser, cases in (("hermes", HERMES), ("llama3_json", LLAMA3), ("mistral", MISTRAL))
    for text, parts in cases
]


@pytest.mark.parametrize(("parser", "text", "parts"), CASES)
def test_calls_are_told_from_content(parser: str, text: str, parts: list[Part]) -> None:
    form = ReplyFormat(parser)
    for choice in ("auto", "required", "named"):
        assert read(form, [text], choice) == parts
        assert read(form, list(text), choice) == parts


def test_without_a_tool_parser_calls_are_an_array_that_a_guide_makes() -> None:
    for text, parts in (
        (' [{"name":"f","parameters":{}},{"name":"g","parameters":{}}]\n', BOTH),
        ('[{"name":"f","parameters":{"a":"x', call(0, "f", '{"a":"x')),
        ('[{"na', [Content('[{"na')]),
        ("", []),
        ("Hello", [Content("Hello")]),
    ):
        for choice in ("required", "named"):
            assert read(ReplyFormat(), [text], choice) == read(ReplyFormat(), list(text), choice) == parts
        assert read(ReplyFormat(), [text]) == ([Content(text)] if text else [])


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_without_tools_everything_is_content(parser: str) -> None:
    for _, text, _ in CASES:
        assert read(ReplyFormat(parser), list(text), "none") == ([Content(text)] if text else [])


def test_calls_beyond_the_limit_leave_no_trace() -> None:
    for parser, text, after in (
        ("hermes", f"a{tagged(F, G)}b", [Content("b")]),
        ("llama3_json", '{"name":"f","parameters":{}}; {"name":"g","parameters":{}}', []),
        ("mistral", f"a[TOOL_CALLS][{F},{G}]", []),
        ("mistral", "a[TOOL_CALLS]f{}[TOOL_CALLS]g{}", []),
    ):
        before = [Content("a")] if text.startswith("a") else []
        assert read(ReplyFormat(parser), list(text), most_calls=1) == [*before, *call(0, "f"), *after]
        assert read(ReplyFormat(parser), [text], most_calls=2) == [*before, *BOTH, *after]


def test_a_call_is_told_as_soon_as_it_can_be() -> None:
    reader = ReplyFormat("hermes").reader("auto", "")
    assert reader.feed("Let me") == [Content("Let me")]
    assert reader.feed(" see <to") == [Content(" see ")]
    assert reader.feed('ol_call>\n{"name": "f", "argu') == []
    assert reader.feed('ments": ') == []
    assert reader.feed("{") == [CallBegin(0, "f"), CallArguments(0, "{")]
    assert reader.feed('"a": "so') == [CallArguments(0, '"a": "so')]
    assert reader.feed(' on"}') == [CallArguments(0, ' on"}')]
    assert reader.feed("}\n</tool_call>") == []
    assert reader.num_calls == 1
    assert reader.finish() == []


SNIPPETS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_call"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "[T"),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name":"g","parameters":', '{"x": "\\"}"}'),
    *('"arguments": "{\\"b\\": \\u00e9}"', '"name":', '"f"', '"arguments":', "1.5", "tru"),
    *'{}[],;"\\ \naéf<',
]


@pytest.mark.parametrize("seed", range(20))
def test_how_the_text_is_cut_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        form = ReplyFormat(rng.choice(TOOL_PARSERS), rng.choice(REASONING_PARSERS))
        choice: ToolChoice = rng.choice(["none", "auto", "required", "named"])
        prompt_end, most_calls = rng.choice(["", "<think>\n", "</think>\n\n"]), rng.choice([None, 1])
        text = "".join(rng.choices(SNIPPETS, k=rng.randint(1, 25)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 9)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = read(form, [text], choice, prompt_end, most_calls)
        assert read(form, pieces, choice, prompt_end, most_calls) == whole, (text, pieces)
        assert read(form, list(text), choice, prompt_end, most_calls) == whole, text


LONG = json.dumps({"a": ["x" * 20, {"b\n": [1.5, True]}] * 200, "c": "é\\" * 2000, "d": 0})
LONG = LONG.replace("0}", "1" + "0" * 2000 + "}")


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("", f'[{{"name": "f", "parameters": {LONG}}}]'),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {LONG}}}</tool_call>'),
        ("hermes", f'<tool_call>{{"arguments": {json.dumps(LONG)}, "name": "f"}}</tool_call>'),
        ("hermes", f'<tool_call>{{"x": {LONG}, "name": 1}}</tool_call>'),
        ("mistral", f"[TOOL_CALLS]f{{oops {LONG}"),
        ("hermes", f"{LONG} <tool_cal {' ' * 9000}<tool_call>"),
    ],
)
def test_no_character_is_looked_at_again_and_again(parser: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each character is examined a bounded number of times: again only if it is still held when more text arrives."""
    num_again = num_pieces = 0
    add = TextStream.add

    def counted(stream: TextStream, piece: str) -> None:
        nonlocal num_again, num_pieces
        num_again += len(stream._text) - stream._at
        num_pieces += 1
        add(stream, piece)

    monkeypatch.setattr(TextStream, "add", counted)
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    parts = read(ReplyFormat(parser, "deepseek_r1"), [*pieces[:3], "</think>", *pieces], "required", "<think>")
    assert num_again <= 12 * num_pieces
    assert sum(len(part[-1]) for part in parts) >= len(LONG)


# ---- reasoning


@pytest.mark.parametrize(
    ("parser", "prompt_end", "text", "reasoning", "content"),
    [
        ("qwen3", "", "<think>\nHm.\n\n so \n</think>\n\nHi", "Hm.\n\n so", "Hi"),
        ("qwen3", "", "\n <think>Hm.</think>Hi", "Hm.", "Hi"),
        ("qwen3", "", " Hi</think>", "", " Hi"),
        ("qwen3", "", "</think>\n\nHi", "", "Hi"),
        ("qwen3", "<think>\n", "Hm.</think>Hi </think>\nyou</thin", "Hm.", "Hi \nyou</thin"),
        ("deepseek_v4", "</think>", "</think>Hi", "", "Hi"),
        ("minicpmv", "</think>", "Hi </think>\n\nyou", "", "Hi \n\nyou"),
        ("qwen3", "", "<thin", "", "<thin"),
        ("qwen3", "assistant\n", "Hi <think>Hm.</think>", "", "Hi <think>Hm.</think>"),
        ("qwen3", "<think>\n", "Hm.\n</think>\nHi", "Hm.", "Hi"),
        ("qwen3", "<think>\n\n</think>\n\n", "Hi</think>", "", "Hi"),
        ("qwen3", "<think>Be brief.\n", "Hm.</think>Hi", "Hm.", "Hi"),
        ("qwen3", "<think></think>\nAnswer: ", "Hi</think>", "", "Hi"),
        ("qwen3", "", "<think>\n\n</think>\n\nHi <think>x</think>", "", "Hi <think>x</think>"),
        ("deepseek_r1", "", "Hm.</think>\n\nHi", "Hm.", "Hi"),
        ("deepseek_r1", "", "<think>\nHm.</think>Hi ", "Hm.", "Hi "),
        ("deepseek_r1", "<think>\n", "Hm. <think> so", "Hm. <think> so", ""),
        ("deepseek_r1", "</think>\n", "Hi", "", "Hi"),
        ("", "<think>", "Hm.</think>Hi", "", "Hm.</think>Hi"),
    ],
)
def test_reasoning_is_told_from_content(parser: str, prompt_end: str, text: str, reasoning: str, content: str) -> None:
    expected = [Reasoning(reasoning)] * bool(reasoning) + [Content(content)] * bool(content)
    for choice in ("none", "auto", "required"):
        assert read(ReplyFormat("", parser), [text], choice, prompt_end) == expected
        assert read(ReplyFormat("", parser), list(text), choice, prompt_end) == expected


@pytest.mark.parametrize(("parser", "text", "parts"), CASES)
def test_calls_come_after_reasoning_and_not_within(parser: str, text: str, parts: list[Part]) -> None:
    thought = 'I could <tool_call>{"name":"f","arguments":{}}</tool_call> [TOOL_CALLS]f{} {'
    form = ReplyFormat(parser, "qwen3")
    shown = read(ReplyFormat(parser), [text.lstrip(" \n")])
    for pieces in ([f"<think>{thought}</think>\n\n{text}"], list(f"<think>\n{thought}\n</think>{text}")):
        assert read(form, pieces) == [Reasoning(thought), *shown]


@pytest.mark.parametrize(("parser", "text", "parts"), CASES)
def test_a_call_ends_reasoning_that_is_never_closed(parser: str, text: str, parts: list[Part]) -> None:
    """The call counts even if the reasoning mentioned its marker, in any split; without one, all text is reasoning."""
    begins = begins_of(FORMATS[parser]) if parser else ()
    thought = f"I could {'' if parser == 'mistral' else ''.join(begins)} it.\n\n"  # Mistral's marker is never text
    form, whole = ReplyFormat(parser, "qwen3"), f"<think>\n{thought}{text}"
    at = next((at for at, part in enumerate(parts) if isinstance(part, CallBegin)), None)
    if at is None or not begins:
        said = "".join(part[-1] for part in parts) if begins else text  # markers without a call are dropped
        expected: list[Part] = [Reasoning(f"{thought}{said}".strip(" \t\r\n"))]
    else:
        before = "".join(part[-1] for part in parts[:at])
        expected = [Reasoning(f"{thought}{before}".strip(" \t\r\n")), *parts[at:]]
    for pieces in ([whole], list(whole)):
        assert read(form, pieces, "auto") == read(form, pieces, "required") == expected
        assert read(form, pieces, "none") == [Reasoning(f"{thought}{text}".strip(" \t\r\n"))]


# ---- special cases of formats


def test_markers_and_ids_are_those_of_the_formats() -> None:
    assert ReplyFormat().markers == frozenset()
    assert ReplyFormat("hermes", "qwen3").markers == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    for parser, shape in (("", "call_[0-9a-f]{24}"), ("hermes", "call_[0-9a-f]{24}"), ("mistral", "[a-zA-Z0-9]{9}")):
        ids = {ReplyFormat(parser).call_id("f", at) for at in range(100)}
        assert len(ids) == 100
        assert all(re.fullmatch(shape, each) for each in ids)
    kimi = ReplyFormat("kimi_k2")  # its template writes no other markers
    assert [kimi.call_id("f", 0), kimi.call_id("g-x.y", 12)] == ["functions.f:0", "functions.g-x.y:12"]
    for config, parser in (({"tool_call_parser": "hermes"}, "hermes"), ({}, ""), ({"tool_call_parser": "unknown"}, "")):
        assert own_tool_parser(config) == parser
    assert own_tool_parser({"tool_call_parser": 1}) == ""
