"""Prompts of conversations are those that transformers makes of the same template."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from pd_cluster.text.chat_template import ChatTemplate
from tests.support.checkpoints import make_tokenizer

MARKUP = (
    "{{- bos_token }}{%- if tools %}\n# Tools\n{%- for tool in tools %}\n{{ tool | tojson(indent=2) }}{%- endfor %}\n"
    "{%- endif %}{%- for message in messages %}\n  <{{ message['role'] }}>{{ message.content%s }}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}{{ call.function.arguments | tojson }}"
    "{%- endfor %}{%- endif %}</{{ message.role }}>{%- endfor %}"
    "{%- for document in documents or [] %}({{ document.title }}){%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>{%- endif %}"
)
SOURCES = {
    "as it is": MARKUP.replace("%s", ""),
    "trimmed": MARKUP.replace("%s", " | trim"),
    "marked": MARKUP.replace("%s", "").replace("</{{", "{% generation %}!{% endgeneration %}</{{"),
    "compact": MARKUP.replace("%s", "").replace("tool | tojson(indent=2)", "tool | tojson(separators=(',', ':'))"),
    "open": "{% for message in messages %}{{ message.content }}{% if not loop.last %}\n{% endif %}{% endfor %}",
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": ["<ä>", None]}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": " be brief\n"}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon \n"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "{}", "tool_call_id": "1"},
        {"role": "assistant", "content": "So"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "ä < b", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), bos_token="<bos>")


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"documents": [{"title": "t"}]}], ids=str)
@pytest.mark.parametrize("end", ["closed", "opened", "continued"])
def test_as_transformers_renders(theirs: Any, source: str, fields: dict[str, Any], end: str) -> None:
    ours = ChatTemplate(source, {"bos_token": "<bos>"})
    for messages in CHATS:
        expected = theirs.apply_chat_template(
            messages,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=end == "opened",
            continue_final_message=end == "continued",
            **fields,
        )
        assert ours.render(messages, end == "opened", fields, end == "continued") == expected
