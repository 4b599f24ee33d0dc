"""Special replies in formats with calls in JSON, Python or Gemma's braces; json_writers.py has the usual ones."""

from __future__ import annotations

from tests.support.reply_cases import Case, Reply

NESTED = {"place": {"city": "Köln", "number": 3}, "list": [1, [], {"a": None}], "flag": False}
TRICKY = "}]) {[( </tool_call> <b>\"q\" 'x'\n日本 \\ ,;"
TRICKY_JSON = r"""{"city": "}]) {[( </tool_call> <b>\"q\" 'x'\n日本 \\ ,;"}"""
F, G = {"city": "Bonn", "days": 2}, {}
F_JSON = '{"city": "Bonn", "days": 2}'
F_CALL = f'{{"name": "f", "arguments": {F_JSON}}}'


def object_of(name: str = "name", arguments: str = "arguments", before: str = "") -> str:
    return f'{{{before}"{name}": "NAME", "{arguments}": ARGS}}'


FENCED = (
    Reply('Yes.\n```json\n[{"name": "f", "arguments": {}}]\n```', "Yes.\n", (("f", {}),)),
    Reply('```json\n{"a": 1}\n``` is JSON.', '```json\n{"a": 1}\n``` is JSON.'),
    Reply('[TOOL_CALLS][{"name": "f", "arguments": {"days": 1}}]', calls=(("f", {"days": 1}),)),
    Reply('So <tool_call>[{"name": "f", "arguments": {}}]</tool_call>.', "So .", (("f", {}),)),
    Reply('<think>Hm [1]</think>\n[{"name": "g", "arguments": {}}]', "<think>Hm [1]</think>", (("g", G),)),
    Reply("[1, 2] are numbers", "[1, 2] are numbers"),
    Reply('[{"name": "f", "arguments": {"city": "北京"}}] so', " so", (("f", {"city": "北京"}),)),
)
# ---- Gemma's braces


def brace_replies(begin: str, end: str, q: str) -> tuple[Reply, ...]:
    def call(name: str, inner: str) -> str:
        return f"{begin}call:{name}{{{inner}}}{end}"

    f, g = call("f", f"city:{q}Bonn{q},days:2"), call("g", "")
    nested = f"place:{{city:{q}Köln{q},number:3}},list:[1,[],{{a:null}}],flag:false"
    return (
        Reply(f, calls=(("f", F),)),
        Reply(g, calls=(("g", G),)),
        Reply(f + g, calls=(("f", F), ("g", G))),
        Reply(f"{f}\n{f}", calls=(("f", F), ("f", F))),
        Reply(f"I look.\n\n{f}", "I look.\n\n", (("f", F),)),
        Reply(f"{f}<div>", "<div>", (("f", F),)),
        Reply(f"One: {f} two: {g} three.", "One:  two:  three.", (("f", F), ("g", G))),
        Reply(call("f", nested), calls=(("f", NESTED),)),
        Reply(call("f", f"city:{q}{TRICKY}{end}{begin}{q}"), calls=(("f", {"city": f"{TRICKY}{end}{begin}"}),)),
        Reply(call("f", f" city : {q} a {q} , days : 1 , "), calls=(("f", {"city": " a ", "days": 1}),)),
        Reply(
            call("f", f"{q}city{q}:{q}x{q},list:[{q}a, b{q},{q}{q}]"),
            calls=(("f", {"city": "x", "list": ["a, b", ""]}),),
        ),
        Reply(
            call("f", "share:-1.5e-3,days:0,flag:true,any:null"),
            calls=(("f", {"share": -1.5e-3, "days": 0, "flag": True, "any": None}),),
        ),
        Reply(call("f", "city:12345,days:7,share:3."), calls=(("f", {"city": "12345", "days": 7, "share": 3.0}),)),
        Reply(
            call("f", f"days:{q}7{q},place:{{city:Rome,number:{q}4{q}}}"),
            calls=(("f", {"days": 7, "place": {"city": "Rome", "number": 4}}),),
        ),
        Reply(f"{begin}:weather.get-1{{city:{q}日本{q}}}{end}", calls=(("weather.get-1", {"city": "日本"}),)),
        Reply(f"{begin}call:f{{city:{q}Bo", calls=(("f", '{"city": "Bo'),)),
        Reply(f"{begin}call:f{{city:{q}Bonn{q},da", calls=(("f", '{"city": "Bonn"da'),)),
        Reply(f"{begin}call:f{{days:2,list:[1{end} so", " so", (("f", {"days": 2, "list": [1]}),)),
        Reply(f"{begin}call:f{{days:2 x{end} so {g}", " so ", (("f", {"days": "2 x"}), ("g", G))),
        Reply(f"{begin}{end}None.", "None."),
        Reply(f"{begin}call:bad f no brace{end}{f}", f"{begin}call:bad f no brace{end}", (("f", F),)),
        Reply(f"call:f{{days:1}} {q} {{", f"call:f{{days:1}} {q} {{"),
        Reply("", ""),
    )


