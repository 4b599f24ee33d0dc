"""Scripts for tests/support/scripted_model.py: tool calls and reasoning of five model families.

The templates have the families' markers but not their wording. Tests define how a server must parse the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.scripted_model import make_scripted, pad_to

FIRST_START = 1024  # tokens; leaves room for a conversation and its tools, at one token per byte
GAP = 256

QWEN3 = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{%- else %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set arguments = call.function.arguments %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{%- endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{ '}' }}
{%- else %}{{ message.content or '' }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ {'content': message.content} | tojson }}[/TOOL_RESULTS]
{%- elif message.tool_calls %}[TOOL_CALLS]
{%- for call in message.tool_calls %}{% set arguments = call.function.arguments %}
{{- '[' if loop.first else ', ' }}{{ '{"name": "' + call.function.name + '", "arguments": ' }}
{{- arguments if arguments is string else arguments | tojson }}{{ '}' }}{{ ']' if loop.last }}{% endfor %}
{{- eos_token }}
{%- else %}{{ (message.content or '') + (eos_token if message.role == 'assistant' else '') }}{% endif %}
{%- endfor %}"""

DEEPSEEK_R1 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
{%- else %}{{ ('<|User|>' if message.role == 'user' else '') + message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""


GPT_OSS = """\
{%- if tools %}{{ '<|start|>developer<|message|>namespace functions' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


class Family(NamedTuple):
    """The format of one model family. `answers`: scenario -> the model's whole output before <eos>.

    Plain content is the last scenario, so that a second turn, whose prompt includes the first turn's padding, can use
    it.
    """

    chat_template: str
    answers: Mapping[str, str]
    special_tokens: Sequence[str] = ()
    added_tokens: Sequence[str] = ()

    def start_of(self, scenario: str) -> int:
        """Returns the number of prompt tokens that selects this answer."""
        return FIRST_START + GAP * list(self.answers).index(scenario)

    def make(self, folder: Path) -> Path:
        scripts = {self.start_of(scenario): text for scenario, text in self.answers.items()}
        return make_scripted(
            folder,
            scripts,
            chat_template=self.chat_template,
            special_tokens=self.special_tokens,
            added_tokens=self.added_tokens,
        )

    def ask(self, folder: Path, scenario: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[Any]:
        """Returns the messages, padded so that the model gives the scenario's answer."""
        return pad_to(folder, messages, self.start_of(scenario), **variables)


BERLIN = '{"name": "get_weather", "arguments": {"city": "Berlin"}}'
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris, \\u00cele-de-France", "days": 3}}'
FAMILIES = {
    "qwen3": Family(
        QWEN3,
        {
            "a call after content": f"I will look.\n<tool_call>\n{BERLIN}\n</tool_call>",
            "two calls": f"<tool_call>\n{BERLIN}\n</tool_call>\n<tool_call>\n{PARIS}\n</tool_call>",
            "reasoning, content": "<think>\nThey ask for the sun.\n</think>\n\nIt shines.",
            "reasoning, a call": f"<think>\nI need a tool.\n</think>\n\n<tool_call>\n{BERLIN}\n</tool_call>",
            "a malformed call": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ber\n</tool_call>',
            "a call that never ends": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ber',
            "reasoning that never ends": "<think>\nOn the one hand, and on the other",
            "a function's tag": 'Let me see. <function=get>{"brand": "Fiat", "car_type": "TRAIN"}</function>',
            "content": "It is sunny in Zürich. ☀",
        },
        added_tokens=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    ),
    "llama3": Family(
        LLAMA3,
        {
            "a call": '{"name": "get_weather", "parameters": {"city": "Berlin"}}',
            "a call behind a tag": '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Berlin"}}',
            "two calls": (
                '{"name": "get_weather", "parameters": {"city": "Berlin"}}; '
                '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}'
            ),
            "a malformed call": '{"name": "get_weather", "parameters": {"city": ',
            "JSON that is no call": '{"city": "Berlin", "sunny": true}',
            "content": "It is sunny in Berlin.",
        },
        special_tokens=(
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|python_tag|>",
        ),
    ),
    "mistral": Family(
        MISTRAL,
        {
            "a call": f"[TOOL_CALLS][{BERLIN}]",
            "two calls": f"[TOOL_CALLS][{BERLIN}, {PARIS}]",
            "a call after content": f"I will look.[TOOL_CALLS][{BERLIN}]",
            "a malformed call": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city"',
            "content": "It is sunny in Berlin.",
        },
        special_tokens=(
            *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
    ),
    "gpt_oss": Family(
        GPT_OSS,
        {
            "reasoning, a call": (
                "<|channel|>analysis<|message|>I need a tool.<|end|><|start|>assistant<|channel|>commentary "
                'to=functions.get_weather <|constrain|>json<|message|>{"city": "Berlin"}<|call|>'
            ),
            "a call after content": (
                "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.get_weather"
                '<|channel|>commentary json<|message|>{"city": "Berlin"}<|call|>'
            ),
            "reasoning, content": (
                "<|channel|>analysis<|message|>They ask for the sun.<|end|>"
                "<|start|>assistant<|channel|>final<|message|>It shines."
            ),
            "reasoning that never ends": "<|channel|>analysis<|message|>On the one hand, and on the other",
            "content": "<|channel|>final<|message|>It is sunny in Zürich. ☀",
        },
        special_tokens=(
            *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
        ),
    ),
    "deepseek_r1": Family(
        DEEPSEEK_R1,
        {
            "reasoning, content": "They ask for the sun.\n</think>\n\nIt shines.",
            "only reasoning": "On the one hand, and on the other",
            "nothing thought": "</think>\n\nIt shines.",
        },
        special_tokens=("<|User|>", "<|Assistant|>"),
        added_tokens=("<think>", "</think>"),
    ),
}
