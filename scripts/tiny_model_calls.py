"""How tools and calls appear in the tiny chat model's prompts: its chat template, and the same text for training.

A tool is written as a call with types in place of values, so that the model can copy it and fill in the values.
"""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

Value = str | int
Args = dict[str, Value]
TOOL_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {%- for part in content -%}
            {%- if part['type'] == 'text' -%}
                {{- part['text'] -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro kind(schema) -%}
    {%- if schema is mapping and schema['enum'] -%}
        {{- '"' + schema['enum'] | join('|') + '"' -}}
    {%- elif schema is mapping and schema['type'] is string and schema['type'] != 'string' -%}
        {{- schema['type'] -}}
    {%- else -%}
        {{- '"string"' -}}
    {%- endif -%}
{%- endmacro -%}
{%- macro signature(function) -%}
    {{- '{"name": "' + function['name'] + '", "arguments": {' -}}
    {%- set parameters = function['parameters'] or {} -%}
    {%- set required = parameters['required'] or [] -%}
    {%- set shown = namespace(any=false) -%}
    {%- for name, schema in (parameters['properties'] or {}).items() -%}
        {%- if not required or name in required -%}
            {{- (', "' if shown.any else '"') + name + '": ' + kind(schema) -}}
            {%- set shown.any = true -%}
        {%- endif -%}
    {%- endfor -%}
    {{- '}}' -}}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages and messages[0]['role'] == 'system' -%}
        {{- text(messages[0]['content']) + '\\n' -}}
    {%- endif -%}
    {{- '<tools>\\n' -}}
    {%- for tool in tools -%}
        {{- signature(tool['function'] or tool) + '\\n' -}}
    {%- endfor -%}
    {{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if not (tools and loop.first and message['role'] == 'system') -%}
        {{- '<|im_start|>' + message['role'] + '\\n' + text(message['content']) -}}
        {%- for call in message['tool_calls'] or [] -%}
            {%- set function = call['function'] or call -%}
            {%- set arguments = function['arguments'] -%}
            {{- '\\n' if message['content'] or not loop.first -}}
            {{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' -}}
            {{- arguments if arguments is string else arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""The model's chat template: ChatML, with tools as signatures that list the required parameters."""


class Tool(NamedTuple):
    """A tool; maps each parameter's name to its type, or to its allowed values joined by |."""

    name: str
    parameters: dict[str, str]

    def signature(self) -> str:
        """Returns a call with types in place of values."""
        is_text = {"string": True, "integer": False, "number": False}
        kinds = [
            f'"{name}": ' + (f'"{kind}"' if is_text.get(kind, True) else kind) for name, kind in self.parameters.items()
        ]
        return f'{{"name": "{self.name}", "arguments": {{' + ", ".join(kinds) + "}}"

    def schema(self) -> dict[str, Any]:
        """Returns the tool in a request's format."""
        properties = {
            name: {"type": "string", "enum": kind.split("|")} if "|" in kind else {"type": kind}
            for name, kind in self.parameters.items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


@dataclass(frozen=True)
class ToolTurn:
    """A question, the call that it asks for (None: no tool fits), the tool's result and the answer."""

    user: str
    answer: str
    arguments: Args | None = None
    tool: Tool | None = None
    result: str = ""

    def call(self) -> str:
        assert self.tool is not None
        call = json.dumps({"name": self.tool.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"

    def messages(self) -> list[tuple[str, str]]:
        """Returns the roles and texts that the turn adds to the conversation."""
        answered = [("assistant", self.answer)]
        if self.tool is not None:
            answered = [("assistant", self.call()), ("tool", self.result), *answered]
        return [("user", self.user), *answered]


def system_text(system: str | None, tools: list[Tool]) -> str:
    lines = [system] if system is not None else []
    return "\n".join([*lines, "<tools>", *(tool.signature() for tool in tools), "</tools>"])
