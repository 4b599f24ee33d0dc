"""Makes the parts that every process that serves requests has: a mailbox, a router, and the conversion of text.

The caller provides the list of instances, which comes from the workers themselves or from the scheduler.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

from pd_cluster import wire
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.sampling_defaults import sampling_defaults
from pd_cluster.cluster.instances.roster import Roster
from pd_cluster.cluster.placement.outside_policy import policy_of
from pd_cluster.cluster.placement.routing_rules import ReplayLimits, RoutingRules, ServedLimits
from pd_cluster.cluster.placement.wait_prediction import Goals
from pd_cluster.cluster.routing.router import Router
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.net.peer_admission import Life, peer_key
from pd_cluster.service.callers.adapter_names import digests_of
from pd_cluster.service.request_traces import Tracing
from pd_cluster.service.service_config import ServiceConfig
from pd_cluster.service.text_service import TextService
from pd_cluster.settings.process_configs import ApiConfig, Credentials
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.settings.timeouts import Timeouts

log = logging.getLogger(__name__)

RosterT = TypeVar("RosterT", bound=Roster)


class LoopHandler:
    """Carries the mailbox's events from its thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, roster: Roster, router: Router) -> None:
        self._loop = loop
        self.roster = roster
        self.router = router
        self.fatal: asyncio.Future[None] = loop.create_future()

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self._call(self.roster.on_opened, conn)

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if isinstance(body, wire.Outputs):
            heard_s = self.router.timelines.heard(
                conn, body.now_s
            )  # measured on this thread, before waiting for the loop
            self._call(self.router.on_outputs, conn, body, heard_s)
        elif isinstance(body, wire.Heartbeat) and body.load is not None:
            self._call(self.roster.on_heartbeat, conn, body.load)
        elif isinstance(body, wire.CacheKeys):
            self._call(self.roster.on_cache_keys, conn, body)
        elif isinstance(body, wire.Found):
            self._call(self.router.on_found, conn, body)
        elif isinstance(body, wire.AdapterStates):
            self._call(self.roster.on_adapter_states, conn, body)
        elif isinstance(body, wire.StaleTerm):
            self._call(self.roster.on_stale_order, conn, body.term)

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        self._call(self.roster.on_closed, conn, reason)
        self._call(self.router.timelines.gone, conn)

    def on_fatal(self, error: BaseException) -> None:
        self._call(self.fatal.set_exception, error)

    def load(self) -> wire.Load | None:
        return None

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


class ServingContext(Generic[RosterT]):
    """Must be created on its event loop. Raises ConfigError for a model that cannot be served.

    `roster_of` makes the list of instances for requests: membership in the scheduler, its mirror in an API process.
    `index` distinguishes the processes of one scheduler, which have different names towards workers and different
    random seeds.
    """

    def __init__(
        self,
        config: ApiConfig,
        credentials: Credentials,
        roster_of: Callable[[Mailbox, Checkpoint], RosterT],
        index: int | None = None,
        adapters: dict[str, str] | None = None,
        is_scheduler: bool = False,
    ) -> None:
        """`adapters`: name -> digest, if another process has read them; None: this process reads --lora-modules.
        `is_scheduler`: this is one of several schedulers, and `index` is its number.
        """
        engine = config.engine
        self.config = config
        self.checkpoint = Checkpoint.of(engine)
        self.checkpoint.warn_of_ignored_files()
        self.checkpoint.warn_if_unproven()
        if adapters is None:
            adapters = digests_of(engine.adapters, (engine.model, *config.model_names))
        seed = engine.seed if engine.seed is None or not index else hash((engine.seed, index))
        self._served = served = service_config(config, self.checkpoint, adapters, seed, credentials.key)
        if served.sampling_defaults and index is None:
            told = ", ".join(f"{name} {value:g}" for name, value in served.sampling_defaults.items())
            log.info("default sampling parameters: %s (--generation-config vllm ignores the file's)", told)
        self.adapters = adapters
        name = "scheduler" if index is None else f"scheduler-{index}"
        self.mailbox = Mailbox(Life(name, secrets.randbits(62)), "scheduler", credentials, config.timeouts)
        self._trace_secret = hashlib.sha256(b"served requests" + credentials.secret).digest()  # equal in all processes
        try:
            self.roster, self.router = self._routed(roster_of, is_scheduler)
            if is_scheduler:
                self.roster.own_key = peer_key(name, self.mailbox.epoch)
            self.handler = LoopHandler(asyncio.get_running_loop(), self.roster, self.router)
        except BaseException:
            self.mailbox.close()
            raise

    def _routed(
        self, roster_of: Callable[[Mailbox, Checkpoint], RosterT], is_scheduler: bool
    ) -> tuple[RosterT, Router]:
        """Makes the list of instances, and the router over it."""
        routing = self.config.routing
        keeps = ServedLimits(routing.trace_requests, self._trace_secret)
        rules = replace(routing_rules(routing, self.config.timeouts, is_scheduler), keeps=keeps)
        roster = roster_of(self.mailbox, self.checkpoint)
        return roster, Router(self.mailbox.send, roster, rules)

    def start(self) -> None:
        """Starts to receive messages from workers."""
        self.mailbox.start(self.handler)

    def service(self) -> TextService:
        """Makes the service of this process."""
        self.router.expect_instances()
        endpoint = self.config.http.traces_endpoint
        return TextService(self.router, self.checkpoint, self._served, Tracing(endpoint) if endpoint else None)


def service_config(
    config: ApiConfig, checkpoint: Checkpoint, adapters: Mapping[str, str], seed: int | None, handle_secret: bytes
) -> ServiceConfig:
    """Returns the configuration of a process's service. `handle_secret` b"": makes a new secret. Raises ConfigError."""
    engine = config.engine
    defaults = sampling_defaults(checkpoint, engine.generation_config, config.sampling_override)
    made = ServiceConfig(config, checkpoint.max_model_len(engine.max_model_len), seed, defaults, adapters)
    return replace(made, handle_secret=handle_secret) if handle_secret else made


def routing_rules(routing: RoutingConfig, timeouts: Timeouts, shares_workers: bool = False) -> RoutingRules:
    """Returns the routing rules of settings. `shares_workers`: other schedulers use the same workers."""
    return RoutingRules(
        policy_of(routing.policy),
        timeouts.request_timeout_s,
        replay_limits(routing.max_attempts, timeouts),
        Goals(routing.slo_ttft_s, routing.slo_tpot_s),
        routing.max_queue_s,
        routing.has_priorities,
        shares_workers,
        find_s=timeouts.connect_timeout_s,
        holds_first=routing.first_token == "with-decode",
    )


def replay_limits(max_attempts: int, timeouts: Timeouts) -> ReplayLimits:
    together_s = timeouts.dead_after_s + timeouts.heartbeat_interval_s  # the longest time until a death is noticed
    return ReplayLimits(max_attempts, timeouts.replay_wait_s, together_s)
