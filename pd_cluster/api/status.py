"""The number that an error is known by: HTTP's, over HTTP and elsewhere."""

from __future__ import annotations

from pd_cluster.errors import DeadlineExceeded, Overloaded, RequestError, Unavailable


def status_of(error: Exception) -> int:
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, Unavailable):
        return 503
    if isinstance(error, Overloaded):
        return 429
    return 504 if isinstance(error, DeadlineExceeded) else 500
