"""The states of a batch and their transitions (docs/protocol/requests.md, "Batches"). Pure: the caller gives the time.

Knows nothing of disks or of how requests are answered.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pd_cluster.errors import Refused

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Event = Literal["valid", "invalid", "answered", "cancel"]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)
WINDOW_S = 86_400
NEXT: dict[tuple[Status, Event], Status] = {
    ("validating", "valid"): "in_progress",
    ("validating", "invalid"): "failed",
    ("validating", "cancel"): "cancelling",
    ("in_progress", "invalid"): "failed",  # the input file was removed from the folder
    ("in_progress", "answered"): "finalizing",
    ("in_progress", "cancel"): "cancelling",
    ("cancelling", "cancel"): "cancelling",
    ("cancelled", "cancel"): "cancelled",
}
LAST: dict[Status, Status] = {  # the final state once the files are complete or the window is over
    "validating": "expired",
    "in_progress": "expired",
    "finalizing": "completed",
    "cancelling": "cancelled",
}

PAST: dict[Event, str] = {
    "valid": "begun",
    "invalid": "refused",
    "answered": "finalized",
    "cancel": "cancelled",
}


class RequestCounts(msgspec.Struct, frozen=True):
    """Numbers of requests. `completed`: in the output file. `failed`: in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(msgspec.Struct, frozen=True):
    """A fault of an input file. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[BatchError]
    object: Literal["list"] = "list"


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as clients see it. Times are Unix times in seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: Annotated[BatchErrors | None, Meta(description="Why the input file was refused.")] = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    output_file_id: Annotated[str | None, Meta(description="The answers, once the batch has ended.")] = None
    error_file_id: Annotated[str | None, Meta(description="The failed requests, once the batch has ended.")] = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: Annotated[int, Meta(description="When unanswered requests get an error.")]
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None

    @property
    def is_running(self) -> bool:
        return self.status in LAST


class KeptBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with the server's own fields. `models`: the models that its key may use; None: all.

    `output_id` and `error_id`: the ids reserved for its files. `output_ttl_s`: how long they are kept; None: the
    server's default.
    """

    batch: BatchObject
    owner: str
    output_id: str
    error_id: str
    models: tuple[str, ...] | None = None
    output_ttl_s: float | None = None


def after(batch: BatchObject, event: Event, now_s: float) -> BatchObject:
    """Returns the batch after an event. Raises Refused if its state does not allow the event."""
    status = NEXT.get((batch.status, event))
    if status is None:
        raise Refused(f"{batch.id}: it is {batch.status}, so it cannot be {PAST[event]}", code="invalid_state")
    return batch if status == batch.status else _with_status(batch, status, now_s)


def ended(batch: BatchObject, now_s: float) -> BatchObject:
    """Returns a batch whose files are complete, or whose window is over."""
    return _with_status(batch, LAST[batch.status], now_s)


def _with_status(batch: BatchObject, status: Status, now_s: float) -> BatchObject:
    return replace(batch, status=status, **{f"{status}_at": int(now_s)})
