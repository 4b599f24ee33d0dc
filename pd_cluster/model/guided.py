"""Which tokens may follow where a guide says what an output looks like: masks for a step's rows, made beside the model.

Guides compile on a thread of their own while their requests wait; masks are made on another while the model runs. How
far an output has come follows from its token ids alone: `Request.guide_state` can be dropped at any time. Knows nothing
of how a token is then chosen, and imports no torch.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from pd_cluster.errors import GuideError
from pd_cluster.grammar import Compiler, Matcher, Words
from pd_cluster.types import Guide, Request

MAX_GUIDES = 64  # kept compiled, besides those that requests follow
MAX_NUM_CHARS = 2 << 20  # of their texts: a large one takes some hundred times as much memory when it is compiled
STACK_NBYTES = 16 << 20  # more than what the guide was tried with
UNREADY_WAIT_S = 0.05  # when there is nothing else to compute


class Mask(NamedTuple):
    """Bit t % 32 of `words[t // 32]` tells whether token t may follow; where there is a `problem`, none may.

    `is_complete`: the output fits its guide and cannot go on; only an end of sequence may follow.
    """

    words: Words  # [num_words], at least one bit a token of the model; empty where there is a problem
    is_complete: bool = False
    problem: str = ""


class Masks:
    """Those of one step's requests, by their keys; `wait` for them once the model has run."""

    def __init__(
        self,
        made: Future[dict[str, Mask]] | None = None,
        keys: Sequence[str] = (),
        late: Callable[[], None] = lambda: None,
    ) -> None:
        """`late` is called when they are given up."""
        self._made, self._keys, self._late = made, keys, late

    def wait(self) -> dict[str, Mask]:
        """A library that does not come back costs these requests, and not the engine."""
        try:
            return self._made.result(MASKS_TIMEOUT_S) if self._made is not None else {}
        except TimeoutError:
            self._late()
            return dict.fromkeys(self._keys, _no_mask(f"the masks of a step took more than {MASKS_TIMEOUT_S:g} s"))


MASKS_TIMEOUT_S = 10.0  # for those of one step; the library's own limits end them long before
NO_MASKS = Masks()
NO_WORDS: Words = np.zeros(0, dtype=np.uint32)


class _State:
    """How far one sequence's matcher has come with the request's output."""

    def __init__(self, compiled: Matcher) -> None:
        self._compiled = compiled
        self._start([])

    def _start(self, output: list[int]) -> None:
        self._matcher = self._compiled.copy()
        self._output = output  # the request's own list
        self._num_taken = 0
        self._last = -1  # the last of them

    def follow(self, output: list[int]) -> Matcher:
        """Takes the tokens that were added; all of them again when it is another output. Raises GuideError."""
        taken = self._num_taken
        if self._output is not output or taken > len(output) or (taken and output[taken - 1] != self._last):
            self._start(output)
        if new := output[self._num_taken :]:
            self._matcher.take(new)
            self._num_taken, self._last = len(output), new[-1]
        return self._matcher


