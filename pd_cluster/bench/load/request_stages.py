"""Joins outcomes with the scheduler's timelines (prefill, handover and decode), which clients cannot see."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from pd_cluster.bench.outcomes import Outcome
from pd_cluster.client.admin_client import Admin, raise_unauthorized
from pd_cluster.errors import PdClusterError

NUM_AT_ONCE = 8


async def with_stages(outcomes: Sequence[Outcome], admin: Admin) -> tuple[list[Outcome], str]:
    """Returns the outcomes with their timelines, and a note about timelines that are no longer kept.

    Queries the newest first, because the scheduler keeps a limited number. Raises PdClusterError if there is no answer.
    """
    limit = asyncio.Semaphore(NUM_AT_ONCE)

    async def joined(outcome: Outcome) -> tuple[Outcome, bool]:
        async with limit:
            response = await admin.ask(f"/requests/{quote(outcome.request_id, safe='')}/timeline")
        raise_unauthorized(response)
        if response.status_code != 200:
            return outcome, False
        return with_timeline(outcome, response.json()), True

    if not outcomes:
        return [], ""
    found = (await asyncio.gather(*map(joined, reversed(outcomes))))[::-1]
    num_known = sum(is_known for _, is_known in found)
    note = "" if num_known == len(found) else f"stages are known for {num_known} of {len(found)} requests"
    return [outcome for outcome, _ in found], note


def with_timeline(outcome: Outcome, timeline: dict[str, Any]) -> Outcome:
    """Adds the names of instances and the durations of stages; for a request that moved, those of its last attempt."""
    events: list[dict[str, Any]] = timeline["events"]
    landed_ms = [event["at_ms"] for event in events if event["what"] == "landing complete"]
    chunks_ms = [event["at_ms"] for event in events if event["what"] == "chunk"]
    before_ms = [at_ms for at_ms in chunks_ms if not landed_ms or at_ms <= landed_ms[-1]] or chunks_ms
    prefill, decode = timeline["prefill"], timeline["decode"]
    if not before_ms:
        return msgspec.structs.replace(outcome, prefill=prefill, decode=decode)
    handover_s = max(0.0, landed_ms[-1] - before_ms[-1]) / 1e3 if landed_ms else None
    return msgspec.structs.replace(
        outcome, prefill=prefill, decode=decode, prefill_s=before_ms[-1] / 1e3, handover_s=handover_s
    )


async def can_be_asked(admin: Admin) -> str:
    """Returns why the admin address has no timelines; "" if it has."""
    try:
        response = await admin.ask("/requests?limit=1")
        raise_unauthorized(response)
    except PdClusterError as error:
        return str(error)
    return "" if response.status_code == 200 else f"{response.url} answers with HTTP {response.status_code}"
