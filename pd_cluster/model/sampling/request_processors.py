"""Applies the operator's logits processors to rows of logits, one row per call.

A sequence's processors are derived from its request and its tokens, so they can be dropped at any time: after a replay,
a handover or a preemption they are created again from the output so far. If a processor raises an exception, the
sequence's request ends with it as the reason. Does not choose tokens.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor

from pd_cluster.errors import first_line
from pd_cluster.logits_processors import BatchUpdate, ProcessorParams
from pd_cluster.model.sampling.load_processors import LoadedProcessor, ProcessorCalls
from pd_cluster.types import Request, Sampling

log = logging.getLogger(__name__)

Step: TypeAlias = Callable[[Tensor], Any]  # takes a row of logits [vocab_size]


class ProcessorError(Exception):
    """A processor has failed for one sequence; the message names the processor."""


class SequenceProcessors:
    """The processors of one sequence.

    `steps` has one step for each processor that applies to the sequence; the step of a failed processor raises.
    """

    def __init__(self, loaded: Sequence[LoadedProcessor], request: Request, params: ProcessorParams) -> None:
        self._output = request.output_token_ids
        self._num_known, self._last = len(self._output), self._output[-1] if self._output else -1
        self._updates: list[tuple[LoadedProcessor, Callable[[None], Any]]] = []
        prompt = request.prompt_token_ids
        prompt = prompt[request.num_virtual_tokens :] if request.num_virtual_tokens else prompt
        begun = [(each, self._begun(each, params, prompt)) for each in loaded]
        self.steps = [(each, step) for each, step in begun if step is not None]

    def _begun(self, loaded: LoadedProcessor, params: ProcessorParams, prompt: list[int]) -> Step | None:
        """Returns the processor's step for the sequence's rows; None: it does not apply to this sequence."""
        output = self._output
        try:
            if loaded.adapter is not None:
                process = calling(loaded, loaded.adapter.new_req_logits_processor, params)
                return None if process is None else calling(loaded, _step_of, process, prompt, output)
            instance = calling(loaded, loaded.make)
            calling(loaded, instance.update_state, BatchUpdate(added=[(0, params, prompt, output)]))
        except ProcessorError as error:
            return _failing(error)
        self._updates.append((loaded, instance.update_state))
        return lambda row: _checked(loaded, instance.apply(row[None]), row[None])[0]

    def follow(self, request: Request) -> bool:
        """Passes a new token to the processors. Returns False if they must be created again."""
        output, known = request.output_token_ids, self._num_known
        num_new = len(output) - known
        if output is not self._output or not 0 <= num_new <= 1 or (known and output[known - 1] != self._last):
            return False
        if num_new:
            self._num_known, self._last = len(output), output[-1]
            for loaded, update in self._updates:
                try:
                    calling(loaded, update, None)
                except ProcessorError as error:
                    self.steps = [(loaded, _failing(error))]
        return True


class RequestProcessors:
    """The operator's processors of an engine, in order, and the processors of its sequences."""

    def __init__(self, loaded: Sequence[LoadedProcessor] = (), eos_token_ids: frozenset[int] = frozenset()) -> None:
        self._loaded, self._eos_token_ids = loaded, eos_token_ids
        self.calls = loaded[0].calls if loaded else ProcessorCalls()
        self.sequences: WeakKeyDictionary[Request, SequenceProcessors] = WeakKeyDictionary()

    def __bool__(self) -> bool:
        return bool(self._loaded)

    def problem(self, request: Request) -> str | None:
        """Returns why a processor does not accept the request's parameters, or None."""
        if not self._loaded or request.pooling is not None:
            return None
        self.calls.request = request
        params = params_of(request.sampling, self._eos_token_ids)
        for each in self._loaded:
            validate = getattr(each.kind, "validate_params", None)
            try:
                if validate is not None:
                    calling(each, validate, params)
            except ProcessorError as error:
                return str(error)
        return None

    def concern(self, request: Request) -> bool:
        """Whether any processor applies to the request, or has failed to start."""
        return bool(self._loaded) and bool(self._of(request, request.index).steps)

    def shape_draws(self, request: Request) -> bool:
        """Whether a processor that keeps the most likely token applies to the request."""
        return any(each.is_argmax_invariant for each, _ in self._of(request, request.index).steps)

    def apply(self, row: Tensor, request: Request, index: int, is_draw: bool) -> str:
        """Changes a row of logits [vocab_size] in place; returns why that failed, or "".

        `index`: the index of the sequence, which may be one that will be forked from the request later. `is_draw`:
        applies only processors that keep the most likely token; otherwise only the other processors.
        """
        try:
            for each, step in self._of(request, index).steps:
                if each.is_argmax_invariant == is_draw:
                    found = _checked(each, calling(each, step, row), row)
                    if found is not row:
                        row.copy_(found)
        except ProcessorError as error:
            return str(error)
        return ""

    def _of(self, request: Request, index: int) -> SequenceProcessors:
        """Returns the processors of a sequence, updated with its tokens."""
        is_own, self.calls.request = index == request.index, request
        known = self.sequences.get(request) if is_own else None
        if known is None or not known.follow(request):
            known = SequenceProcessors(self._loaded, request, params_of(request.sampling, self._eos_token_ids))
            if is_own:
                self.sequences[request] = known
        return known


NO_PROCESSORS = RequestProcessors()


def calling(loaded: LoadedProcessor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the operator's code. Raises ProcessorError."""
    loaded.calls.running = loaded.name, time.monotonic()
    try:
        return function(*arguments)
    except ProcessorError:
        raise
    except (Exception, SystemExit) as error:  # the operator's code may fail in any way
        log.warning("logits processor %s has failed for a request", loaded.name, exc_info=error)
        raise ProcessorError(f"logits processor {loaded.name}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        loaded.calls.running = None


def _step_of(process: Callable[..., Any], prompt: list[int], output: list[int]) -> Step:
    if len(inspect.signature(process).parameters) == 3:
        return lambda row: process(prompt, output, row)
    return lambda row: process(output, row)


def _failing(error: ProcessorError) -> Step:
    def fail(row: Tensor) -> Tensor:
        raise error

    return fail


def _checked(loaded: LoadedProcessor, found: Any, given: Tensor) -> Tensor:
    """Returns a processor's result. Raises ProcessorError unless it has the shape and dtype of the given logits."""
    if isinstance(found, Tensor) and found.shape == given.shape and found.is_floating_point():
        return found
    what = f"{list(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
    raise ProcessorError(
        f"logits processor {loaded.name}: returned {what} for one row, {list(given.shape)} of {given.dtype}; a "
        f"processor that needs the whole batch is not supported"
    )


def params_of(sampling: Sampling, eos_token_ids: Collection[int]) -> ProcessorParams:
    return ProcessorParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_k=max(sampling.top_k, 0),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        stop_token_ids=list(sampling.stop_token_ids),
        all_stop_token_ids={*eos_token_ids, *sampling.stop_token_ids},
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) or None,
        bad_words_token_ids=[list(word) for word in sampling.bad_words] or None,
        structured_outputs=sampling.guide,
        extra_args=json.loads(sampling.extra_args) if sampling.extra_args else None,
    )