class Guides:
    """All guides of one engine. Its methods are for the engine's thread."""

    def __init__(self, load: Callable[[], Compiler]) -> None:
        """`load` is called when the first guide comes, on the compiling thread; it may raise GuideError."""
        self._load = load
        self._compiler: Compiler | None = None
        self._compiled: OrderedDict[Guide, Future[Matcher]] = OrderedDict()
        self._num_chars = 0  # of all of them
        self._compiling: ThreadPoolExecutor | None = None
        self._masking: ThreadPoolExecutor | None = None

    def prepare(self, request: Request) -> None:
        """Has its guide compiled, so that it is ready when the prompt is."""
        if request.sampling.guide is not None and request.guide_state is None:
            request.guide_state = self._future(request.sampling.guide)

    def without_unready(self, chunks: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """The chunks, but for those that would choose a token before their guide is compiled.

        When no other is there, waits for it a little.
        """
        unready: dict[int, Future[Matcher]] = {}
        for at, (request, num_tokens) in enumerate(chunks):
            if request.sampling.guide is None:
                continue
            self.prepare(request)
            state = request.guide_state
            if isinstance(state, Future) and not state.done() and num_tokens == request.num_behind:
                unready[at] = state
        if not unready:
            return chunks
        if len(unready) == len(chunks):
            wait(unready.values(), UNREADY_WAIT_S)
        return [chunk for at, chunk in enumerate(chunks) if at not in unready or unready[at].done()]

    def begin(self, chunks: list[tuple[Request, int]]) -> Masks:
        """Starts to make the masks of those that will choose a token in this step."""
        requests = [r for r, num_tokens in chunks if r.sampling.guide is not None and num_tokens == r.num_behind]
        if not requests:
            return NO_MASKS
        for request in requests:
            self.prepare(request)
        if self._masking is None:
            self._masking = _one_thread("masks")
        return Masks(self._masking.submit(self._make, requests), [r.key for r in requests], self._give_up)

    def _give_up(self) -> None:
        """The masks' thread does not come back; the next step has another."""
        if self._masking is not None:
            self._masking.shutdown(wait=False)
        self._masking = None

    def _future(self, guide: Guide) -> Future[Matcher]:
        future = self._compiled.get(guide)
        if future is None:
            if self._compiling is None:
                self._compiling = _one_thread("guides")
            future = self._compiled[guide] = self._compiling.submit(self._compile, guide)
            self._num_chars += len(guide.text)
            while len(self._compiled) > MAX_GUIDES or (self._num_chars > MAX_NUM_CHARS and len(self._compiled) > 1):
                self._num_chars -= len(self._compiled.popitem(last=False)[0].text)
        self._compiled.move_to_end(guide)
        return future

    def _compile(self, guide: Guide) -> Matcher:
        if self._compiler is None:
            self._compiler = self._load()
        return self._compiler.compile(guide)

    # ---- on the masks' thread

    def _make(self, requests: Sequence[Request]) -> dict[str, Mask]:
        """Whatever is wrong with one request's guide is in its own mask."""
        masks: dict[str, Mask] = {}
        following: list[tuple[Request, Matcher]] = []
        for request in requests:
            try:
                following.append((request, self._state_of(request).follow(request.output_token_ids)))
            except GuideError as error:
                masks[request.key] = _no_mask(str(error))
        compiler = self._compiler
        if compiler is None or not following:
            return masks
        table = np.zeros((len(following), compiler.num_words), dtype=np.uint32)
        problems = compiler.write_masks([matcher for _, matcher in following], table)
        going_on = table & ~compiler.end_words
        can_go_on: list[bool] = np.any(going_on, axis=1).tolist()
        for at, (request, _) in enumerate(following):
            if problems[at]:
                masks[request.key] = _no_mask(problems[at])
            elif not can_go_on[at]:
                masks[request.key] = Mask(table[at], is_complete=True)
            else:
                masks[request.key] = Mask(going_on[at] if request.sampling.ignore_eos else table[at])
        return masks

    def _state_of(self, request: Request) -> _State:
        """Raises GuideError when its guide did not compile."""
        state = request.guide_state
        if isinstance(state, _State):
            return state
        assert isinstance(state, Future)
        if (error := state.exception()) is not None:
            raise GuideError(str(error))
        made = request.guide_state = _State(state.result())
        return made


def _no_mask(problem: str) -> Mask:
    return Mask(NO_WORDS, problem=f"its guide cannot be followed: {problem}")


def _one_thread(name: str) -> ThreadPoolExecutor:
    """With room on its stack for what a grammar nests; it starts at once, because the size is the process's setting."""
    before = threading.stack_size(STACK_NBYTES)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        executor.submit(int).result()
    finally:
        threading.stack_size(before)
    return executor


def no_guides() -> Guides:
    """Of an engine that has no tokenizer: every guide fails."""

    def load() -> Compiler:
        raise GuideError("this engine has no tokenizer to follow a guide with")

    return Guides(load)
