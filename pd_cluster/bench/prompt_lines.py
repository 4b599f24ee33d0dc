"""Reads users' prompts: a file of JSON lines, each with a text or with chat messages.

    {"prompt": "Once upon a time", "output_tokens": 64}
    {"messages": [{"role": "user", "content": "Hello"}]}

Knows nothing of tokens, which only the server can count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from pd_cluster.bench.trace_files import field_of
from pd_cluster.errors import ConfigError


class PromptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str = ""
    messages: list[dict[str, Any]] = []
    output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None

    @property
    def body(self) -> dict[str, Any]:
        """Returns the line's part of a request's body."""
        return {"messages": self.messages} if self.messages else {"prompt": self.prompt}


def read_prompts(path: str | Path) -> list[PromptLine]:
    """Returns lines that are all texts or all messages. Raises ConfigError with file, line and field."""
    found: list[PromptLine] = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error.strerror}") from None
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        where = f"--prompts {path}, line {number}"
        try:
            line = msgspec.json.decode(raw, type=PromptLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {field_of(error)}") from None
        if bool(line.prompt) == bool(line.messages):
            raise ConfigError(f'{where}: give either "prompt" or "messages", and not an empty one')
        if found and bool(found[0].messages) != bool(line.messages):
            raise ConfigError(f'{where}: "prompt" and "messages" are sent to different addresses; use one of them')
        found.append(line)
    if not found:
        raise ConfigError(f"--prompts {path}: it has no prompts")
    return found
