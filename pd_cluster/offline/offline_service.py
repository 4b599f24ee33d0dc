"""The base of `LLM`, `pipeline` and `run-batch`: a text service with an engine or worker processes.

Knows nothing of its callers' names and forms.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import msgspec

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.prompt_adapter_folder import AdapterFolder
from pd_cluster.cluster.processes.launch_settings import Launch, by_role
from pd_cluster.errors import Closed, ConfigError
from pd_cluster.media.media_download import ANY_HOST
from pd_cluster.offline.llm_adapters import RequestedAdapters
from pd_cluster.offline.local_engine import NO_TIMEOUTS, SPLIT_TIMEOUTS, LocalEngine
from pd_cluster.offline.loop_thread import LoopThread
from pd_cluster.offline.split_cluster import SplitCluster
from pd_cluster.offline.weight_commands import WeightCommands
from pd_cluster.service.callers.adapter_names import digests_of
from pd_cluster.service.concurrency.interpreter_tuning import seldom_collecting
from pd_cluster.service.serving_context import service_config
from pd_cluster.service.text_service import TextService
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.media_settings import MediaSettings
from pd_cluster.settings.process_configs import ApiConfig
from pd_cluster.settings.request_settings import ChatConfig, RequestSettings, StructuredOutputs
from pd_cluster.settings.routing_settings import RoutingConfig
from pd_cluster.settings.setting import declared

T = TypeVar("T")

LAUNCHED = ("model", "tensor_parallel_size", "data_parallel_size", "seed")  # the Launch or this process sets them


class OfflineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`prefill` and `decode`: numbers of worker processes; without them the engine runs in this process.

    `arguments`: further flags of `pd-cluster serve` for the worker processes.
    """

    engine: EngineConfig
    chat: ChatConfig = ChatConfig()
    media: MediaSettings = MediaSettings(domains=(ANY_HOST,))  # the caller's program chooses the URLs
    prefill: int = 0
    decode: int = 0
    max_logprobs: int = RequestSettings().max_logprobs
    served_model_names: tuple[str, ...] = ()  # the model's names in requests; empty: the last part of its path
    sampling_override: dict[str, int | float | None] = {}  # as in ApiConfig
    structured_outputs: StructuredOutputs = StructuredOutputs()
    arguments: tuple[str, ...] = ()