# ---- Python


def python_replies(begin: str, end: str, comma: str) -> tuple[Reply, ...]:
    def calls(*given: str) -> str:
        return begin + comma.join(given) + end

    f, g = calls("f(city='Bonn', days=2)"), calls("g()")
    one = begin + "f(city='Bonn', days=2"
    return (
        Reply(f, calls=(("f", F),)),
        Reply(g, calls=(("g", G),)),
        Reply(calls("f(city='Bonn', days=2)", "g()"), calls=(("f", F), ("g", G))),
        Reply(f"{f}\n{g}\n", calls=(("f", F), ("g", G))),
        Reply(f"I look.\n\n{f}", "I look.\n\n", (("f", F),)),
        Reply(f"{f}\nDone.", "\nDone.", (("f", F),)),
        Reply(f"One: {f} two: {g} three.", "One:  two:  three.", (("f", F), ("g", G))),
        Reply(
            calls("f(place={'city': 'Köln', \"number\": 3}, list=[1, [], {'a': None}], flag=False)"),
            calls=(("f", NESTED),),
        ),
        Reply(calls(f"f(city={TRICKY_JSON[9:-1]})"), calls=(("f", {"city": TRICKY}),)),
        Reply(calls("f(flag=null, list=[true, null, 'a'])"), calls=(("f", {"flag": None, "list": [True, None, "a"]}),)),
        Reply(
            calls("f(days=07, list={'b', 'a'}, share=-1.5e-3)"),
            calls=(("f", {"days": 7, "list": ["b", "a"], "share": -1.5e-3}),),
        ),
        Reply(calls("f(city='sed -n '1,2p' a', days=1)"), calls=(("f", {"city": "sed -n '1,2p' a", "days": 1}),)),
        Reply(calls("f(city='a \"b\"\nc\0 \\'d\\'')"), calls=(("f", {"city": "a \"b\"\nc\0 'd'"}),)),
        Reply(calls("f(city='python -c \"p(x='\\,'))\"')"), calls=(("f", {"city": "python -c \"p(x='\\,'))\""}),)),
        Reply(calls("a.b-c(x='日本 ]')"), calls=(("a.b-c", {"x": "日本 ]"}),)),
        Reply(one, calls=(("f", '{"city": "Bonn", "days": 2'),)),
        Reply(f"{f}{begin}f(city='Bo", calls=(("f", F), ("f", '{"city": \'Bo'))),
        Reply(
            calls("f(days=x y, city='a')") + " so", " so", (("f", "{\"days\": x y, city='a')" + end[: end.index("<")]),)
        ),
        Reply(f"{begin}{end}None.", "None."),
        Reply(f"{begin}no call{end}", f"{begin}no call{end}"),
        Reply("[f(x)] and f(a=1)", "[f(x)] and f(a=1)"),
        Reply("", ""),
    )


