"""Reads streams of server-sent events in OpenAI's format."""

from __future__ import annotations

import json
from typing import Any

import httpx


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Returns the data of each event except the last one, [DONE]. Events may have ids."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\n")
    *events, last = (line[6:] for line in answer.text.split("\n") if line.startswith("data: "))
    assert last == "[DONE]"
    return [json.loads(event) for event in events]
