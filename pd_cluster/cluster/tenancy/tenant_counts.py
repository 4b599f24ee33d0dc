"""Keeps counters for each tenant. A limited number of tenants is counted by name; the others are counted together.

The counters join those of cluster/records/request_stats.py under these names, so they are summed over processes. Knows
nothing of keys or HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

Outcome = Literal["finished", "aborted", "failed", "refused", "limited"]
Limit = Literal["requests", "tokens"]
OUTCOMES: tuple[str, ...] = get_args(Outcome)
LIMITS: tuple[str, ...] = get_args(Limit)
MAX_NAMED = 100
OTHERS = "other"
PROMPT_TOKENS, GENERATION_TOKENS = "tenant_prompt_tokens", "tenant_generation_tokens"


class TenantCounts:
    """The counters of one process. `named`: tenants that are counted by name; names may be added but not removed."""

    def __init__(self) -> None:
        self.named: frozenset[str] = frozenset()
        self._numbers: dict[str, int] = {}

    def ended(self, tenant: str, outcome: Outcome) -> None:
        """Counts a request that has ended, by its outcome."""
        self._add(f"tenant_{outcome}", tenant, 1)

    def limited(self, tenant: str, limit: Limit) -> None:
        """Counts a request that exceeds its key's limit."""
        self._add(f"tenant_limited_by_{limit}", tenant, 1)

    def computed(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._add(PROMPT_TOKENS, tenant, num_prompt_tokens)
        self._add(GENERATION_TOKENS, tenant, num_output_tokens)

    def _add(self, name: str, tenant: str, number: int) -> None:
        full = f"{name}/{tenant if tenant in self.named else OTHERS}"
        self._numbers[full] = self._numbers.get(full, 0) + number

    def counters(self) -> dict[str, int]:
        return dict(self._numbers)


def with_names(known: Iterable[str], tenants: Iterable[str]) -> list[str]:
    """Returns `known` and as many of the tenants as fit."""
    return [name for name in dict.fromkeys([*known, *tenants]) if name != OTHERS][:MAX_NAMED]


def by_tenant(counters: Mapping[str, int], name: str) -> dict[str, int]:
    """Returns tenant -> value of this counter."""
    start = f"{name}/"
    return {full[len(start) :]: number for full, number in counters.items() if full.startswith(start)}