ECHO = "[f(city='a]')]<|tool_call_end|>"
LFM2_JSON = (
    Reply(
        '<|tool_call_start|>[{"name":"f","arguments":{"days": 1}},{"name":"g","arguments":{}}]<|tool_call_end|> So.',
        " So.",
        (("f", {"days": 1}), ("g", G)),
    ),
    Reply("<|tool_call_start|> [ f(days=1) , ] <|tool_call_end|>", calls=(("f", {"days": 1}),)),
    Reply(f"<|tool_call_start|>{ECHO}{ECHO}So.", "So.", (("f", {"city": "a]"}),)),
    Reply(f"<|tool_call_start|>{ECHO}\n{ECHO[:-1]}", f"\n{ECHO[:-1]}", (("f", {"city": "a]"}),)),
)


# ---- tags

DOTS = (
    '<dots_function_call><invoke name="f"><parameter name="city">Bonn</parameter><parameter name="days">2</parameter>'
    "</invoke>{}</dots_function_call>"
)
DOTS_REPLIES = (
    Reply(f"<dots_function_call>{F_CALL}</dots_function_call>", calls=(("f", F),)),
    Reply(f"So <dots_function_call>\n{F_CALL}\n</dots_function_call> so", "So  so", (("f", F),)),
    Reply(DOTS.format("") + f"<dots_function_call>{F_CALL[:-10]}", calls=(("f", F), ("f", F_JSON[:-9]))),
    Reply(DOTS.format(""), calls=(("f", F),)),
    Reply("ok" + DOTS.format('<invoke name="g"></invoke>'), "ok", (("f", F), ("g", G))),
    Reply(DOTS.format("") * 2, calls=(("f", F), ("f", F))),
    Reply('<dots_function_call><invoke name="f"><parameter name="city">B', calls=(("f", '{"city": "B'),)),
    Reply("<dots_function_call>no</dots_function_call>", "<dots_function_call>no</dots_function_call>"),
    Reply("answer <dots_func", "answer <dots_func"),
)


# ---- with reasoning

PLAMO_CALL = (
    "<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME<|plamo:end_tool_name:plamo|>"
    "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>ARGS<|plamo:end_tool_arguments:plamo|>"
    "<|plamo:end_tool_request:plamo|>"
)
PLAMO_SECTION = ("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>")
PLAMO_G = PLAMO_CALL.replace("NAME", "g").replace("ARGS", "{}")
PLAMO_REPLIES = (
    Reply(f"so{PLAMO_SECTION[0]}{PLAMO_G}", calls=(("g", G),), reasoning="so"),
    Reply(f"<|plamo:end_think:plamo|>A.{PLAMO_SECTION[0]}{PLAMO_G[:-4]}", "A.", (("g", G),)),
    Reply(  # without the marker that begins a call and without the one that announces JSON
        f"<|plamo:end_think:plamo|>{PLAMO_SECTION[0]}{PLAMO_G[PLAMO_G.index('<|plamo:begin_tool_name') :]}".replace(
            "<|plamo:constrain|>json", ""
        ),
        calls=(("g", G),),
    ),
    Reply(f"<|plamo:end_think:plamo|>{PLAMO_SECTION[0]}no", f"{PLAMO_SECTION[0]}no"),
    Reply("so <|plamo:end_", reasoning="so <|plamo:end_"),
)
COHERE_CALL = object_of("tool_name", "parameters", '"tool_call_id": "0", ')
COHERE_SECTION = ("<|START_ACTION|>\n[\n    ", "\n]\n<|END_ACTION|>")


def thought_through(before: str, after: str, replies: tuple[Reply, ...]) -> tuple[Reply, ...]:
    """Returns the replies, each after some reasoning."""
    return tuple(reply._replace(text=f"{before}Hm {{[.{after}{reply.text}", reasoning="Hm {[.") for reply in replies)


