"""What every process that serves requests has: a mailbox, a router, and text in and out of them.

Who is in the cluster comes from outside (`over`): from the workers themselves or from the scheduler.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping

from pd_cluster import wire
from pd_cluster.api.service import TextService
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.cluster.policy import POLICIES
from pd_cluster.cluster.predict import Goals
from pd_cluster.cluster.roster import Roster
from pd_cluster.cluster.router import ReplayLimits, Router
from pd_cluster.config import ApiConfig, Credentials, Timeouts
from pd_cluster.mailbox import Mailbox
from pd_cluster.sampling_defaults import sampling_defaults

log = logging.getLogger(__name__)


class Handler:
    """Carries the mailbox's events from its thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.roster: Roster
        self.router: Router
        self.fatal: asyncio.Future[None] = loop.create_future()

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        self._call(self.roster.on_opened, conn)

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if isinstance(body, wire.Outputs):
            heard_s = self.router.timelines.heard(conn, body.now_s)  # here, before it waits for its turn on the loop
            self._call(self.router.on_outputs, conn, body, heard_s)
        elif isinstance(body, wire.Heartbeat) and body.load is not None:
            self._call(self.roster.on_heartbeat, conn, body.load)
        elif isinstance(body, wire.CacheKeys):
            self._call(self.roster.on_cache_keys, conn, body)

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


class Edge:
    """On the event loop that it is made on. Raises ConfigError for a model that cannot be served.

    `index` tells several processes of one scheduler apart: workers know them by name, and drawn seeds must differ.
    """

    def __init__(self, config: ApiConfig, credentials: Credentials, index: int | None = None) -> None:
        engine, routing, timeouts = config.engine, config.routing, config.timeouts
        self.config = config
        self.checkpoint = Checkpoint.of(engine)
        self.checkpoint.warn_of_ignored_files()
        self.checkpoint.warn_if_unproven()
        self._defaults = sampling_defaults(self.checkpoint, engine.generation_config, config.sampling_override)
        if self._defaults and index is None:
            told = ", ".join(f"{name} {value:g}" for name, value in self._defaults.items())
            log.info("requests that do not say otherwise have %s (--generation-config vllm: not the file's)", told)
        self._limit = self.checkpoint.max_model_len(engine.max_model_len)
        self._seed = engine.seed if engine.seed is None or not index else hash((engine.seed, index))
        name = "scheduler" if index is None else f"scheduler-{index}"
        self.handler = Handler(asyncio.get_running_loop())
        self.mailbox = Mailbox(name, secrets.randbits(62), "scheduler", credentials, timeouts, self.handler)
        self.router = self.handler.router = Router(
            self.mailbox,
            POLICIES[routing.policy],
            timeouts.request_timeout_s,
            replay_limits(routing.max_attempts, timeouts),
            Goals(routing.slo_ttft_s, routing.slo_tpot_s),
        )

    def follow(self, roster: Roster) -> None:
        """What the mailbox hears of instances goes there."""
        self.router.membership = self.handler.roster = roster

    def over(self, roster: Roster) -> TextService:
        """Requests go to these instances."""
        self.follow(roster)
        self.router.expect_instances()
        return text_service(self.router, self.checkpoint, self.config, self._limit, self._seed, self._defaults)


def text_service(
    router: Router,
    checkpoint: Checkpoint,
    config: ApiConfig,
    max_model_len: int,
    seed: int | None,
    defaults: Mapping[str, int | float],
) -> TextService:
    """Raises ConfigError."""
    return TextService(
        router,
        checkpoint,
        config.engine.model,
        config.served_model_names,
        max_model_len,
        seed,
        config.max_logprobs,
        config.engine.max_num_seqs,
        config.timeouts.guided_timeout_s,
        config.routing.has_priorities,
        config.chat,
        config.returns_tokens_as_token_ids,
        defaults,
        config.requires_model,
    )


def replay_limits(max_attempts: int, timeouts: Timeouts) -> ReplayLimits:
    together_s = timeouts.dead_after_s + timeouts.heartbeat_interval_s  # the latest that a death is seen
    return ReplayLimits(max_attempts, timeouts.replay_wait_s, together_s)