class OfflineService:
    """Ready when constructed; closed by `close`, `with`, garbage collection or the interpreter's end.

    A forked process cannot use this object. `service` belongs to the event loop of a separate thread; `run`, `start`
    and `iterate` run its awaitables.
    """

    def __init__(self, config: OfflineConfig) -> None:
        """Raises ConfigError, ModelError and the like."""
        if bool(config.prefill) != bool(config.decode) or min(config.prefill, config.decode) < 0:
            raise ConfigError(
                f"prefill {config.prefill}, decode {config.decode}: give both numbers, or neither for an engine in "
                f"this process"
            )
        self.resources = _Resources()
        self._loop = self.resources.loop
        atexit.register(self.resources.close)  # for a service that is still open at exit
        weakref.finalize(self, self.resources.end).atexit = False  # for a service that is collected earlier
        try:
            self.checkpoint = Checkpoint.of(config.engine)
            self.checkpoint.warn_of_ignored_files()
            self.resources.service = self.run(self._open(config))
            self.adapters = RequestedAdapters(config.engine.adapters, self.service.names.adapters, self._load_adapter)
        except BaseException:
            self.close()
            raise

    def _load_adapter(self, folder: AdapterFolder) -> None:
        """Loads an adapter. Raises ModelError, ConfigError, RequestError."""
        match self.resources.backend:
            case LocalEngine() as engine:
                self.run(engine.load_adapter(folder))
            case SplitCluster() as split:
                self.run(split.load_adapter(folder))

    @property
    def weights(self) -> WeightCommands:
        """The commands that replace the weights."""
        if self.resources.weights is None:
            assert self.resources.backend is not None
            self.resources.weights = WeightCommands(self.run, self.resources.backend, self.checkpoint.path)
        return self.resources.weights

    @property
    def service(self) -> TextService:
        assert self.resources.service is not None  # otherwise the constructor has raised
        return self.resources.service

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. Ctrl-C cancels it. Raises Closed after the end, and in a fork."""
        self._check_process(work)
        with seldom_collecting():
            return self._loop.run(work)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Returns a future of the result. Raises Closed after the end, and in a fork."""
        self._check_process(work)
        future = self._loop.start(work)
        future.add_done_callback(lambda _: self.resources)  # keeps this object alive until the work is done
        return future

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yields the items on this thread. Leaving the iteration closes the generator."""
        self._check_process()
        yield from self._loop.iterate(items)

    def _check_process(self, work: Coroutine[Any, Any, Any] | None = None) -> None:
        """Raises Closed in a fork, which does not have the threads, so that a wait would never end."""
        if not self.resources.is_own:
            if work is not None:
                work.close()
            raise Closed(
                f"this engine belongs to process {self.resources.pid}, the parent of this fork; make another one here"
            )

    def close(self) -> None:
        """Ends everything; further calls, and calls in a fork, do nothing."""
        self.resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _open(self, config: OfflineConfig) -> TextService:
        api = ApiConfig(
            engine=config.engine,
            served_model_names=list(config.served_model_names),
            is_openai=True,
            timeouts=SPLIT_TIMEOUTS if config.prefill else NO_TIMEOUTS,
            routing=RoutingConfig(has_priorities=True, max_queue_s=None),
            max_logprobs=config.max_logprobs,
            chat=config.chat,
            media=config.media,
            sampling_override=config.sampling_override,
            structured_outputs=config.structured_outputs,
        )
        if config.prefill:
            split = self.resources.backend = SplitCluster(api, launch_of(config))
            await split.start()
            return split.context.service()
        local = self.resources.backend = LocalEngine(config.engine)
        names = digests_of(config.engine.adapters, (config.engine.model, *api.model_names))
        served = service_config(api, self.checkpoint, names, config.engine.seed, b"")
        service = TextService(local.router, self.checkpoint, served)
        await local.start()
        return service


class _Resources:
    """The parts that an `OfflineService` ends. They do not refer to it, so that Python can garbage-collect it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = LoopThread("pd-cluster")
        self.backend: LocalEngine | SplitCluster | None = None
        self.service: TextService | None = None
        self.weights: WeightCommands | None = None

    @property
    def is_own(self) -> bool:
        """Whether this process made the service; a fork does not have its threads."""
        return os.getpid() == self.pid

    def close(self) -> None:
        if self.loop.is_closed or not self.is_own:
            return
        try:
            self.loop.run(self._close())
        finally:
            self.loop.close()
            atexit.unregister(self.close)

    def end(self) -> None:
        """Ends everything without waiting, because garbage collection may call this on any thread, even the loop's."""
        if self.is_own:
            self.loop.end(self._close())
            atexit.unregister(self.close)

    async def _close(self) -> None:
        try:
            if self.weights is not None:
                await self.weights.close()
            if self.service is not None:
                await self.service.close()
        finally:
            if self.backend is not None:
                await self.backend.close()


def launch_of(config: OfflineConfig) -> Launch:
    """Returns the worker processes of a configuration. Raises ConfigError."""
    engine, flags = config.engine, list(config.arguments)
    for group in (engine, engine.adapters):
        for each in declared(type(group)):
            written = each.write(getattr(group, each.field))
            if each.name not in LAUNCHED and written != each.default:
                flags += ["=".join(flag) for flag in each.flags(written)]
    return Launch(
        model=engine.model,
        num_prefill=config.prefill,
        num_decode=config.decode,
        tp_sizes=by_role(engine.tensor_parallel_size),
        unit_sizes=by_role(engine.data_parallel_size),
        arguments=[*flags, "--scheduling-policy=priority", "--request-timeout=0"],
    )
