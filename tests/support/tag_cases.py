"""Replies in formats with their own tags, including damaged ones, and the parts that a parser must find.

Tools: `f` takes the string `city`, the integer `days` and parameters of other types; `g` takes none.
"""

from __future__ import annotations

from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part

Cases = list[tuple[str, list[Part] | None]]


def call(index: int, name: str, arguments: str = "{}") -> list[Part]:
    return [CallBegin(index, name), CallArguments(index, arguments)]


def dsml_cases(section: str, gap: str = "") -> Cases:
    mark = f"｜DSML｜{gap}"
    begin, end, close = f"<{mark}{section}>\n", f"</{mark}{section}>", f"</{mark}invoke>\n"
    f, g = f'<{mark}invoke name="f">\n', f'<{mark}invoke name="g">\n'

    def parameter(name: str, said: str, value: str) -> str:
        attribute = f' string="{said}"' if said else ""
        return f'<{mark}parameter name="{name}"{attribute}>{value}</{mark}parameter>\n'

    city, days = parameter("city", "true", "杭州 2>&1"), parameter("days", "false", "3")
    return [
        (
            f"Well.{begin}{f}{city}{days}{close}{g}{close}{end}",
            [Content("Well."), *call(0, "f", '{"city": "杭州 2>&1", "days": 3}'), *call(1, "g")],
        ),
        (f"{f}{days}{close}{g}{close}{end} so", [*call(0, "f", '{"days": 3}'), *call(1, "g"), Content(" so")]),
        *(
            (f"{begin}{f}{parameter(name, said, value)}{close}{end}", call(0, "f", arguments))
            for name, said, value, arguments in (
                ("any", "true", "null", '{"any": "null"}'),
                ("any", "false", "null", '{"any": null}'),
                ("days", "true", "42", '{"days": 42}'),
                ("city", "false", "null", '{"city": "null"}'),
                ("free", "true", "42", '{"free": "42"}'),
                ("free", "false", "[broken", '{"free": "[broken"}'),
                ("city", "", "Bonn", '{"city": "Bonn"}'),
                ("arguments", "false", '{"city": "Bonn", "days": 2}', '{"city": "Bonn", "days": 2}'),
                ("input", "true", '{"city": "Bonn"}', '{"city": "Bonn"}'),
                ("input", "false", '{"where": 1}', '{"input": {"where": 1}}'),
            )
        ),
        (  # without the end marker of a value, or of a call
            f'{begin}{f}<{mark}parameter name="city" string="true">Bonn \n{days}{end} so',
            [*call(0, "f", '{"city": "Bonn \\n", "days": 3}'), Content(" so")],
        ),
        (f'{begin}{f}{days}<{mark}parameter name="city" string="tr', call(0, "f", '{"days": 3,"city')),
        *plain(f"see <{mark}foo> and <{mark}sections> here", f"<{mark} here\nnext", "<|DSML|tool> there"),
    ]


def plain(*texts: str) -> Cases:
    """Returns cases for texts without a call."""
    return [(text, [Content(text)]) for text in texts]


def xtml(name: str, *arguments: str) -> str:
    return f'<|open|>call tool="{name}" index="1"<|sep|>{"".join(arguments)}<|close|>call<|sep|>'


def argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def answer(text: str) -> str:
    return f"<|open|>response<|sep|>{text}<|close|>response<|sep|>"


BEGIN, END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
MESSAGE_END = "<|close|>message<|sep|>"
BOTH = (xtml("f", argument("city", "string", "1"), argument("days", "number", "2")), xtml("g"))
XTML: Cases = [
    (
        f"Well.{BEGIN}{''.join(BOTH)}{END}",
        [Content("Well."), *call(0, "f", '{"city": "1", "days": 2}'), *call(1, "g")],
    ),
    (
        f"{answer('I look.')}{BEGIN}{''.join(BOTH)}{END}{MESSAGE_END}",
        [Content("I look."), *call(0, "f", '{"city": "1", "days": 2}'), *call(1, "g")],
    ),
    (f"I look.<|close|>response<|sep|>{MESSAGE_END}", [Content("I look.")]),
    (f"<|close|>response<|sep|>{BEGIN}{BOTH[1]}{END}", call(0, "g")),
    (
        BEGIN + xtml("f", argument("free", "object", '{"a": [1]}'), argument("any", "null", "null")) + END,
        call(0, "f", '{"free": {"a": [1]}, "any": null}'),
    ),
    (BEGIN + xtml("f", argument("k&amp;q<x", "string", "v")) + END, call(0, "f", '{"k&q<x": "v"}')),
    (BEGIN + xtml("a&amp;b&quot;c", argument("x", "boolean", "true")) + END, call(0, 'a&b"c', '{"x": true}')),
    (
        BEGIN + xtml("f", '<|open|>json type="object"<|sep|>{"city": "Bonn"}<|close|>json<|sep|>') + END,
        call(0, "f", '{"city": "Bonn"}'),
    ),
    (BEGIN + xtml("f", '<|open|>json type="object"<|sep|>{}<|close|>json<|sep|>') + END, call(0, "f")),
    (f'{BEGIN}<|open|>call tool="f" index="1"<|sep|><|open|>argument key="city" type="st', call(0, "f", '{"city')),
    (f"{BEGIN}so{END}", [Content(f"{BEGIN}so{END}")]),
]

