"""What `LLM`, `pipeline` and `run-batch` stand on: a text service, and the engine or the worker processes behind it.

Knows nothing of whose names and shapes its callers have.
"""

from __future__ import annotations

import atexit
import json
import os
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Self, TypeVar

import msgspec

from pd_cluster.api.edge import text_service
from pd_cluster.api.interpreter import seldom_collecting
from pd_cluster.api.service import TextService
from pd_cluster.checkpoint import Checkpoint
from pd_cluster.cluster.launcher import Launch
from pd_cluster.config import ApiConfig, ChatConfig, EngineConfig, RoutingConfig
from pd_cluster.errors import Closed, ConfigError
from pd_cluster.flags import choice_of_model
from pd_cluster.offline.local import NO_TIMEOUTS, SPLIT_TIMEOUTS, LocalEngine
from pd_cluster.offline.loop import LoopThread
from pd_cluster.offline.split import SplitCluster
from pd_cluster.sampling_defaults import sampling_defaults

T = TypeVar("T")

FLAGS = {  # of EngineConfig -> what worker processes are told
    "revision": "--revision",
    "download_dir": "--download-dir",
    "tokenizer": "--tokenizer",
    "tokenizer_revision": "--tokenizer-revision",
    "max_seq_len_to_capture": "--max-seq-len-to-capture",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "block_size": "--block-size",
    "num_blocks": "--num-blocks",
    "kv_cache_memory_gib": "--kv-cache-memory",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "preemption_mode": "--preemption-mode",
    "swap_space_gib": "--swap-space",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "growth_tokens": "--growth-tokens",
    "device": "--device",
    "attention_backend": "--attention-backend",
    "generation_config": "--generation-config",
}


class OfflineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Without `prefill` and `decode` the engine runs in this process; with both they are worker processes' numbers.

    `arguments` are further flags of `pd-cluster serve` for these.
    """

    engine: EngineConfig
    chat: ChatConfig = ChatConfig()
    prefill: int = 0
    decode: int = 0
    max_logprobs: int = 20
    served_model_names: tuple[str, ...] = ()  # what requests may call the model; none: its folder
    sampling_override: dict[str, int | float | None] = {}  # as ApiConfig has it
    arguments: tuple[str, ...] = ()


class Offline:
    """Ready when it is made, gone when it is closed: by `close`, by `with`, when nobody has it any more, or at the
    interpreter's end. A process that was forked off does not have it.

    `service` belongs to the event loop of a thread of its own: what awaits it goes through `run`, `start` or `iterate`.
    """

    def __init__(self, config: OfflineConfig) -> None:
        """Raises ConfigError, ModelError and the like."""
        if bool(config.prefill) != bool(config.decode) or min(config.prefill, config.decode) < 0:
            raise ConfigError(
                f"prefill {config.prefill}, decode {config.decode}: give how many of each there shall be, or neither "
                f"for an engine in this process"
            )
        self._parts = _Parts()
        self._loop = self._parts.loop
        atexit.register(self._parts.close)  # for who still has it then
        weakref.finalize(self, self._parts.end).atexit = False  # for who forgets it earlier
        try:
            self.checkpoint = Checkpoint.of(config.engine)
            self.checkpoint.warn_of_ignored_files()
            self._parts.service = self.run(self._open(config))
        except BaseException:
            self.close()
            raise

    @property
    def service(self) -> TextService:
        assert self._parts.service is not None  # else the constructor has raised
        return self._parts.service

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, awaited by this thread. Ctrl-C cancels it. Raises Closed after the end, and in a fork."""
        self._check_process(work)
        with seldom_collecting():
            return self._loop.run(work)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Its result, later. Raises Closed after the end, and in a fork."""
        self._check_process(work)
        future = self._loop.start(work)
        future.add_done_callback(lambda _: self._parts)  # so that this object is not collected before it is done
        return future

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Its items, as this thread asks for them. Leaving the iteration closes the generator."""
        self._check_process()
        yield from self._loop.iterate(items)

    def _check_process(self, work: Coroutine[Any, Any, Any] | None = None) -> None:
        """No thread comes along in a fork: what waited for one there would wait forever."""
        if not self._parts.is_own:
            if work is not None:
                work.close()
            raise Closed(
                f"this engine stayed in process {self._parts.pid}, which this one was forked off; make one here"
            )

    def close(self) -> None:
        """Ends everything; once is enough. Nothing in a fork, which has none of it."""
        self._parts.close()

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
            routing=RoutingConfig(has_priorities=True),
            max_logprobs=config.max_logprobs,
            chat=config.chat,
            sampling_override=config.sampling_override,
        )
        if config.prefill:
            split = self._parts.backend = SplitCluster(api, _launch(config))
            await split.start()
            return split.edge.over(split.membership)
        local = self._parts.backend = LocalEngine(config.engine)
        limit = self.checkpoint.max_model_len(config.engine.max_model_len)
        defaults = sampling_defaults(self.checkpoint, config.engine.generation_config, config.sampling_override)
        service = text_service(local.router, self.checkpoint, api, limit, config.engine.seed, defaults)
        await local.start()
        return service


class _Parts:
    """What an `Offline` has to end. Does not know it, so that it can be forgotten."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = LoopThread("pd-cluster")
        self.backend: LocalEngine | SplitCluster | None = None
        self.service: TextService | None = None

    @property
    def is_own(self) -> bool:
        """Not in a fork, where none of the threads is."""
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
        """Without waiting: what is forgotten is collected on any thread, the loop's own among them."""
        if self.is_own:
            self.loop.end(self._close())
            atexit.unregister(self.close)

    async def _close(self) -> None:
        try:
            if self.service is not None:
                await self.service.close()
        finally:
            if self.backend is not None:
                await self.backend.close()


def _launch(config: OfflineConfig) -> Launch:
    engine, flags = config.engine, list(config.arguments)
    defaults = EngineConfig(model=engine.model)
    for name, flag in FLAGS.items():
        value = getattr(engine, name)
        if value is not None and value != getattr(defaults, name):
            flags.append(f"{flag}={value}")
    if engine.skip_tokenizer_init:
        flags.append("--skip-tokenizer-init")
    if engine.hf_overrides:
        flags.append(f"--hf-overrides={json.dumps(engine.hf_overrides)}")
    if engine.enforce_eager:
        flags.append("--enforce-eager")
    flags += choice_of_model(engine.try_unlisted, engine.language_model_only)
    if not engine.enable_prefix_caching:
        flags.append("--no-enable-prefix-caching")
    names = [f"prefill-{i}" for i in range(config.prefill)] + [f"decode-{i}" for i in range(config.decode)]
    return Launch(
        model=engine.model,
        num_prefill=config.prefill,
        num_decode=config.decode,
        tp_sizes=dict.fromkeys(names, engine.tensor_parallel_size),
        arguments=[*flags, "--scheduling-policy=priority", "--request-timeout=0"],
    )
