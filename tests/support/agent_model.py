"""A real checkpoint for agents: how it answers depends only on how many results of tools a conversation has.

Agents send prompts of thousands of characters that differ with each of their versions, so the template leaves them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.scripted_model import make_scripted

FIRST, APART = 16, 400  # prompt tokens without results, and more of them with each result
TEMPLATE = (
    "{%- set results = messages | selectattr('role', 'equalto', 'tool') | list | length -%}"
    "{%- set num_tools = tools | length if tools else 0 -%}"
    f"{{{{- '.' * ({FIRST} + {APART} * results) -}}}}"
)
FLAGS = [
    *("--max-model-len=4096", "--num-blocks=600", "--enable-auto-tool-choice", "--tool-call-parser=hermes"),
    '--structured-outputs-config={"disable_any_whitespace": true}',
]


def make_agent_model(folder: Path, answers: Sequence[str]) -> Path:
    """Makes a model that says the i-th answer in a conversation with i results of tools."""
    scripts = {FIRST + APART * at: answer for at, answer in enumerate(answers)}
    return make_scripted(folder, scripts, chat_template=TEMPLATE, special_tokens=("<|im_start|>", "<|im_end|>"))
