"""Checks a batch's input file before any of its requests is answered."""

from __future__ import annotations

from collections.abc import Iterator

from pd_cluster.service.files.batch_lines import BatchEntry
from pd_cluster.service.files.batch_states import BatchError

MAX_LINES = 50_000
MAX_ERRORS = 100  # the most errors that are listed


def check_entries(entries: Iterator[BatchEntry], endpoint: str) -> tuple[int, list[BatchError]]:
    """Returns the number of requests and their faults; each request must use the endpoint."""
    first: dict[bytes, int] = {}
    errors: list[BatchError] = []
    for entry in entries:
        if len(first) == MAX_LINES or len(errors) == MAX_ERRORS:
            break
        if (error := _error_of(entry, endpoint, first)) is not None:
            errors.append(error)
        first.setdefault(entry.key, entry.number)
    else:
        if not first:
            errors.append(BatchError("empty_file", "the input file has no lines"))
        return len(first), errors
    if len(errors) < MAX_ERRORS:
        errors.append(BatchError("too_many_requests", f"the input file has more than {MAX_LINES} lines"))
    return len(first), errors


def _error_of(entry: BatchEntry, endpoint: str, first: dict[bytes, int]) -> BatchError | None:
    if entry.error is not None:
        return BatchError(entry.error.code or "invalid_line", str(entry.error), entry.number, entry.error.param)
    if entry.url != endpoint:
        why = f"url: {entry.url[:80]!r}; this batch is for {endpoint}"
        return BatchError("mismatched_endpoint", why, entry.number, "url")
    if (other := first.get(entry.key)) is not None:
        why = f"line {other} has the same custom_id; each must have its own"
        return BatchError("duplicate_custom_id", why, entry.number, "custom_id")
    return None
