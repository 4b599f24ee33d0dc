"""Describes errors to clients: the HTTP status, and the body in OpenAI's or Anthropic's format."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pd_cluster.errors import (
    DeadlineExceeded,
    GenerationError,
    Overloaded,
    PdClusterError,
    RequestError,
    StorageFull,
    Unavailable,
)

MAX_BODY_NBYTES = 32 << 20  # also the most bytes that are read and dropped after an early refusal
TOO_LARGE = f"the body is larger than {MAX_BODY_NBYTES >> 20} MiB"
CLIENT_CLOSED_REQUEST = 499  # never sent, because the client has left
MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render")  # in Anthropic's format
NO_THREADS = "thread_unsupported_request"  # tells Anthropic's clients to continue without a thread
MESSAGES_ERRORS = {  # status -> Anthropic's type of error
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetails(Struct):
    message: Annotated[str, Meta(description="The fault, with names and numbers.")]
    type: Annotated[str, Meta(description="The kind of error, such as invalid_request_error or service_unavailable.")]
    param: Annotated[str | None, Meta(description="The field of the request at fault.")]
    code: Annotated[
        str | None, Meta(description="A code for programs, such as context_length_exceeded or invalid_api_key.")
    ]


class Error(Struct):
    error: ErrorDetails


class Unsupported(Struct):
    error_code: str
    unsupported: list[str]


class MessageErrorDetails(Struct, omit_defaults=True):
    type: Annotated[str, Meta(description="The kind of error, such as invalid_request_error or overloaded_error.")]
    message: str
    details: Annotated[
        Unsupported | None, Meta(description="An unsupported feature; tells clients not to retry with it.")
    ] = None


class MessageError(Struct):
    type: Literal["error"]
    error: MessageErrorDetails
    request_id: None


class BodyTooLarge(RequestError):
    status = 413


def status_of(error: Exception) -> int:
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, Unavailable):
        return 503
    if isinstance(error, Overloaded):
        return 429
    if isinstance(error, StorageFull):
        return 507
    return 504 if isinstance(error, DeadlineExceeded) else 500


def error_body(error: Exception) -> Error:
    """Returns the body in OpenAI's format. The body of an unexpected exception reveals nothing internal."""
    kind, param, code = "internal_error", None, None
    message = "internal error; the server's log has the details"
    if isinstance(error, RequestError):
        kind, param, code = "invalid_request_error", error.param, error.code
    elif isinstance(error, Unavailable):
        kind, code = "service_unavailable", "no_instance"
    elif isinstance(error, Overloaded):
        kind, code = "rate_limit_error", error.code
    elif isinstance(error, StorageFull):
        kind, code = "server_error", "storage_full"
    elif isinstance(error, DeadlineExceeded):
        kind, code = "timeout_error", "deadline_exceeded"
    elif isinstance(error, GenerationError):
        kind, code = "server_error", "generation_failed"
    if isinstance(error, PdClusterError):
        message = str(error)
    return Error(ErrorDetails(message, kind, param, code))


def messages_error_body(error: Exception, status: int | None = None) -> MessageError:
    """Returns the body in Anthropic's format. `status` None: the error's own."""
    status = status_of(error) if status is None else status
    kind = MESSAGES_ERRORS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    own = error_body(error).error
    details = Unsupported(NO_THREADS, ["thread"]) if own.code == NO_THREADS else None
    return MessageError("error", MessageErrorDetails(kind, own.message, details), None)


def error_body_at(path: str, error: Exception, status: int | None = None) -> Error | MessageError:
    """Returns the body in the format of the route at this path, which may begin with a root path."""
    if path.endswith(MESSAGES_PATHS):
        return messages_error_body(error, status)
    return error_body(error)