MARK = "]<]minimax[>["
ORDER = (
    f'{MARK}<invoke name="f">{MARK}<city>a <b> & c\n{MARK}</city>{MARK}<days>007{MARK}</days>'
    f"{MARK}<list>{MARK}<item>1{MARK}</item>{MARK}</list>{MARK}</invoke>\n"
)
ORDERED = '{"city": "a <b> & c\\n", "days": 7, "list": ["1"]}'


def element(name: str, *inside: str) -> str:
    return f"{MARK}<{name}>{''.join(inside)}{MARK}</{name}>"


def minimax(*inside: str) -> str:
    return f'{MARK}<tool_call>\n{MARK}<invoke name="f">{"".join(inside)}{MARK}</invoke>\n{MARK}</tool_call>'


MINIMAX_M3: Cases = [
    (
        f'Yes.\n{MARK}<tool_call>\n{ORDER}{MARK}<invoke name="g">{MARK}</invoke>\n{MARK}</tool_call>',
        [Content("Yes.\n"), *call(0, "f", ORDERED), *call(1, "g")],
    ),
    *(
        (minimax(*inside), call(0, "f", arguments))
        for inside, arguments in (
            (
                [element("free", element("t", "x"), element("t", "y"), element("u", " 1 "))],
                '{"free": {"t": ["x", "y"], "u": " 1 "}}',
            ),
            ([element("free", "hi ", element("k", "v"), " so")], '{"free": {"k": "v", "$text": "hi  so"}}'),
            (
                [element("free", "x", element("$text", "child"))],
                '{"free": {"$text": "child", "$$text": "x"}}',
            ),
            ([element("free", element("tool_call", "v"))], '{"free": {"tool_call": "v"}}'),
            ([element("list"), element("city"), element("flag", " True")], '{"list": [], "city": "", "flag": true}'),
            ([element("days", "1"), f"{MARK}<city>a{MARK}</other>"], f'{{"days": 1, "city": "a{MARK}</other>"}}'),
            ([f"{MARK}<free>{MARK}<a>1{MARK}<b>2"], '{"free": {"a": {"b": "2", "$text": "1"}}}'),
        )
    ),
    (
        minimax("so ", element("days", "1")),
        [
            *(CallBegin(0, "f"), CallArguments(0, "{"), Content("so ")),
            CallArguments(0, '"days": 1}'),
        ],
    ),
    (f'{MARK}<tool_call>\n{MARK}<invoke name="f">{MARK}<city>Ber', call(0, "f", '{"city": "Ber')),
    (f'{MARK}<tool_call>\n{MARK}<invoke name="f">{MARK}<days>12', call(0, "f", '{"days": 12')),
    (f"{MARK}<tool_call>\n{MARK}</tool_call> so", [Content(" so")]),
    *plain(f'{MARK}<invoke name="f">{MARK}</invoke>', f"{MARK}<tool_call>so", MARK),
]

STEP_BEGIN, STEP_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"


def invoke(name: str, **parameters: str) -> str:
    inside = "".join(
        f'<steptml:parameter name="{key}">{value}</steptml:parameter>' for key, value in parameters.items()
    )
    return f'<steptml:invoke name="{name}">{inside}</steptml:invoke>'


