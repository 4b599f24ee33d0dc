"""Reads /overview of a scheduler's admin address, and formats the parts that several commands show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pd_cluster.client.admin_client import Admin, not_an_admin, raise_unauthorized
from pd_cluster.errors import PdClusterError

Found = dict[str, Any]
FINE = "no problems: every instance serves, and no request failed in the last minute"


async def fetch_overview(admin: Admin, since_s: float | None = None, since_mark: int = 0) -> Found:
    """Returns the body of /overview: samples after `since_s` (Unix time), and events numbered above `since_mark`.

    Raises PdClusterError that names the address.
    """
    since = f"&since={since_s}" if since_s is not None else ""
    response = await admin.ask(f"/overview?since_mark={since_mark}{since}")
    raise_unauthorized(response)
    try:
        found: Found = response.json()
        if "problems" not in found:
            raise ValueError
    except (ValueError, TypeError):
        raise not_an_admin(response) from None
    return found


async def fetch_logs(admin: Admin, name: str, limit: int, after: int | None = None) -> tuple[list[str], int]:
    """Returns a process's log lines, and the byte at which the next ones begin. Raises PdClusterError."""
    since = f"&after={after}" if after is not None else ""
    response = await admin.ask(f"/instances/{name}/logs?limit={limit}{since}")
    raise_unauthorized(response)
    try:
        body = response.json()
        if response.status_code != 200:
            raise PdClusterError(str(body["error"]["message"]))
        return list(body["lines"]), int(body["next"])
    except (ValueError, KeyError, TypeError):
        raise not_an_admin(response) from None


def is_critical(found: Found) -> bool:
    return any(problem["severity"] == "critical" for problem in found["problems"])


def seconds(value: float | None) -> str:
    """Formats a duration: 0.0012 becomes 1.2 ms, 0.0123 becomes 12 ms, and 1.5 becomes 1.50 s."""
    if value is None:
        return "-"
    return f"{value * 1e3:.{int(value < 0.01)}f} ms" if value < 1 else f"{value:.2f} s"


def figures(found: Found) -> dict[str, str]:
    """Returns name -> text of the latest figures, for one line."""
    last: Mapping[str, Any] = found["samples"][-1] if found["samples"] else {}
    return {
        "tokens/s": f"{last.get('tokens_per_s', 0):,.0f}",
        "requests": str(found["num_running"]),
        "queued": str(found["num_queued"]),
        "TTFT p50/p99": f"{seconds(last.get('ttft_p50_s'))} / {seconds(last.get('ttft_p99_s'))}",
        "TPOT p50/p99": f"{seconds(last.get('tpot_p50_s'))} / {seconds(last.get('tpot_p99_s'))}",
        "failed/s": f"{last.get('failed_per_s', 0):g}",
    }


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draws the last `width` values, each as a bar of eighths of the largest; a missing value is a space."""
    shown = list(values)[-width:]
    most = max([value for value in shown if value is not None], default=0.0)
    bars = " ▁▂▃▄▅▆▇█"
    return "".join(bars[0] if value is None or not most else bars[max(1, round(8 * value / most))] for value in shown)
