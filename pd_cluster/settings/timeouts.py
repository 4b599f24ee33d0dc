"""The deadlines that the pages of docs/protocol define."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from pd_cluster.errors import ConfigError, called
from pd_cluster.settings.setting import POSITIVE, Panel, Scope, Setting, at_most, finite

MOST_GUIDED_TIMEOUT_S = 60.0

WORKERS = partial(Setting, panel=Panel.TIMES, scope=Scope.WORKERS, checks=(POSITIVE,))
SERVER = partial(Setting, panel=Panel.TIMES, scope=Scope.SERVER, checks=(finite("must not be negative or infinite"),))


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The deadlines, in seconds; 0, where allowed, means none. `pd-cluster check` shows a setting's `detail`."""

    heartbeat_interval_s: Annotated[
        float, WORKERS("Seconds between heartbeats.", detail="a heartbeat is sent on every connection")
    ] = 0.5
    dead_after_s: Annotated[
        float,
        WORKERS(
            "Seconds of silence after which a peer is considered dead.",
            detail="a silent peer is considered dead (at once if its connection ends)",
        ),
    ] = 3.0
    connect_timeout_s: Annotated[
        float,
        WORKERS(
            "Maximum seconds to open a connection or a link.",
            detail="a connection or a link must open; retried after 0.5 s, doubling to 5 s",
        ),
    ] = 5.0
    join_timeout_s: Annotated[
        float,
        SERVER(
            "Seconds within which a worker with --join must register, also after losing its scheduler.",
            checks=(POSITIVE,),
            detail="a worker with --join must find a scheduler that admits it",
        ),
    ] = 300.0
    lease_duration_s: Annotated[
        float,
        SERVER(
            "With --scheduler-lease: seconds until another scheduler may take over; 0: 1.5, and 15 in Kubernetes.",
            checks=(finite("must not be negative or infinite"),),
            after="scheduler_index",
            panel=Panel.SCHEDULER,
            detail="a scheduler that stalls or dies loses ownership of membership to another one; 0: 1.5, in "
            "Kubernetes 15",
        ),
    ] = 0.0
    credit_timeout_s: Annotated[
        float,
        WORKERS(
            "Seconds within which an idle decode instance must accept an offer.",
            detail="a decode instance that makes no progress must accept an offered transfer",
        ),
    ] = 10.0
    transfer_timeout_s: Annotated[
        float,
        WORKERS(
            "Seconds without progress after which a KV transfer is cancelled.",
            detail="a transfer without progress is cancelled",
        ),
    ] = 30.0
    encode_timeout_s: Annotated[
        float,
        WORKERS(
            "Seconds without progress of an encoder after which a prefill instance computes the image.",
            detail="the prefill instance computes the image; it waits six times as long for an encoder that is busy "
            "with other images",
        ),
    ] = 10.0
    collective_timeout_s: Annotated[
        float,
        WORKERS(
            "Maximum seconds that a rank waits for another rank.",
            also=("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
            detail="a rank of an instance stops waiting for the others",
        ),
    ] = 60.0
    step_timeout_s: Annotated[
        float,
        WORKERS(
            "Seconds after which an engine that hangs in a step is killed; 0: never.",
            checks=(finite("must not be negative or infinite"),),
            detail="an engine that hangs in a step is killed; 0: never",
        ),
    ] = 600.0
    link_keepalive_s: Annotated[
        float,
        WORKERS(
            "Seconds after which an idle link is probed.",
            panel=Panel.KV,
            after="kv_rate_limit",
            detail="an idle link is probed",
        ),
    ] = 30.0
    request_timeout_s: Annotated[
        float, SERVER("Maximum seconds for a whole request; 0: no limit.", detail="a whole request")
    ] = 600.0
    drain_timeout_s: Annotated[
        float,
        SERVER(
            "Seconds that running requests may take to finish after SIGTERM.",
            detail="running requests after SIGTERM",
            also=("shutdown_timeout",),
        ),
    ] = 30.0
    replay_wait_s: Annotated[
        float,
        SERVER(
            "Maximum seconds that a request whose instance died waits for another one.",
            panel=Panel.SCHEDULER,
            after="max_attempts",
            detail="a request whose instance died waits for another one",
        ),
    ] = 30.0
    guided_timeout_s: Annotated[
        float,
        SERVER(
            "Maximum seconds to check a request's schema, regex, grammar or template.",
            panel=Panel.REQUESTS,
            after="guided_decoding_backend",
            checks=(POSITIVE, at_most(MOST_GUIDED_TIMEOUT_S)),
            detail="checking a request's schema, regex or grammar",
        ),
    ] = 4.0

    def check_death(self) -> None:
        """Raises ConfigError if one late heartbeat would count as a death."""
        if self.dead_after_s < 2 * self.heartbeat_interval_s:
            name = called("dead_after")
            raise ConfigError(f"{name} {self.dead_after_s:g}: must be at least two heartbeat intervals")
