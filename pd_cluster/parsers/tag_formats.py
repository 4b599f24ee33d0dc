"""The formats of tool calls with arguments between tags, by name, as the models' chat templates write them."""

from __future__ import annotations

from dataclasses import replace

from pd_cluster.parsers.call_format import Format
from pd_cluster.parsers.nested_markup import NestedCalls
from pd_cluster.parsers.xml_markup import XmlCalls
from pd_cluster.parsers.xml_tags import ValueKind

QWEN_XML = XmlCalls(
    begin="<tool_call>",
    end="</tool_call>",
    name=("<function=", ">"),
    close="</function>",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    line="\n",
    lone=True,
)
GLM = XmlCalls(
    begin="<tool_call>",
    end="</tool_call>",
    name=("", ""),
    close="",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)
MIMO = replace(QWEN_XML, line="")  # without newlines around values
WRAPPERS = ("arguments", "input")  # DeepSeek's models sometimes write all arguments under one of these


def dsml(section: str, gap: str = "", begins: tuple[str, ...] = ()) -> XmlCalls:
    """Returns DeepSeek's markup from V3.2 on. `gap`: the text between its token and a tag's name."""
    token = "｜DSML｜"
    return XmlCalls(
        begin=f"<{token}{gap}{section}>",
        end=f"</{token}{gap}{section}>",
        name=(f'<{token}{gap}invoke name="', '">'),
        close=f"</{token}{gap}invoke>",
        key=(f'<{token}{gap}parameter name="', '">'),
        value=("", f"</{token}{gap}parameter>"),
        lone=True,
        is_section=True,
        begins=tuple(f"<{token}{gap}{other}>" for other in begins),
        kind=ValueKind("string", "true", "false"),
        wrappers=WRAPPERS,
        pieces=(token,),
    )


DSML_V4 = dsml("tool_calls", begins=("toolcalls",))
DSML_V41 = dsml("calls", " ")
XTML = ("<|open|>", "<|close|>", "<|sep|>")  # Kimi K3's tokens
XTML_RESPONSE = ("<|open|>response<|sep|>", "<|close|>response<|sep|>")
XTML_MESSAGE_END = "<|close|>message<|sep|>"
TAGGED: dict[str, Format] = {
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": DSML_V4,
    "deepseek_v41": DSML_V41,
    "glm45": GLM,
    "glm47": GLM,
    "hy_v3": XmlCalls(
        begin="<tool_calls>",
        end="</tool_calls>",
        name=("<tool_call>", "<tool_sep>"),
        close="</tool_call>",
        key=GLM.key,
        value=GLM.value,
        is_section=True,
    ),
    "kimi_k3": XmlCalls(
        begin="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        name=('<|open|>call tool="', '"<|sep|>'),
        close="<|close|>call<|sep|>",
        key=('<|open|>argument key="', '"<|sep|>'),
        value=("", "<|close|>argument<|sep|>"),
        is_section=True,
        fillers=(*XTML_RESPONSE, XTML_MESSAGE_END),
        leads=XTML_RESPONSE,
        kind=ValueKind("type", "string"),
        index="index",
        escapes=True,
        body=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
        pieces=XTML,
    ),
    "ling3": GLM,
    "mimo": MIMO,
    "minicpm5": XmlCalls(
        begin='<function name="',
        end="</function>",
        name=("", '">'),
        close="",
        key=('<param name="', '">'),
        value=("", "</param>"),
        begins=('<functionname="', '<function\u0120name="'),  # the blank before `name` may be lost
        keys=('<paramname="', '<param\u0120name="'),
        quote=("<![CDATA[", "]]>"),
        wrappers=("arguments", "properties"),
        needs_tool=True,
    ),
    "minimax_m2": XmlCalls(
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        name=('<invoke name="', '">'),
        close="</invoke>",
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        is_section=True,
    ),
    "minimax_m3": NestedCalls("]<]minimax[>["),
    "poolside_v1": GLM,
    "qwen3_coder": QWEN_XML,
    "qwen3_xml": QWEN_XML,
    "seed_oss": XmlCalls(
        begin="<seed:tool_call>",
        end="</seed:tool_call>",
        name=("<function=", ">"),
        close="</function>",
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        line="\n",
    ),
    "step3": XmlCalls(
        begin="<｜tool_calls_begin｜>",
        end="<｜tool_calls_end｜>",
        name=('<steptml:invoke name="', '">'),
        close="</steptml:invoke>",
        key=('<steptml:parameter name="', '">'),
        value=("", "</steptml:parameter>"),
        is_section=True,
        begins=("<｜tool_call_begin｜>",),
        around=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
        fillers=("<｜tool_call_begin｜>", "function<｜tool_sep｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
    ),
    "step3p5": QWEN_XML,
}
