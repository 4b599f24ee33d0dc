"""Settings of streams that outlive their connections."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from pd_cluster.settings.setting import Panel, Scope, Setting, check, finite, within

REQUESTS = partial(Setting, panel=Panel.REQUESTS, scope=Scope.SERVER)
MOST_MEMORY_MIB = 64 << 10


class ResumeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`window_s` 0: no stream outlives its connection. `memory_mib`: of what each instance keeps.

    `is_for_schedulers`: none outlives a client that leaves.
    """

    window_s: Annotated[
        float,
        REQUESTS(
            "Seconds in which a lost stream can be resumed at any scheduler (GET /v1/streams); 0: not at all.",
            name="resume_window",
            checks=(finite("must be a number of seconds, 0 for no such streams"),),
        ),
    ] = 0.0
    memory_mib: Annotated[
        int,
        REQUESTS(
            "MiB at each instance for such streams.",
            name="resume_memory",
            checks=(within(1, MOST_MEMORY_MIB),),
            after="resume_window",
        ),
    ] = 64
    is_for_schedulers: Annotated[
        bool,
        REQUESTS(
            "Resume only after a scheduler's loss: a client that leaves ends its stream.",
            name="resume_scheduler_only",
            after="resume_memory",
        ),
    ] = False

    def __post_init__(self) -> None:
        check(self)
