"""Writes guidellm's scenario and data files: requests, times and outputs.

guidellm sends requests at our rows' times unless a profile is given. Knows nothing of clusters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_cluster.bench.outcomes import Slo
from pd_cluster.bench.request_arrivals import Arrival, prompt_of
from pd_cluster.errors import ConfigError

COMPLETIONS, CHAT = "pd_cluster/completions", "pd_cluster/chat"  # names in guidellm_plugin.py
LEAD_S = 1.0  # the time that guidellm has to accept the first requests
NUM_TOKEN_IDS = 256  # every vocabulary has these
MAX_ALL_TOKENS = 200_000_000  # maximum number of tokens in all prompts of a load; each takes four bytes of the file
REPLAY = {"kind": "replay", "schedule_turn": "timestamp"}
PATHS = {COMPLETIONS: "v1/completions", CHAT: "v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class LoadRow:
    """A request: its time, its part of the body, and its lengths in tokens; None: known only to the server."""

    at_s: float
    body: dict[str, Any]
    num_prompt_tokens: int | None
    num_output_tokens: int

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body

    def to_json(self) -> dict[str, Any]:
        return {
            "at_s": LEAD_S + self.at_s,
            "body": json.dumps(self.body, separators=(",", ":")),
            "output_tokens": self.num_output_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`profile`: guidellm's, such as `kind=sweep,sweep_size=5`; "": our rows' times. `max_s`: a run's longest time."""

    target: str
    model: str
    is_chat: bool
    num_requests: int
    profile: str = ""
    max_s: float = 0.0
    slo: Slo = field(default_factory=Slo)

    def write(self, folder: Path) -> Path:
        """Writes the scenario; returns its file. Raises ConfigError for an invalid profile."""
        request_format = CHAT if self.is_chat else COMPLETIONS
        spec = {
            "backend": {
                "kind": "pd_cluster",
                "target": self.target,
                "model": self.model,
                "request_format": request_format,
                "api_routes": PATHS,
                "validate_backend": False,
                # so that every token has text and can be timed
                "extras": {"body": {"temperature": 0, "skip_special_tokens": False}},
            },
            "profile": profile_of(self.profile) if self.profile else REPLAY,
            "constraints": self._constraints(),
            "data": [{"kind": "json_file", "path": str(folder / "requests.jsonl")}],
            "data_column_mapper": {
                "kind": "generative_column_mapper",
                "column_mappings": {
                    "text_column": "body",
                    "output_tokens_count_column": "output_tokens",
                    "relative_timestamp_column": "at_s",
                },
            },
            "outputs": [
                {"kind": "json", "path": str(folder / "guidellm.json")},
                {"kind": "html", "path": str(folder / "guidellm.html")},
            ],
            "metrics": {"kind": "generative", "slo": self._goals()},
        }
        file = folder / "scenario.json"
        file.write_text(json.dumps({"spec": spec}, indent=1) + "\n")
        return file

    def _constraints(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"kind": "max_requests", "count": self.num_requests}]
        return [*found, {"kind": "max_duration", "seconds": self.max_s}] if self.max_s else found

    def _goals(self) -> dict[str, float] | None:
        goals = {"ttft_ms": self.slo.ttft_s, "tpot_ms": self.slo.tpot_s, "e2el_ms": self.slo.e2e_s}
        return {name: 1e3 * goal_s for name, goal_s in goals.items() if goal_s} or None


def rows_of(arrivals: Sequence[Arrival]) -> Iterator[LoadRow]:
    """Yields the arrivals with prompts of token ids. Raises ConfigError if they have too many tokens for a file."""
    if (num_tokens := sum(each.num_prompt_tokens for each in arrivals)) > MAX_ALL_TOKENS:
        raise ConfigError(
            f"the prompts have {num_tokens:,} tokens; at most {MAX_ALL_TOKENS:,} are sent in one load: "
            "give --trace-limit or a smaller --trace-lengths"
        )
    for number, each in enumerate(arrivals):
        body = {"prompt": prompt_of(each, number, NUM_TOKEN_IDS)}
        yield LoadRow(each.at_s, body, each.num_prompt_tokens, each.num_output_tokens)


def write_rows(rows: Iterator[LoadRow], folder: Path) -> None:
    with (folder / "requests.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps(row.to_json()) + "\n")


def profile_of(text: str) -> dict[str, Any]:
    """Parses guidellm's `key=value,…`; values are JSON if possible. Raises ConfigError."""
    found: dict[str, Any] = {}
    rest = text
    while rest:
        name, equals, rest = rest.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--profile {text}: expected guidellm's form, such as kind=sweep,sweep_size=5")
        end = rest.find("]") + 1 if rest.startswith("[") else 0
        value, _, rest = (rest[:end], "", rest[end:].removeprefix(",")) if end else rest.partition(",")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    if "kind" not in found:
        raise ConfigError(f"--profile {text}: it has no kind, such as concurrent, sweep, goodput or knee")
    return found
