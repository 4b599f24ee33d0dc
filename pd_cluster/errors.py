"""Every exception that pd-cluster raises on purpose.

PdClusterError
├── ConfigError            a flag, a rank table, an environment variable: the operator must fix it
│   ├── ModelError         the model folder: missing, incomplete, of an architecture that is not supported
│   └── MissingExtra       an optional part of the package is not installed; an ImportError, too
├── RequestError           the client must fix it: HTTP 4xx, never retried
│   ├── ModelNotFound      404
│   ├── RequestNotFound    404: nothing has this id
│   ├── InstanceNotFound   404: no instance has this name
│   ├── Refused            409: the cluster's state does not allow it
│   ├── RequestAborted     410: the operator ended it
│   ├── Unauthorized       401: the API key or the admin token is missing or wrong
│   └── Forbidden          403: the admin port does not serve this Host name
├── Unavailable            no instance can serve it right now: HTTP 503 with Retry-After
│   └── NoCapacity         this process has no capacity left; some will be free soon
├── Overloaded             the request cannot be served in time right now: HTTP 429 with Retry-After
│   └── RateLimited        a key has used up its limit for this minute
├── StorageFull            the disk takes no more: HTTP 507
├── GenerationError        a request that began cannot be finished
│   ├── InstanceLost       its worker died, stalled or became unreachable
│   ├── TransferFailed     its KV cache did not arrive
│   └── DeadlineExceeded   HTTP 504
├── GuideError             a schema, regex or grammar for the output cannot be enforced
├── Closed                 the engine has already ended
├── LinkError              two workers cannot exchange KV cache; `retry` says whether a later attempt may succeed
└── OutOfBlocks            the pool has fewer free blocks than wanted; internal to the engine
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Self

MARK = "\0"  # encloses a setting's name in an error's text; no argument, path or variable can contain it
KEEPS_MARKS = "PD_CLUSTER_KEEPS_MARKS"  # set in a process whose parent shows its errors
Naming = Callable[[str], str]  # a setting's name -> the user's spelling of it


def called(setting: str) -> str:
    """Returns a placeholder for a setting's name in an error's text; users see their own name for the setting."""
    return f"{MARK}{setting}{MARK}"


def flag_of(setting: str) -> str:
    """Returns a setting's name on a command line: `max_num_seqs` is `--max-num-seqs`."""
    return f"--{setting.replace('_', '-')}"


def told(text: str, naming: Naming = flag_of) -> str:
    """Returns the text with each placeholder of `called` replaced by the user's name for the setting."""
    parts = text.split(MARK)
    parts[1::2] = map(naming, parts[1::2])
    return "".join(parts)


class PdClusterError(Exception):
    """Base of all errors here; `str()` is one line for an operator or a client."""

    @property
    def text(self) -> str:
        """Returns the text with placeholders of settings, for use in another error's text."""
        return Exception.__str__(self)


class NamesSettings(PdClusterError):
    """An error whose text shows placeholders of `called` as flags, unless `named` gives other names."""

    def __str__(self) -> str:
        return told(self.text)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def named(self, naming: Naming) -> Self:
        """Replaces the placeholders in the text permanently, and returns the same error."""
        self.args = (told(self.text, naming),)
        return self


class ConfigError(NamesSettings):
    """Wrong flag, table or variable."""


class ModelError(ConfigError):
    """The model folder cannot be served."""


class MissingExtra(ConfigError, ImportError):
    """An optional part of the package is not installed."""


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


class RequestAborted(RequestError):
    status = 410


class Unauthorized(RequestError):
    status = 401


class Forbidden(RequestError):
    status = 403


class Unavailable(PdClusterError):
    """No instance can take the request now; `retry_after_s` is a hint for the client."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoCapacity(Unavailable):
    """This process has no capacity to prepare the request now; nothing of it has been computed."""


class LeaseUnavailable(PdClusterError):
    """The record that several schedulers share cannot be read or written now."""


class Overloaded(PdClusterError):
    """The request would be served too late now; after `retry_after_s`, another attempt may be in time."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The API key's limit is exceeded; a single request is admitted after `retry_after_s`."""

    code = "rate_limit_exceeded"


class StorageFull(NamesSettings):
    """The folder of kept files cannot be written: its disk is full, or fails."""


class GenerationError(PdClusterError):
    """An accepted request that ended without an answer."""


class InstanceLost(GenerationError):
    pass


class TransferFailed(GenerationError):
    pass


class DeadlineExceeded(GenerationError):
    pass


class GuideError(PdClusterError):
    """A guide that does not compile, is too large to follow, or leaves no token to choose."""


class Closed(PdClusterError):
    """Offline: the engine has already ended."""


class LinkError(NamesSettings):
    """Says why a prefill and a decode instance cannot be linked. `retry=False`: a later attempt would fail, too."""

    def __init__(self, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry


class QuarantineFull(NamesSettings):
    """Too many blocks wait for peers that are alive but make no progress; only a restart reclaims these blocks."""

    def __init__(self, num_blocks: int, most: int) -> None:
        super().__init__(
            f"{num_blocks} KV blocks may still be written by abandoned transfers, more than the {most} of "
            f"{called('kv_max_quarantine')}: this process ends to free them"
        )


class OutOfBlocks(PdClusterError):
    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"wanted {wanted} blocks, {free} are free")
        self.wanted = wanted
        self.free = free


def first_line(error: BaseException) -> str:
    """Returns the first line of another library's error, cut to fit into one line of our own error."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def listening_fault(error: Exception) -> str:
    """Returns why a socket cannot listen at an address; for a taken port, also how to resolve it."""
    is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    return "the port is taken; stop the process that listens there or choose another port" if is_taken else str(error)