def cohere_replies(kind: str) -> tuple[Reply, ...]:
    begin, end = f"<|START_{kind}|>", f"<|END_{kind}|>"
    think, thought = "<|START_THINKING|>", "<|END_THINKING|>"
    action = f"{COHERE_SECTION[0]}{COHERE_CALL.replace('NAME', 'f').replace('ARGS', F_JSON)}{COHERE_SECTION[1]}"
    return (
        Reply(f"{think} I call.{thought}{action}", calls=(("f", F),), reasoning="I call."),
        Reply(
            f"{think}A <co>🌈</co: 0:[1]>.{thought}\n{begin}foo <co>bar</co: 0:[1,2],1:[3,4]>{end}",
            "foo bar",
            reasoning="A 🌈.",
        ),
        Reply(
            f"{think}Hm.{thought}{begin}It is <co> x </co >, 1 < 2 <c{end}",
            "It is  x </co >, 1 < 2 <c",
            reasoning="Hm.",
        ),
        Reply(f"{begin}It is.{end}", "It is."),
        Reply(f"{think}only this{thought}", reasoning="only this"),
        Reply(f"{think}only this </co", reasoning="only this </co"),
        Reply(f"{begin}I look.{end}{action}", "I look.", (("f", F),)),
        Reply("It is.", "It is."),
    )


OLMO3 = python_replies("<function_calls>", "</function_calls>", "\n")
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>')
GEMMA_REPLIES = (
    Reply("<|channel>thought\nSo\nit is.<channel|>Yes.", "Yes.", reasoning="So\nit is."),
    Reply("<|channel>thought\n<channel|>Yes.", "Yes."),
    Reply("<|channel>thousand reasons<channel|>Yes.", "Yes.", reasoning="thousand reasons"),
    Reply("thought\nHm.<channel|>Yes.", "Yes.", reasoning="Hm."),
    Reply("thoughtful", "thoughtful"),
    Reply("<|channel>thought", ""),
    Reply("<|channel>thought\nI call.<|tool_call>call:g{}<tool_call|>", calls=(("g", G),), reasoning="I call."),
    Reply("It is <|channel>.", "It is <|channel>."),
)
CASES = (
    Case(
        "ernie45",
        replies=(Reply(f"So.\n</think>\n\n<tool_call>\n{F_CALL}\n</tool_call>\n", "So.\n</think>\n\n", (("f", F),)),),
    ),
    Case(
        "ernie45", "ernie45", (Reply("Hm.\n</think>\n\n<response>\nIt is.\n</response>\n", "It is.", reasoning="Hm."),)
    ),
    Case("jamba", replies=(Reply(f" Sure!<tool_calls>[\n    {F_CALL}\n]</tool_calls>", " Sure!", (("f", F),)),)),
    Case(
        "longcat", replies=(Reply(f"<longcat_tool_call>\n{F_CALL}\n</longcat_tool_call>\nSo.", "\nSo.", (("f", F),)),)
    ),
    Case(
        "granite-20b-fc",
        replies=(Reply(f"Hm.\n<function_call> {F_CALL}\n<function_call> {F_CALL}", "Hm.\n", (("f", F), ("f", F))),),
    ),
    Case("cohere_command3", "cohere_command3", cohere_replies("RESPONSE")),
    Case("cohere_command4", "cohere_command4", (*cohere_replies("TEXT"), *cohere_replies("RESPONSE"))),
    Case("plamo3", "plamo3", PLAMO_REPLIES),
    Case("xlam", replies=FENCED),
    Case("dots", replies=DOTS_REPLIES),
    Case("gemma4", replies=brace_replies(*GEMMA)),
    Case(
        "gemma4",
        "gemma4",
        (*GEMMA_REPLIES, *thought_through("<|channel>thought\n", "<channel|>", brace_replies(*GEMMA))),
    ),
    Case("functiongemma", replies=brace_replies("<start_function_call>", "<end_function_call>", "<escape>")),
    Case("lfm2", replies=(*python_replies("<|tool_call_start|>[", "]<|tool_call_end|>", ", "), *LFM2_JSON)),
    Case("olmo3", replies=OLMO3),
    Case("olmo3", "olmo3", thought_through("<think>", "</think>", OLMO3)),
)
