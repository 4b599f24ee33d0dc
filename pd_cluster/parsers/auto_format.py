"""Chooses the formats of calls and reasoning from a model's chat template and type, for the name `auto`.

A template writes earlier calls in the format in which the model writes new ones, so the template decides first. Knows
nothing of files.
"""

from __future__ import annotations

from typing import NamedTuple

from pd_cluster.parsers.format_table import THINKING
from pd_cluster.parsers.reasoning import NONE

AUTO = "auto"
GPT_OSS = "openai_gptoss"  # one format has both its calls and its reasoning


class KnownFormats(NamedTuple):
    """The names of a model's formats; "" if it has no such format."""

    tool_parser: str
    reasoning_parser: str = ""


class ChosenFormats(NamedTuple):
    """`because`: the reason for the choice; "" if no format was chosen."""

    formats: KnownFormats
    because: str


# (texts that a template must all contain, formats). The first match wins, so more specific rows come first.
BY_TEMPLATE: tuple[tuple[tuple[str, ...], KnownFormats], ...] = (
    (("<｜DSML｜ calls>",), KnownFormats("deepseek_v41", "deepseek_v41")),
    (("<｜DSML｜tool_calls>",), KnownFormats("deepseek_v4", "deepseek_v4")),
    (("<｜DSML｜function_calls>",), KnownFormats("deepseek_v32", "deepseek_v3")),
    (("]<]minimax[>[",), KnownFormats("minimax_m3", "minimax_m3")),
    (("<minimax:tool_call>",), KnownFormats("minimax_m2", "minimax_m2")),
    (("<|open|>", "<|sep|>"), KnownFormats("kimi_k3", "kimi_k3")),
    (("<|tool_calls_section_begin|>",), KnownFormats("kimi_k2", "kimi_k2")),
    (("<steptml:invoke",), KnownFormats("step3", "step3")),
    (("<seed:tool_call>",), KnownFormats("seed_oss", "seed_oss")),
    (("<tool_sep>", "<arg_key>"), KnownFormats("hy_v3", "hy_v3")),
    (("<|tools_prefix|>",), KnownFormats("apertus", "apertus")),
    (("<|function_call|>", "<|role_sep|>"), KnownFormats("gigachat3")),
    (("function call<|role_sep|>",), KnownFormats("gigachat3")),
    (("<|channel|>", "<|message|>", "functions."), KnownFormats("openai", GPT_OSS)),
    (("<|tool_call>call:",), KnownFormats("gemma4", "gemma4")),
    (("<start_function_call>",), KnownFormats("functiongemma")),
    (("<|START_ACTION|>", "<|START_TEXT|>"), KnownFormats("cohere_command4", "cohere_command4")),
    (("<|START_ACTION|>",), KnownFormats("cohere_command3", "cohere_command3")),
    (("<|plamo:begin_tool_requests:plamo|>",), KnownFormats("plamo3", "plamo3")),
    (("<longcat_tool_call>",), KnownFormats("longcat")),
    (("<dots_function_call>",), KnownFormats("dots")),
    (("<function_calls>",), KnownFormats("olmo3", "olmo3")),
    (("<|tool_call_start|>",), KnownFormats("lfm2", "qwen3")),
    (("<|tool_list_start|>",), KnownFormats("lfm2", "qwen3")),
    (("<|function_call_library|>",), KnownFormats("granite-20b-fc")),
    (("xLAM",), KnownFormats("xlam")),
    (("<｜tool▁calls▁begin｜>", "```json"), KnownFormats("deepseek_v3", "deepseek_r1")),
    (("<｜tool▁calls▁begin｜>",), KnownFormats("deepseek_v31", "deepseek_v3")),
    (("[TOOL_CALLS]",), KnownFormats("mistral", "mistral")),
    (("<|python_start|>",), KnownFormats("llama4_pythonic")),
    (("[func_name1(", "<|header_start|>"), KnownFormats("llama4_pythonic")),
    (("[func_name1(",), KnownFormats("pythonic")),
    (("<|python_tag|>",), KnownFormats("llama3_json")),
    (('{"name": function name, "parameters":',), KnownFormats("llama3_json")),
    (("<|action_start|>",), KnownFormats("internlm")),
    (("functools[",), KnownFormats("phi4_mini")),
    (("<|tool_call|>",), KnownFormats("granite", "granite")),
    (("<tool_calls>", "<|bom|>"), KnownFormats("jamba")),
    (("<tool_calls>",), KnownFormats("hunyuan_a13b", "hunyuan_a13b")),
    (("<arg_key>",), KnownFormats("glm45", "glm45")),
    (('<function name="', '<param name="'), KnownFormats("minicpm5", "qwen3")),
    (("<function=", "<parameter="), KnownFormats("qwen3_coder", "qwen3")),
    (("<tool_call>", "<response>"), KnownFormats("ernie45", "ernie45")),
    (("<tool_call>",), KnownFormats("hermes", "qwen3")),
)
# Prefixes of types whose templates are missing or do not identify the format; `mimo` also matches `mimo_v2_flash`.
BY_TYPE: dict[str, KnownFormats] = {
    "gemma4": KnownFormats("gemma4", "gemma4"),
    "lfm2": KnownFormats("lfm2"),
    "mimo": KnownFormats("mimo", "mimo"),
    "deepseek_v32": KnownFormats("deepseek_v32", "deepseek_v3"),
    "deepseek_v4": KnownFormats("deepseek_v4", "deepseek_v4"),
    "gpt_oss": KnownFormats("openai", GPT_OSS),
    "kimi_k3": KnownFormats("kimi_k3", "kimi_k3"),
    "minimax_m2": KnownFormats("minimax_m2", "minimax_m2"),
    "minimax_m3": KnownFormats("minimax_m3", "minimax_m3"),
    "seed_oss": KnownFormats("seed_oss", "seed_oss"),
    "apertus": KnownFormats("apertus", "apertus"),
}
ONLY_BY_TYPE = ("mimo",)  # types with templates that look like other models' templates
NO_FORMATS = KnownFormats("", "")


def formats_of_model(template: str, model_type: str) -> ChosenFormats:
    """Returns the formats for a chat template's source and the `model_type` of a config.json."""
    known_type = next((each for each in BY_TYPE if model_type == each or model_type.startswith(f"{each}_")), "")
    by_type = ChosenFormats(BY_TYPE.get(known_type, NO_FORMATS), f"model_type {model_type}" if known_type else "")
    if known_type in ONLY_BY_TYPE:
        return by_type
    for texts, formats in BY_TEMPLATE:
        if all(text in template for text in texts):
            named = f"{' and '.join(texts)} in the template"
            reasons = _reasons(formats.reasoning_parser, template)
            return ChosenFormats(formats if reasons else formats._replace(reasoning_parser=""), named)
    return by_type


def _reasons(parser: str, template: str) -> bool:
    """Returns whether a template has this reasoning's marks: some families contain models that do not reason."""
    thinking = THINKING.get(parser, NONE)
    return all(text in template for text in thinking.pieces or thinking.opens[:1])
