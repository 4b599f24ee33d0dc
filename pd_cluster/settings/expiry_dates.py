"""Parses the expiry dates of keys in files and flags."""

from __future__ import annotations

import re
from datetime import UTC, datetime

EXPECTED = "a date or a time with its zone, such as 2027-01-31 or 2027-01-31T12:00:00Z"


def time_of(text: str) -> float | None:
    """Returns the Unix time of a date (midnight UTC), or of a date and time with a zone; None for other texts."""
    try:
        found = datetime.fromisoformat(text)
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            found = found.replace(tzinfo=UTC)
        return found.astimezone(UTC).timestamp() if found.tzinfo is not None else None
    except (ValueError, OverflowError):  # also raised for a UTC year that cannot be represented
        return None


def text_of(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat().replace("+00:00", "Z")
