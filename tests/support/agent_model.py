"""A real checkpoint for agents: its answer depends only on the number of tool results in the conversation.

Agents send prompts of thousands of characters that change with every version, so the template ignores their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.scripted_model import make_scripted

FIRST, APART = 16, 400  # prompt tokens without tool results, and additional tokens for each result
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
    """Makes a model that gives `answers[i]` in a conversation with i tool results."""
    scripts = {FIRST + APART * at: answer for at, answer in enumerate(answers)}
    return make_scripted(folder, scripts, chat_template=TEMPLATE, special_tokens=("<|im_start|>", "<|im_end|>"))
