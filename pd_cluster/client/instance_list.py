"""Reads and shows the instances that a scheduler's admin address lists."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from pd_cluster.client.admin_client import Admin, not_an_admin, raise_unauthorized
from pd_cluster.result_tables import human_nbytes, print_table
from pd_cluster.types import LinkState
from ranktable_tools.host_addresses import bracketed

SETTLE_TIMEOUT_S = 5.0
POLL_S = 0.1

Entries = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The KV cache moved so far, summed over all instances. Two readings can be compared only if their `epochs` are
    equal.
    """

    sent_nbytes: int
    received_nbytes: int
    epochs: frozenset[str]

    @classmethod
    def of(cls, entries: Entries) -> Traffic:
        return cls(
            sum(entry["kv_sent_nbytes"] for entry in entries),
            sum(entry["kv_received_nbytes"] for entry in entries),
            frozenset(entry["epoch"] for entry in entries),
        )


async def fetch_instances(admin: Admin | str) -> Entries:
    """Returns the entries of /instances. Raises PdClusterError that names the address."""
    response = await (Admin(admin) if isinstance(admin, str) else admin).ask("/instances")
    raise_unauthorized(response)
    try:
        entries = response.json()["instances"]
        if not isinstance(entries, list) or not all("kv_sent_nbytes" in entry for entry in entries):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise not_an_admin(response) from None
    return entries


async def fetch_settled(admin_url: str) -> Entries:
    """Returns the entries once every ready instance has reported twice, so that the counters include all past work.

    After SETTLE_TIMEOUT_S it returns the current entries. Raises PdClusterError.
    """
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    entries = await fetch_instances(admin_url)
    wanted = {e["instance_id"]: e["num_heartbeats"] + 2 for e in entries if e["state"] == "ready"}
    while time.monotonic() < deadline_s:
        ready = [e for e in entries if e["state"] == "ready"]
        if all(e["num_heartbeats"] >= wanted.get(e["instance_id"], 0) for e in ready):
            break
        await asyncio.sleep(POLL_S)
        entries = await fetch_instances(admin_url)
    return entries


def show_instances(admin: Admin, as_json: bool = False) -> None:
    """Runs `pd-cluster instances`. Raises PdClusterError."""
    entries = asyncio.run(fetch_instances(admin))
    if as_json:
        print(json.dumps(entries, indent=2))
    else:
        print_instances(admin.url, entries)


def print_instances(admin_url: str, entries: Entries) -> None:
    headers = ["instance", "role", "state", "pid", "address", "run", "wait", "free/cached/held of blocks"]
    headers += ["prefix hits", "KV sent", "KV received", "links"]
    rows = [_row(entry) for entry in entries]
    if any(entry["unit"] for entry in entries):
        headers += ["unit", "idle rounds"]
        rows = [[*row, place_in_unit(entry), idle_rounds(entry)] for row, entry in zip(rows, entries, strict=True)]
    print_table(
        f"{len(entries)} instance{'' if len(entries) == 1 else 's'} at {admin_url}",
        headers,
        rows,
        right=("pid", "run", "wait", "prefix hits", "KV sent", "KV received", "idle rounds"),
    )


def _row(entry: dict[str, Any]) -> list[str]:
    blocks = "/".join(str(entry[f"num_{kind}_blocks"]) for kind in ("free", "cached", "held"))
    return [
        entry["instance_id"],
        f"{entry['role']}, becomes {entry['next_role']}" if entry["next_role"] else entry["role"],
        f"{entry['state']}: {entry['reason']}" if entry["reason"] else entry["state"],
        str(entry["pid"] or "-"),
        f"{bracketed(entry['host'])}:{entry['port']}",
        str(entry["num_running"]),
        str(entry["num_waiting"]),
        f"{blocks} of {entry['num_blocks']}",
        _hit_rate(entry),
        human_nbytes(entry["kv_sent_nbytes"]),
        human_nbytes(entry["kv_received_nbytes"]),
        ", ".join(f"{peer.split('@')[0]} {state}" for peer, state in entry["links"].items()) or "-",
    ]


def place_in_unit(entry: dict[str, Any]) -> str:
    return f"{entry['unit']}, rank {entry['unit_rank']}" if entry["unit"] else "-"


def idle_rounds(entry: dict[str, Any]) -> str:
    """Returns the share of its unit's rounds in which the instance had nothing to compute, and the number of rounds."""
    num = entry["num_rounds"]
    return f"{entry['num_idle_rounds'] / num:.0%} of {num:,}" if num else "-"


def links_of(entry: dict[str, Any]) -> dict[str, LinkState]:
    """Maps each peer's name to its link with the entry's instance."""
    return {peer.split("@")[0]: LinkState.parse(text) for peer, text in entry["links"].items()}


def _hit_rate(entry: dict[str, Any]) -> str:
    """Returns the share of prompt tokens that were found in the cache."""
    asked = entry["num_prefix_query_tokens"]
    return f"{entry['num_prefix_hit_tokens'] / asked:.0%}" if asked else "-"
