"""One engine in this process, on a separate thread, as the only instance of a router.

The engine is a worker like any other, but exchanges messages with the router's thread. Knows nothing of text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from pd_cluster import host, wire
from pd_cluster.checkpoints.prompt_adapter_folder import AdapterFolder
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.roster import Roster
from pd_cluster.cluster.members.cluster_control import ClusterControl
from pd_cluster.cluster.placement.routing_policy import Pair, RoutingRequest, single_instance
from pd_cluster.cluster.placement.routing_rules import ReplayLimits, RoutingRules
from pd_cluster.cluster.routing.router import Router
from pd_cluster.cluster.weights.weight_updates import WeightRules, WeightUpdates
from pd_cluster.errors import ConfigError, ModelError, PdClusterError, Unavailable
from pd_cluster.process_messages import InstanceInfo
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_configs import Credentials, WorkerConfig
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts

if TYPE_CHECKING:
    from pd_cluster.engine.handover.engine_events import Event
    from pd_cluster.engine.handover.links.link_ends import ReceiveEnd, SendEnd
    from pd_cluster.engine.lifecycle.engine_weights import EngineWeights
    from pd_cluster.engine.worker.worker_loop import Loop
    from pd_cluster.model.runner.model_runner import ModelRunner

log = logging.getLogger(__name__)

NAME = "engine"
END_TIMEOUT_S = 30.0  # the time for the current step to end
POLL_S = 0.005
NO_TIMEOUTS = Timeouts(request_timeout_s=0.0)  # the caller can interrupt a wait
# A dead worker process is not restarted. Only a lost connection may come back, and that takes little time.
SPLIT_TIMEOUTS = Timeouts(request_timeout_s=0.0, replay_wait_s=5.0)


class LocalEngine:
    """Must be constructed on the event loop of its `router`; `start` loads the model."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError."""
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if (size := getattr(config, name)) != 1:
                raise ConfigError(
                    f"{name} {size}: one process has one rank; give 1, or prefill and decode to have worker processes"
                )
        self.table = b""  # there is no rank table
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._loaded: Future[InstanceInfo] = Future()
        self._ended = asyncio.Event()
        self._adapters: dict[str, str] = {}  # digest -> path
        self._heard: asyncio.Queue[wire.AdapterStates | None] = asyncio.Queue()  # None: the engine has ended
        self._loads_one = asyncio.Lock()
        self._weights: EngineWeights | None = None  # while the engine runs
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._roster = _OneInstance(Instance(NAME, "decode", "", 0, []), self)
        self.router = Router(self.send, self._roster, RoutingRules(_alone, replay=ReplayLimits(0, 0.0, 0.0)))

    async def start(self) -> None:
        """Loads the model and waits until requests can be served. Raises ModelError and the like."""
        self._thread.start()
        self.router.timelines.heard(NAME, self.router.timelines.now_s())  # both use the same clock
        self._roster.arrive(await asyncio.wrap_future(self._loaded))

    async def close(self) -> None:
        """Ends the engine after the current step."""
        from pd_cluster.engine.handover.engine_events import StopEngine

        if not self._thread.is_alive():
            return
        self._inbox.put(StopEngine())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await self._ended.wait()  # not `join` on another thread, which cannot start while the interpreter ends
                self._thread.join(END_TIMEOUT_S)  # returns soon, because the thread's work has ended

    async def load_adapter(self, folder: AdapterFolder) -> None:
        """Loads an adapter; returns when requests may use it. Raises ModelError, Unavailable."""
        async with self._loads_one:
            while not self._heard.empty():
                self._heard.get_nowait()
            self._adapters[folder.digest] = str(folder.path)
            places = [wire.AdapterLocation(digest, path) for digest, path in self._adapters.items()]
            self.send(NAME, wire.WantedAdapters(places))
            while True:
                states = await self._heard.get()
                if states is None:
                    raise Unavailable("the engine has ended")
                if folder.digest in states.loaded:
                    return
                if problem := states.problems.get(folder.digest):
                    del self._adapters[folder.digest]
                    raise ModelError(problem)

    def weight_updates(self, rules: WeightRules) -> WeightUpdates:
        control = ClusterControl(self._roster, self, self.router, NO_TIMEOUTS.request_timeout_s)
        return WeightUpdates(self._roster, self.send, control, rules)

    # ---- the mailboxes of the router and of the worker, which exchange messages

    def send(self, conn: str, body: wire.Body) -> None:
        from pd_cluster.engine.handover.engine_events import Mail

        if isinstance(body, wire.Submit | wire.Abort | wire.WantedAdapters | wire.CheckWeights | wire.ChangeWeights):
            self._inbox.put(Mail(conn, "scheduler@0", body))
        elif isinstance(body, wire.Outputs):
            self._call(self.router.on_outputs_at_once, conn, body)
        elif isinstance(body, wire.CacheKeys):
            self._call(self._roster.on_cache_keys, conn, body)
        elif isinstance(body, wire.AdapterStates):
            self._call(self._heard.put_nowait, body)

    def connect(self, name: str, epoch: int, host: str, port: int, key: bytes) -> str:
        raise AssertionError("an engine by itself has no peers")

    def disconnect(self, conn: str) -> None:
        """Does nothing: the only connection is permanent."""

    def beat(self) -> None:
        """Reports the version of the weights, the only part of a heartbeat that is used here."""
        if self._weights is not None:
            self._call(self._roster.on_heartbeat, NAME, wire.Load(weights=self._weights.status))

    def beat_soon(self) -> None:
        """Does nothing, because a heartbeat's figures are not used here."""

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._call(self._heard.put_nowait, None)
            self._call(self._ended.set)

    def _work(self) -> None:
        self._loaded.set_running_or_notify_cancel()  # from now on the load cannot be cancelled
        with contextlib.ExitStack() as ending:  # the worker itself is freed by garbage collection
            try:
                loop, info = self._load(ending)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # the frames refer to the model
                self._loaded.set_exception(error)
                if isinstance(error, PdClusterError):
                    return
                raise
            self._loaded.set_result(info)
            try:
                loop.run()
                reason = "the engine was closed"
            except Exception as error:  # top of this thread
                log.exception("the engine has failed")
                reason = f"the engine has failed: {error}"
        self._call(self._roster.on_closed, NAME, reason)

    def _load(self, ending: contextlib.ExitStack) -> tuple[Loop, InstanceInfo]:
        """Makes the loop. `ending` receives the callbacks that clean up when the worker ends."""
        import torch

        from pd_cluster.devices.openmp_spinning import Spinning
        from pd_cluster.engine.assembly.build_engine import build_core
        from pd_cluster.engine.assembly.build_legs import endpoint_of, legs_of
        from pd_cluster.engine.assembly.build_stages import adapters_of
        from pd_cluster.engine.assembly.build_weights import weights_of
        from pd_cluster.engine.handover.engine_events import ConnOpened
        from pd_cluster.engine.handover.handover_context import HandoverContext
        from pd_cluster.engine.lifecycle.availability import Availability
        from pd_cluster.engine.lifecycle.engine_sleep import EngineSleep
        from pd_cluster.engine.lifecycle.engine_weights import EngineWeights
        from pd_cluster.engine.lifecycle.worker_drain import WorkerDrain
        from pd_cluster.engine.stages.cache_reports import CacheReports
        from pd_cluster.engine.worker.worker import Cores, Worker
        from pd_cluster.engine.worker.worker_loop import Loop

        torch.set_grad_enabled(False)  # per thread
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
        if "OMP_NUM_THREADS" not in os.environ:  # torch would use cores beyond this process's limit
            torch.set_num_threads(min(torch.get_num_threads(), host.num_cores()))
        if (spinning := Spinning.here(torch.get_num_threads())) is not None:
            ending.callback(spinning.close)
        core, runner = build_core(self._config)
        ending.callback(runner.let_go)
        if spinning is not None:
            runner.threads.watch(spinning)
        context = HandoverContext(endpoint_of(config, runner), self, _NoLanes(), self._inbox.put, config.timeouts)
        legs = legs_of(config, core, runner, context)
        stages = [adapters_of(config, runner, None, legs, context), CacheReports(self, core.scheduler.known)]
        drain = WorkerDrain(config.timeouts.drain_timeout_s, context.clock)
        weights = self._weights = EngineWeights(weights_of(core, runner, runner))
        ending.callback(setattr, self, "_weights", None)
        state = Availability(drain, EngineSleep(None, core.scheduler.forget), weights=weights)
        worker = Worker(core, legs, stages, state, context, Cores())
        self._adapters = dict(runner.held.named)
        self._inbox.put(ConnOpened(NAME, "scheduler@0", "scheduler"))
        return Loop(self._inbox, worker), self._info_of(runner)

    def _info_of(self, runner: ModelRunner) -> InstanceInfo:
        return InstanceInfo(
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
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
        )


