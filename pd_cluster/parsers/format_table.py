"""The formats of tool calls and of reasoning by name, as the models' own chat templates write them."""

from __future__ import annotations

from pd_cluster.parsers.brace_markup import BraceCalls
from pd_cluster.parsers.call_format import Format
from pd_cluster.parsers.harmony import CHANNEL, MARKS, MESSAGE, ChannelCalls, Channels
from pd_cluster.parsers.irregular_formats import ArrayCalls, Llama3Calls, MistralCalls
from pd_cluster.parsers.irregular_readers import TOOL_CALLS
from pd_cluster.parsers.json_formats import JSON_FORMATS, JSON_THINKING
from pd_cluster.parsers.json_markup import JsonCalls, NamedCalls
from pd_cluster.parsers.nested_markup import NestedCalls
from pd_cluster.parsers.pythonic import PythonicCalls
from pd_cluster.parsers.pythonic_sections import PythonicSections
from pd_cluster.parsers.reasoning import Thinking
from pd_cluster.parsers.tag_formats import DSML_V4, DSML_V41, TAGGED, XTML, XTML_MESSAGE_END, XTML_RESPONSE
from pd_cluster.parsers.xml_markup import XmlCalls


def begins_of(form: Format) -> tuple[str, ...]:
    """Returns the texts that always begin a call; empty if the format has none."""
    match form:
        case JsonCalls(begin=begin, begins=others, is_word=False):
            return (begin, *others)
        case NamedCalls(begin=begin, opening=opening):
            return (opening, begin) if opening else (begin,)
        case XmlCalls(lone=True, is_section=False, name=name):
            return (*form.all_begins, name[0])
        case XmlCalls():
            return form.all_begins
        case NestedCalls(begin=begin):
            return (begin,)
        case MistralCalls():
            return (TOOL_CALLS,)
        case BraceCalls(begin=begin) | PythonicSections(begin=begin):
            return (begin,)
    return ()


HERMES = JsonCalls("<tool_call>", "</tool_call>")
# Tokens that both calls and turns use. In earlier replies they become text; otherwise they could begin another role's
# turn.
TURN_MARKS = frozenset(
    (*MARKS, *XTML, "<|plamo:msg|>", "<|message_sep|>", "<|message_sep|>\n\n", "<|role_sep|>", "<|role_sep|>\n")
)
# Formats whose markup consists only of tokens. A call that `tool_choice` forbids is dropped, because it is not text.
TOKEN_MARKUP = frozenset(("kimi_k3", "plamo3"))
UNMARKED = ArrayCalls()
CHANNEL_CALLS = ChannelCalls()
FORMATS: dict[str, Format] = {
    **TAGGED,
    "apertus": JsonCalls("<|tools_prefix|>", "<|tools_suffix|>", is_array=True, key=""),
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
    "gigachat3": JsonCalls(
        "<|function_call|>",
        begins=("<|message_sep|>\n\nfunction call<|role_sep|>\n",),
        pieces=("<|message_sep|>", "<|message_sep|>\n\n", "<|role_sep|>", "<|role_sep|>\n"),
    ),
    "granite": JsonCalls("<|tool_call|>", is_array=True, begins=("<tool_call>",)),
    "granite4": HERMES,
    "hermes": HERMES,
    "hunyuan_a13b": JsonCalls("<tool_calls>", "</tool_calls>", is_array=True),
    "internlm": JsonCalls(
        "<|action_start|><|plugin|>", "<|action_end|>", key="parameters", pieces=("<|action_start|>", "<|plugin|>")
    ),
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
    "llama4_pythonic": PythonicCalls("<|python_start|>", "<|python_end|>"),
    "mistral": MistralCalls(),
    "openai": CHANNEL_CALLS,
    "phi4_mini": JsonCalls("functools", is_array=True, is_word=True),
    "pythonic": PythonicCalls(),
    "qwen3": HERMES,
}
THINKING: dict[str, Thinking] = {
    "apertus": Thinking(
        "perhaps", opens=("<|inner_prefix|>",), closes=("<|inner_suffix|>",), ends=("<|tools_prefix|>",)
    ),
    "deepseek_r1": Thinking("reasoning"),
    "deepseek_v3": Thinking("content"),
    "deepseek_v4": Thinking("perhaps", ends=DSML_V4.all_begins),
    "deepseek_v41": Thinking("perhaps", ends=DSML_V41.all_begins),
    "ernie45": Thinking("reasoning", wraps=("<response>", "</response>")),
    "ernie-45-vl": Thinking("perhaps"),
    "ernie-45-vl-thinking": Thinking("reasoning"),
    "gemma": Thinking("perhaps", opens=("<|channel>thought", "<|channel>"), closes=("<channel|>",)),
    "glm45": Thinking("perhaps"),
    "glm47": Thinking("reasoning"),
    "granite": Thinking(
        "perhaps",
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
    ),
    "hunyuan_a13b": Thinking("perhaps", wraps=("<answer>", "</answer>")),
    "hy_v3": Thinking("perhaps"),
    "kimi_k2": Thinking("perhaps", ends=("<|tool_calls_section_begin|>",)),
    "kimi_k3": Thinking(
        "perhaps",
        opens=("<|open|>think<|sep|>",),
        closes=("<|close|>think<|sep|>",),
        wraps=(*XTML_RESPONSE, XTML_MESSAGE_END),
        pieces=XTML,
    ),
    "ling3": Thinking("perhaps"),
    "mimo": Thinking("perhaps"),
    "minimax_m2": Thinking("reasoning"),
    "minimax_m3": Thinking("perhaps", opens=("<mm:think>",), closes=("</mm:think>",), may_close=True),
    "mistral": Thinking("perhaps", opens=("[THINK]",), closes=("[/THINK]",)),
    "olmo3": Thinking("reasoning"),
    "openai_gptoss": Channels("perhaps", opens=(f"{CHANNEL}analysis{MESSAGE}",), closes=(f"{CHANNEL}final{MESSAGE}",)),
    "poolside_v1": Thinking("content"),
    "qwen3": Thinking("perhaps"),
    "seed_oss": Thinking("perhaps", opens=("<seed:think>",), closes=("</seed:think>",)),
    "step3": Thinking("reasoning"),
    "step3p5": Thinking("reasoning"),
}
FORMATS |= JSON_FORMATS
THINKING |= JSON_THINKING

# vLLM's names for the formats above
CALL_ALIASES = {
    "ernie45": "hermes",
    "jamba": "hunyuan_a13b",
    "llama4_json": "llama3_json",
    "phi4_mini_json": "phi4_mini",
    "qwen3_json": "hermes",
}
FORMATS |= {name: FORMATS[other] for name, other in CALL_ALIASES.items()}
