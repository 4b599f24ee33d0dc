"""Every exception that pd-cluster raises on purpose.

PdClusterError
├── ConfigError            a flag, a rank table, an environment variable: the operator's to mend
│   └── ModelError         the model folder: missing, incomplete, of an architecture that is not supported
├── RequestError           the client's to mend: HTTP 4xx, never retried
│   ├── ModelNotFound      404
│   ├── RequestNotFound    404: of the requests that are kept for their timelines
│   ├── InstanceNotFound   404
│   ├── Refused            409: what the cluster's state does not allow
│   ├── Unauthorized       401: without an API key, or the admin port's token
│   └── Forbidden          403: under a name that the admin port does not answer to
├── Unavailable            nobody can serve it right now: HTTP 503 with Retry-After
├── Overloaded             what is promised can't be met right now: HTTP 429 with Retry-After
├── GenerationError        a request that had begun and cannot be finished
│   ├── InstanceLost       its worker died, stalled or was cut off
│   ├── TransferFailed     its KV cache did not arrive
│   └── DeadlineExceeded   HTTP 504
├── GuideError             what an output must look like cannot be followed: a schema, a regex, a grammar
├── Closed                 an engine that was asked for more after its end
├── LinkError              two workers cannot exchange KV cache; `retry` tells whether later may be better
└── OutOfBlocks            the pool has fewer free blocks than wanted; the engine's own business
"""

from __future__ import annotations


class PdClusterError(Exception):
    """Base of all; `str()` is one line fit for an operator or a client."""


class ConfigError(PdClusterError):
    """Wrong flag, table or variable."""


class ModelError(ConfigError):
    """The model folder cannot be served."""


class RequestError(PdClusterError):
    """The client sent something that cannot be served; `param` names the field."""

    status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFound(RequestError):
    status = 404


class RequestNotFound(RequestError):
    status = 404


class InstanceNotFound(RequestError):
    status = 404


class Refused(RequestError):
    status = 409


class Unauthorized(RequestError):
    status = 401


class Forbidden(RequestError):
    status = 403


class Unavailable(PdClusterError):
    """No instance can take the request now; `retry_after_s` is a hint for the client."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(PdClusterError):
    """It would be served too late; after `retry_after_s` it may not."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GenerationError(PdClusterError):
    """A request that was accepted and ended without an answer."""


class InstanceLost(GenerationError):
    pass


class TransferFailed(GenerationError):
    pass


class DeadlineExceeded(GenerationError):
    pass


class GuideError(PdClusterError):
    """A guide that does not compile, is too large to follow, or leaves no token to choose."""


class Closed(PdClusterError):
    """Offline: whoever it was asked of has ended already."""


class LinkError(PdClusterError):
    """Why a prefill and a decode instance cannot be paired. `retry=False`: it will not get better by itself."""

    def __init__(self, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class OutOfBlocks(PdClusterError):
    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"wanted {wanted} blocks, {free} are free")
        self.wanted = wanted
        self.free = free


def first_line(error: BaseException) -> str:
    """Of another library's error, short enough for one line of our own."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