STEP3: Cases = [
    (
        f"I look.\n\n<｜tool_calls_begin｜>{STEP_BEGIN}function<｜tool_sep｜>{invoke('f', city='a < 5 <b>', days='2')}"
        f"{STEP_END}{STEP_BEGIN}function<｜tool_sep｜>{invoke('g')}{STEP_END}<｜tool_calls_end｜>",
        [Content("I look.\n\n"), *call(0, "f", '{"city": "a < 5 <b>", "days": 2}'), *call(1, "g")],
    ),
    (
        f"<｜tool_calls_begin｜>{STEP_BEGIN}{invoke('g')}{STEP_END}<｜tool_sep｜>{STEP_BEGIN}{invoke('g')}{STEP_END}",
        [*call(0, "g"), *call(1, "g")],
    ),
    (f"{STEP_BEGIN}{invoke('f', city='x')}{STEP_END}", call(0, "f", '{"city": "x"}')),
    ("<｜tool_calls_begin｜>so", [Content("<｜tool_calls_begin｜>so")]),
    (f'<｜tool_calls_begin｜>{STEP_BEGIN}<steptml:invoke name="f">', [CallBegin(0, "f"), CallArguments(0, "{")]),
]
HY_V3: Cases = [
    (
        "Hm.<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>g<tool_sep>\n</tool_call>\n"
        "</tool_calls>",
        [Content("Hm."), *call(0, "f", '{"city": "Köln", "days": 2}'), *call(1, "g")],
    ),
    ("<tool_calls><tool_call>g<tool_sep></tool_call></tool_calls>", call(0, "g")),
    ("<tool_calls><tool_call>f<tool_sep><arg_key>ci", call(0, "f", '{"ci')),
    *plain("<tool_calls>so</tool_calls>", "<tool_call>g<tool_sep></tool_call>"),
]
MIMO: Cases = [
    (
        "So.<tool_call><function=f><parameter=city>\n Köln &amp;\n</parameter><parameter=days>2</parameter></function>"
        "</tool_call><tool_call><function=g></function></tool_call>",
        [Content("So."), *call(0, "f", '{"city": "\\n Köln &amp;\\n", "days": 2}'), *call(1, "g")],
    ),
    ("<tool_call><function=f><parameter=city></parameter></function></tool_call>", call(0, "f", '{"city": ""}')),
]
MINICPM5: Cases = [
    (
        'In.\n<function name="f"><param name="city"><![CDATA[  a < b\n]]></param><param name="days">2</param>'
        '</function>\n<function name="g"></function>\n',
        [Content("In.\n"), *call(0, "f", '{"city": "  a < b\\n", "days": 2}'), *call(1, "g")],
    ),
    (
        '<functionname="f"><paramname="city">上海</param><param\u0120name="days">2</param></function>'
        '<function\u0120name="g"></function>',
        [*call(0, "f", '{"city": "上海", "days": 2}'), *call(1, "g")],
    ),
    *(
        (f'<function name="f"><param name="{key}">{value}</param></function>', call(0, "f", arguments))
        for key, value, arguments in (
            ("properties", "{'city': 'Bonn'}", '{"city": "Bonn"}'),
            ("arguments", '{"city": "Bonn", "days": 1}', '{"city": "Bonn", "days": 1}'),
            ("properties", '{"where": 1}', '{"properties": {"where": 1}}'),
            ("list", "[1, 2]", '{"list": [1, 2]}'),
            ("city", "<![CDATA[a]]> b", '{"city": "a b"}'),
            ("city", "<![CDATA[a</param>\n<b>]]>", '{"city": "a</param>\\n<b>"}'),
        )
    ),
    ('<function name="f"><param name="city"><![CDATA[a</param', [*call(0, "f", '{"city": "a</param')]),
    *plain('<function name="other"><param name="x">1</param></function>', '<function name="', "<function>"),
]
ONE, TWO = '{"f": {"city": "a", "days": -2e-3}}', '{"g": {}}'
APERTUS: Cases = [
    (
        f"So. <|tools_prefix|>[{ONE}, {TWO}]<|tools_suffix|>",
        [Content("So. "), *call(0, "f", '{"city": "a", "days": -2e-3}'), *call(1, "g")],
    ),
    ('<|tools_prefix|>[{"f": {"city": "a"}', call(0, "f", '{"city": "a"}')),
    ('<|tools_prefix|>[{"f": {"city": "a', call(0, "f", '{"city": "a')),
    (
        f'<|tools_prefix|>[{{"f": {{oops}}}}, {TWO}]<|tools_suffix|>.',
        [*call(0, "f", f"{{oops}}}}, {TWO}]"), Content(".")],
    ),
    ("<|tools_prefix|>[]<|tools_suffix|> so", [Content(" so")]),
    *plain('<|tools_prefix|>[{"f": 1}]', "<|tools_prefix|>so", '<|tools_prefix|>[{"f"'),
]
NAMED = '{"name": "f", "arguments": {"a": {"b": true}}}', '{"name": "g", "arguments": {}}'
GIGACHAT3: Cases = [
    (
        f"So.<|function_call|>{NAMED[0]}<|function_call|>{NAMED[1]}",
        [Content("So."), *call(0, "f", '{"a": {"b": true}}'), *call(1, "g")],
    ),
    (f"So.<|message_sep|>\n\nfunction call<|role_sep|>\n{NAMED[1]}", [Content("So."), *call(0, "g")]),
    *plain("<|function_call|>so", "<|message_sep|>\n\nfunction", "function call of {}"),
]
DSML = dsml_cases("tool_calls")
TAG_CASES: dict[str, Cases] = {
    "apertus": APERTUS,
    "deepseek_v32": dsml_cases("function_calls"),
    "deepseek_v4": [
        *DSML,
        *((text.replace("<｜DSML｜tool_calls>", "<｜DSML｜toolcalls>"), parts) for text, parts in DSML[:1]),  # misspelt
    ],
    "deepseek_v41": dsml_cases("calls", " "),
    "gigachat3": GIGACHAT3,
    "hy_v3": HY_V3,
    "kimi_k3": XTML,
    "mimo": MIMO,
    "minicpm5": MINICPM5,
    "minimax_m3": MINIMAX_M3,
    "step3": STEP3,
}
