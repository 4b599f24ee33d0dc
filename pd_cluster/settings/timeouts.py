"""Every deadline of the pages in docs/protocol."""

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
    """All times are in seconds; 0 means none where it is allowed. `pd-cluster check` shows a setting's `detail`."""

    heartbeat_interval_s: Annotated[
        float, WORKERS("Seconds between heartbeats.", detail="one heartbeat on every connection")
    ] = 0.5
    dead_after_s: Annotated[
        float,
        WORKERS(
            "Seconds of silence after which a peer counts as dead.",
            detail="silence after which a peer is dead (end of file: at once)",
        ),
    ] = 3.0
    connect_timeout_s: Annotated[
        float,
        WORKERS(
            "Seconds to open a connection or a link.",
            detail="opening a connection or a link; tried again after 0.5 s, doubling to 5 s",
        ),
    ] = 5.0
    join_timeout_s: Annotated[
        float,
        SERVER(
            "Seconds in which a worker with --join must be registered, also after a loss.",
            checks=(POSITIVE,),
            detail="a worker with --join finds a scheduler that admits it",
        ),
    ] = 300.0
    lease_duration_s: Annotated[
        float,
        SERVER(
            "With --scheduler-lease: seconds until another scheduler may take over; 0: 1.5, or 15 in Kubernetes.",
            checks=(finite("must not be negative or infinite"),),
            after="scheduler_index",
            panel=Panel.SCHEDULER,
            detail="with several schedulers: one that stands still, or has died, owns membership no more; 0: 1.5, in "
            "Kubernetes 15",
        ),
    ] = 0.0
    credit_timeout_s: Annotated[
        float,
        WORKERS(
            "Seconds within which an idle decode instance must accept an offer.",
            detail="a decode instance that makes no progress must take an offered transfer within this",
        ),
    ] = 10.0
    transfer_timeout_s: Annotated[
        float,
        WORKERS("Seconds that a KV transfer may make no progress.", detail="a transfer that stands still is given up"),
    ] = 30.0
    encode_timeout_s: Annotated[
        float,
        WORKERS(
            "Seconds without progress of an encoder until a prefill instance computes the image.",
            detail="an encoder that computes nothing loses its images to prefill; a busy one, after six times this",
        ),
    ] = 10.0
    collective_timeout_s: Annotated[
        float,
        WORKERS(
            "Seconds that a rank waits for another rank.",
            also=("distributed_timeout_seconds", "cpu_distributed_timeout_seconds"),
            detail="a rank of an instance waits for the others",
        ),
    ] = 60.0
    step_timeout_s: Annotated[
        float,
        WORKERS(
            "Seconds until an engine that hangs in a step is ended; 0: never.",
            checks=(finite("must not be negative or infinite"),),
            detail="an engine that does not come back from a step is ended; 0: never",
        ),
    ] = 600.0
    link_keepalive_s: Annotated[
        float,
        WORKERS(
            "Seconds after which an idle link is probed.",
            panel=Panel.KV,
            after="kv_rate_limit",
            detail="a link that is idle is probed",
        ),
    ] = 30.0
    request_timeout_s: Annotated[float, SERVER("Seconds for a whole request; 0: none.", detail="a whole request")] = (
        600.0
    )
    drain_timeout_s: Annotated[
        float,
        SERVER(
            "Seconds for running requests after SIGTERM.",
            detail="running requests after SIGTERM",
            also=("shutdown_timeout",),
        ),
    ] = 30.0
    replay_wait_s: Annotated[
        float,
        SERVER(
            "Seconds that such a request may wait for an instance.",
            panel=Panel.SCHEDULER,
            after="max_attempts",
            detail="a request whose instance died waits for one that can go on",
        ),
    ] = 30.0
    guided_timeout_s: Annotated[
        float,
        SERVER(
            "Seconds to try a request's schema, regex, grammar or template.",
            panel=Panel.REQUESTS,
            after="guided_decoding_backend",
            checks=(POSITIVE, at_most(MOST_GUIDED_TIMEOUT_S)),
            detail="trying a schema, regex or grammar of a request",
        ),
    ] = 4.0

    def check_death(self) -> None:
        """Raises ConfigError where one late heartbeat would count as a death."""
        if self.dead_after_s < 2 * self.heartbeat_interval_s:
            name = called("dead_after")
            raise ConfigError(f"{name} {self.dead_after_s:g}: must be at least two heartbeat intervals")
