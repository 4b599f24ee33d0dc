"""One engine in this process, on a thread of its own, as the instance that a router sends its requests to.

It is a worker as any other, but that its mail goes from thread to thread. Knows nothing of text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from pd_cluster import wire
from pd_cluster.cluster.instance import Instance
from pd_cluster.cluster.policy import Ask, Pair, alone
from pd_cluster.cluster.roster import Roster
from pd_cluster.cluster.router import ReplayLimits, Router
from pd_cluster.config import Credentials, EngineConfig, PortRange, Timeouts, WorkerConfig
from pd_cluster.errors import ConfigError, PdClusterError, Unavailable
from pd_cluster.reports import InstanceInfo

if TYPE_CHECKING:
    from pd_cluster.engine.events import Event
    from pd_cluster.engine.links import ReceiveEnd, SendEnd
    from pd_cluster.engine.worker import Worker

log = logging.getLogger(__name__)

NAME = "engine"
END_TIMEOUT_S = 30.0  # for a step that has begun
POLL_S = 0.005
NO_TIMEOUTS = Timeouts(request_timeout_s=0.0)  # whoever waits here can end it by hand
# Nobody starts a worker process again that has died: what waits for one waits for a connection to come back.
SPLIT_TIMEOUTS = Timeouts(request_timeout_s=0.0, replay_wait_s=5.0)


class LocalEngine:
    """Made on the event loop that its `router` is for; `start` loads the model."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError."""
        if config.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size {config.tensor_parallel_size}: one process has one rank; give 1, or prefill=1, "
                f"decode=1 to have worker processes"
            )
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._loaded: Future[InstanceInfo] = Future()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self.router = Router(self, _alone, 0.0, ReplayLimits(0, 0.0, 0.0))  # type: ignore[arg-type]
        self._roster = _OneInstance(self.router)
        self.router.membership = self._roster

    async def start(self) -> None:
        """Until requests can be served. Raises ModelError and the like."""
        self._thread.start()
        self.router.timelines.heard(NAME, self.router.timelines.now_s())  # it is the same clock
        self._roster.arrive(await asyncio.wrap_future(self._loaded))

    async def close(self) -> None:
        """After the step that runs."""
        from pd_cluster.engine.events import Stop

        if not self._thread.is_alive():
            return
        self._inbox.put(Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._ended.wait()  # not `join` on another thread: at the interpreter's end there is none
                self._thread.join(END_TIMEOUT_S)  # it has nothing left to do

    # ---- the router's mailbox, and the worker's: one talks to the other

    def send(self, conn: str, body: wire.Body) -> None:
        from pd_cluster.engine.events import Mail

        if isinstance(body, wire.Submit | wire.Abort):
            self._inbox.put(Mail(conn, "scheduler@0", body))
        elif isinstance(body, wire.Outputs):
            self._call(self.router.on_outputs_at_once, conn, body)
        elif isinstance(body, wire.CacheKeys):
            self._call(self._roster.on_cache_keys, conn, body)

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        raise AssertionError("an engine by itself has no peers")

    def disconnect(self, conn: str) -> None:
        """There is one connection, and it stays."""

    def beat(self) -> None:
        """Nobody is far enough to have to hear that this lives."""

    def _call(self, function: object, *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)  # type: ignore[arg-type]

    # ---- on the engine's thread

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._call(self._ended.set)

    def _work(self) -> None:
        try:
            worker, info = self._load()
        except PdClusterError as error:
            self._loaded.set_exception(error)
            return
        except BaseException as error:
            self._loaded.set_exception(error)
            raise
        self._loaded.set_result(info)
        try:
            worker.run()
            reason = "the engine was closed"
        except Exception as error:  # this thread's top
            log.exception("the engine has failed")
            reason = f"the engine has failed: {error}"
        self._call(self._roster.on_closed, NAME, reason)

    def _load(self) -> tuple[Worker, InstanceInfo]:
        import torch

        from pd_cluster.engine.build import build_core, side_of
        from pd_cluster.engine.events import Opened
        from pd_cluster.engine.limits import Limits
        from pd_cluster.engine.worker import Worker

        torch.set_grad_enabled(False)  # of this thread
        config = WorkerConfig(
            name=NAME,
            role="decode",
            server_ip="",
            bind_address="",
            device_ids=[],
            epoch=1,
            credentials=Credentials(b""),
            num_threads=torch.get_num_threads(),
            kv_transport="auto",
            kv_port_range=PortRange(),
            engine=self._config,
            timeouts=NO_TIMEOUTS,
        )
        core, runner = build_core(self._config)
        limits = Limits(runner.vocab_size, runner.max_model_len)
        worker = Worker(config, core, side_of(config, runner), limits, self, _NoLanes(), self._inbox)
        self._inbox.put(Opened(NAME, "scheduler@0", "scheduler"))
        info = InstanceInfo(
            name=NAME,
            role="decode",
            state="ready",
            server_ip="",
            device_ids=[],
            epoch=1,
            pid=0,
            model_identity=runner.model_identity,
            numerics=runner.numerics,
            max_model_len=runner.max_model_len,
            layout=runner.pool.layout.to_info(),
            num_blocks=runner.pool.num_blocks,
        )
        return worker, info


class _OneInstance(Roster):
    def __init__(self, router: Router) -> None:
        super().__init__([Instance(NAME, "decode", "", 0, [])], None, router.on_lost)  # type: ignore[arg-type]

    def arrive(self, info: InstanceInfo) -> None:
        (instance,) = self.instances
        instance.info, instance.conn, instance.was_linked = info, NAME, True
        self._by_conn[NAME] = instance
        self.on_opened(NAME)


class _NoLanes:
    """Of a worker that nobody hands anything to."""

    def send_end(self, *_: object) -> SendEnd:
        raise AssertionError("an engine by itself has no peers")

    def receive_end(self, *_: object) -> ReceiveEnd:
        raise AssertionError("an engine by itself has no peers")


def _alone(instances: Sequence[Instance], ask: Ask) -> Pair:
    """Raises Unavailable once the engine has ended."""
    try:
        return alone(instances)
    except Unavailable:
        (instance,) = instances
        raise Unavailable(instance.reason or "the engine is not there") from None
