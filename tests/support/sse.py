"""Reads streams of server-sent events as OpenAI's API has them."""

from __future__ import annotations

import json
from typing import Any

import httpx


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Returns the data of each event but the last, which says that the stream has ended."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    lines = [line for event in events for line in event.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]
