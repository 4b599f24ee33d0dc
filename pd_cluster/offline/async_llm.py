"""vLLM's and TACO-LLM's asynchronous engine: streams the offline engine's outputs on the caller's event loop.

Knows nothing of HTTP; `pd-cluster up` starts an HTTP server.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from pd_cluster.errors import Closed, PdClusterError, RequestError
from pd_cluster.offline.iterator_bridge import Stopped, bridged
from pd_cluster.offline.llm_adapters import LoRARequest, PromptAdapterRequest
from pd_cluster.offline.llm_outputs import CompletionOutputs, RequestOutput
from pd_cluster.offline.llm_sampling import RequestOutputKind, SamplingParams
from pd_cluster.offline.llm_streaming import aborted
from pd_cluster.offline.offline_llm import LLM

log = logging.getLogger(__name__)


class EngineArgs:
    """The arguments of `LLM`, by name. They are checked when an engine is made from them."""

    def __init__(self, model: str, **arguments: Any) -> None:
        self.arguments = {"model": model, **arguments}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["arguments"][name]
        except KeyError:
            raise AttributeError(f"EngineArgs has no argument {name}") from None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


class AsyncEngineArgs(EngineArgs):
    """EngineArgs, under vLLM's name for asynchronous engines."""


class AsyncLLMEngine:
    """Ready when constructed; usable from any event loop; a context manager. `shutdown` releases everything.

    `arguments` are those of `LLM`, including `prefill` and `decode`.
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        """Raises ConfigError, ModelError and the like."""
        self._llm = LLM(model, **arguments)
        self._running: dict[str, Future[None] | None] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **others: Any) -> Self:
        """Makes an engine. `others`: further arguments of vLLM, which have no effect; a warning names them."""
        if others:
            log.warning("from_engine_args: arguments without effect: %s", ", ".join(others))
        return cls(**engine_args.arguments)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the prompt's output as it grows; the last output is `finished`.

        `prompt`: a str, a dict with "prompt" or "prompt_token_ids", or a list of token ids. Each output has everything
        so far, unless `sampling_params.output_kind` is DELTA or FINAL_ONLY. Leaving the iteration ends the work. After
        `abort`, the last output has the finish_reason "abort".

        Raises RequestError for an invalid request, and another PdClusterError if the work fails later.
        """
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id: {request_id!r}; give a name, which abort needs", param="request_id")
        if request_id in self._running:
            raise RequestError(f"request_id: {request_id!r} is being answered; give another", param="request_id")
        if trace_headers:
            log.warning("trace_headers has no effect: the offline engine exports no traces")
        params = SamplingParams() if sampling_params is None else sampling_params
        outputs = self._llm.stream(prompt, params, request_id, lora_request, prompt_adapter_request, priority)
        last = RequestOutput(request_id=request_id, prompt=None, prompt_token_ids=[], outputs=CompletionOutputs())
        self._running[request_id] = None

        def started(work: Future[None]) -> None:
            self._running[request_id] = work

        try:
            async with contextlib.aclosing(bridged(self._llm.offline, outputs, started)) as items:
                async for last in items:
                    yield last
        except (Stopped, PdClusterError) as error:
            if not self.is_running:
                raise Closed("the engine was shut down before the answer was complete") from None
            if not isinstance(error, Stopped):
                raise
            is_delta = params.output_kind is RequestOutputKind.DELTA
            yield aborted(last.without_text() if is_delta else last)
        finally:
            del self._running[request_id]

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends the answers of these requests; ignores unknown names, because an answer may just have ended."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            work = self._running.get(name)
            if work is not None:
                work.cancel()

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """Returns the tokenizer as a transformers object; adapters share it."""
        return self._llm.get_tokenizer()

    @property
    def is_running(self) -> bool:
        return not self._llm.offline.is_closed

    @property
    def errored(self) -> bool:
        return not self.is_running

    async def check_health(self) -> None:
        """Raises Closed if the engine has ended."""
        if not self.is_running:
            raise Closed("the engine is shut down; make a new one")

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine and its answers; further calls do nothing. `timeout` has no effect."""
        self._llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
