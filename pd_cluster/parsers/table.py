"""The formats of tool calls by name, each as the chat template of the models' card writes it."""

from __future__ import annotations

from pd_cluster.parsers.formats import Format
from pd_cluster.parsers.json_markup import JsonCalls, NamedCalls
from pd_cluster.parsers.own_markup import ArrayCalls, Llama3Calls, MistralCalls
from pd_cluster.parsers.xml_markup import XmlCalls

HERMES = JsonCalls("<tool_call>", "</tool_call>")
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
UNMARKED = ArrayCalls()
FORMATS: dict[str, Format] = {
    "deepseek_v3": NamedCalls(
        begin="<｜tool▁call▁begin｜>",
        head=(["text", "function"], ["exact", "<｜tool▁sep｜>"]),
        tail=(["text", "\n"],),
        separator="```json",
        fence="```",
        end="<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
        around=r"^\s*function<｜tool▁sep｜>",
    ),
    "deepseek_v31": NamedCalls(
        begin="<｜tool▁call▁begin｜>",
        separator="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        opening="<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    "glm45": GLM,
    "glm47": GLM,
    "granite": JsonCalls("<|tool_call|>", is_array=True, begins=("<tool_call>",)),
    "granite4": HERMES,
    "hermes": HERMES,
    "hunyuan_a13b": JsonCalls("<tool_calls>", "</tool_calls>", is_array=True),
    "internlm": JsonCalls("<|action_start|><|plugin|>", "<|action_end|>", key="parameters"),
    "kimi_k2": NamedCalls(
        begin="<|tool_call_begin|>",
        head=(["text", "functions."],),
        tail=(["pattern", ":[0-9]{1,4}"],),
        separator="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        around=r"^\s*functions\.|:[0-9]+\s*$",
    ),
    "llama3_json": Llama3Calls(),
    "minimax_m2": XmlCalls(
        begin="<minimax:tool_call>",
        end="</minimax:tool_call>",
        name=('<invoke name="', '">'),
        close="</invoke>",
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        is_section=True,
    ),
    "mistral": MistralCalls(),
    "phi4_mini": JsonCalls("functools", is_array=True),
    "qwen3": HERMES,
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
}
