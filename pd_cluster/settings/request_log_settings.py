"""Settings of the scheduler's log of requests, which is off by default."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.setting import Form, Panel, Scope, Setting, at_least

HTTP = partial(Setting, panel=Panel.HTTP, scope=Scope.SERVER)
PATH = re.compile(r"/[^\s?#]*")


def _paths(name: str, written: str) -> tuple[str, ...]:
    paths = tuple(each.strip() for each in written.split(",") if each.strip())
    for path in paths:
        if not PATH.fullmatch(path):
            raise ConfigError(f"{called(name)} {path!r}: expected paths such as /health,/metrics")
    return paths


PATHS = Form(str, _paths, lambda paths: ",".join(paths))


class RequestLogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of request logs. `most_chars`: how many characters of an answer are logged at most. `quiet_paths`:
    paths that the access log leaves out.
    """

    has_requests: Annotated[
        bool,
        HTTP(
            "Log each request: id, number of prompt tokens and sampling parameters; never a prompt.",
            name="enable_log_requests",
            has_off=True,
        ),
    ] = False
    has_outputs: Annotated[
        bool,
        HTTP(
            "With --enable-log-requests: log each answer's text, too.",
            name="enable_log_outputs",
            has_off=True,
        ),
    ] = False
    most_chars: Annotated[
        int,
        HTTP("Maximum number of characters of an answer that are logged.", name="max_log_len", checks=(at_least(0),)),
    ] = 2048
    has_access_log: Annotated[
        bool, HTTP("Log a line for each request at the public port: address, method, path, status.", name="access_log")
    ] = False
    quiet_paths: Annotated[
        tuple[str, ...],
        HTTP(
            "Paths, separated by commas, that the access log leaves out; enables the log for others.",
            name="disable_access_log_for_endpoints",
            form=PATHS,
        ),
    ] = ()
    has_no_access_log: Annotated[bool, HTTP("Never write an access log.", name="disable_uvicorn_access_log")] = False

    @property
    def logs_access(self) -> bool:
        return (self.has_access_log or bool(self.quiet_paths)) and not self.has_no_access_log

    def checked(self) -> RequestLogSettings:
        """Returns itself. Raises ConfigError if a setting is given without another one that it needs."""
        if self.has_outputs and not self.has_requests:
            raise ConfigError(f"{called('enable_log_outputs')}: needs {called('enable_log_requests')}")
        return self
