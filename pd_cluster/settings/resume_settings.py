"""Settings of streams that outlive their connections."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from pd_cluster.settings.setting import Panel, Scope, Setting, check, finite, within

REQUESTS = partial(Setting, panel=Panel.REQUESTS, scope=Scope.SERVER)
MOST_MEMORY_MIB = 64 << 10


class ResumeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of resumable streams. `window_s` 0 disables them. `memory_mib` limits what each instance keeps.

    `is_for_schedulers`: streams survive the loss of a scheduler, but not that of a client.
    """

    window_s: Annotated[
        float,
        REQUESTS(
            "Seconds within which a lost stream can be resumed at any scheduler (GET /v1/streams); 0: never.",
            name="resume_window",
            checks=(finite("must be a number of seconds, or 0 to disable resuming"),),
        ),
    ] = 0.0
    memory_mib: Annotated[
        int,
        REQUESTS(
            "MiB that each instance keeps for resumable streams.",
            name="resume_memory",
            checks=(within(1, MOST_MEMORY_MIB),),
            after="resume_window",
        ),
    ] = 64
    is_for_schedulers: Annotated[
        bool,
        REQUESTS(
            "Resume only after the loss of a scheduler; a stream ends when its client disconnects.",
            name="resume_scheduler_only",
            after="resume_memory",
        ),
    ] = False

    def __post_init__(self) -> None:
        check(self)