class _OneInstance(Roster):
    def __init__(self, instance: Instance, engine: LocalEngine) -> None:
        super().__init__([instance], engine)
        self._send = engine.send
        self.weights = wire.WeightVersion()

    def change_weights(self, version: wire.WeightVersion) -> None:
        self.weights = version
        self._send(NAME, wire.ChangeWeights(version))

    def offer_weights(self, version: wire.WeightVersion) -> None:
        """Does nothing: this process reads the files themselves."""

    def may_load_weights(self) -> list[Instance]:
        return [each for each in self.instances if each.is_ready]

    def lacking_weights(self) -> list[Instance]:
        return [each for each in self.instances if each.is_ready and each.load.weights.held != self.weights]

    def set_back_lacking(self) -> None:
        """Does nothing: the only instance takes no requests until it has loaded the new weights."""

    def arrive(self, info: InstanceInfo) -> None:
        (instance,) = self.instances
        instance.info, instance.conn = info, NAME
        self._by_conn[NAME] = instance
        self.on_opened(NAME)


class _NoLanes:
    """The lanes of a worker without peers."""

    def send_end(self, *_: object) -> SendEnd:
        raise AssertionError("an engine by itself has no peers")

    def receive_end(self, *_: object) -> ReceiveEnd:
        raise AssertionError("an engine by itself has no peers")

    def needs_pair(self, *_: object) -> bool:
        raise AssertionError("an engine by itself has no peers")


def _alone(instances: Sequence[Instance], ask: RoutingRequest) -> Pair:
    """Chooses the only instance. Raises Unavailable if the engine has ended."""
    try:
        return single_instance(instances)
    except Unavailable:
        (instance,) = instances
        raise Unavailable(instance.reason or "the engine is not ready") from None
