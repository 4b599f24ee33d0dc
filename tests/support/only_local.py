"""Refuses this process's connections to other machines, and reports them.

Some client libraries fetch price lists or report usage. Child processes are not covered.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

LOCAL = ("127.0.0.1", "localhost", "::1")
ENVIRONMENT = {  # opt-outs, set before any of the libraries is imported
    "NO_PROXY": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
}


@contextmanager
def only_local() -> Iterator[None]:
    """Also sets ENVIRONMENT. Fails at the block's end if any code tried to connect elsewhere."""
    attempts: list[str] = []
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def refuse(host: object) -> None:
        name = host.decode() if isinstance(host, bytes) else host
        if name is not None and name not in LOCAL:
            attempts.append(str(name))
            raise OSError(f"{name} is not this machine")

    def local_connect(own: socket.socket, address: Any) -> None:
        if own.family in (socket.AF_INET, socket.AF_INET6):
            refuse(address[0])
        connect(own, address)

    def local_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        refuse(host)
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(socket.socket, "connect", local_connect)
        patch.setattr(socket, "getaddrinfo", local_getaddrinfo)
        yield
    assert attempts == [], f"tried to connect to other machines: {attempts}"


def child_environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}
