"""Masks of the tokens that guided outputs allow next, computed for a step's rows while the model runs.

Guides are compiled on one thread while their requests wait; masks are computed on another while the model runs. An
output's progress follows from its token ids alone, so cached progress can be dropped at any time. Does not choose
tokens, and imports no torch.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from pd_cluster.errors import GuideError
from pd_cluster.text.grammar import Compiler, Matcher, Words
from pd_cluster.types import Guide, Request

MAX_GUIDES = 64  # compiled guides to keep, in addition to those in use
MAX_NUM_CHARS = 2 << 20  # characters of all guides; when compiled, a large guide takes about a hundred times its size
STACK_NBYTES = 16 << 20  # a larger stack than in the process that checked the guide
UNREADY_WAIT_S = 0.05  # how long a step waits for guides if there is nothing else to compute


class TokenMask(NamedTuple):
    """Bit t % 32 of `words[t // 32]` tells whether token t is allowed. With a `problem`, no token is allowed.

    `accepts`: the output matches its guide, so an end or stop token ends it; otherwise such a token is part of the
    text. `is_forced`: the output has only one continuation, so the request's other constraints do not apply.
    """

    words: Words  # [num_words], at least one bit per token of the model; empty if there is a problem
    accepts: bool = False
    is_forced: bool = False
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether only an end token is allowed."""
        return self.accepts and self.is_forced


class Masks:
    """The masks of one step's requests, by the requests' keys; call `wait` after the model has run.

    A request has one mask for its next token, and one after each of its draft tokens, up to the first draft token that
    is not allowed.
    """

    def __init__(
        self,
        made: Future[dict[str, list[TokenMask]]] | None = None,
        keys: Sequence[str] = (),
        late: Callable[[], None] = lambda: None,
    ) -> None:
        """`late` is called if `wait` times out."""
        self._made, self._keys, self._late = made, keys, late

    def wait(self) -> dict[str, list[TokenMask]]:
        """Returns the masks. If a library call never returns, only these requests fail, not the engine."""
        try:
            return self._made.result(MASKS_TIMEOUT_S) if self._made is not None else {}
        except TimeoutError:
            self._late()
            late = _no_mask(f"computing the masks of a step took more than {MASKS_TIMEOUT_S:g} s")
            return {key: [late] for key in self._keys}


MASKS_TIMEOUT_S = 10.0  # the time limit for a step's masks; normally the library's own limits apply long before
NO_MASKS = Masks()
NO_WORDS: Words = np.zeros(0, dtype=np.uint32)


class _State:
    """A sequence's matcher, which follows the request's output."""

    def __init__(self, compiled: Matcher) -> None:
        self.compiled = compiled
        self._start([])

    def _start(self, output: list[int]) -> None:
        self._matcher = self.compiled.copy()
        self._output = output  # the request's own list
        self._num_taken = 0
        self._last = -1  # the last token taken

    def follow(self, output: list[int]) -> Matcher:
        """Processes the new tokens, or all of them if the output was replaced. Raises GuideError."""
        taken = self._num_taken
        if self._output is not output or taken > len(output) or (taken and output[taken - 1] != self._last):
            self._start(output)
        if new := output[self._num_taken :]:
            self._matcher.take(new)
            self._num_taken, self._last = len(output), new[-1]
        return self._matcher


class Guides:
    """All guides of one engine. Only the engine's thread may call its methods."""

    def __init__(self, load: Callable[[], Compiler]) -> None:
        """`load` is called on the compiling thread, for the first guide; it may raise GuideError."""
        self._load = load
        self.compiler: Compiler | None = None
        self.compiled: OrderedDict[Guide, Future[Matcher]] = OrderedDict()
        self._num_chars = 0  # of all guides
        # The compilation of a request's guide, or its progress; a missing entry is rebuilt from the token ids.
        self.states: WeakKeyDictionary[Request, Future[Matcher] | _State] = WeakKeyDictionary()
        self._compiling: ThreadPoolExecutor | None = None
        self._masking: ThreadPoolExecutor | None = None

    def prepare(self, request: Request) -> None:
        """Starts compiling the request's guide, so that it is ready when the prompt has been computed."""
        if request.sampling.guide is not None and request not in self.states:
            self.states[request] = self._future(request.sampling.guide)

    def without_unready(self, chunks: list[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """Returns the chunks without those that would choose a token although their guide is not compiled yet.

        Waits briefly for the guides if no other chunks are left.
        """
        unready: dict[int, Future[Matcher]] = {}
        for at, (request, num_tokens) in enumerate(chunks):
            if request.sampling.guide is None:
                continue
            self.prepare(request)
            state = self.states[request]
            if isinstance(state, Future) and not state.done() and num_tokens == request.num_behind:
                unready[at] = state
        if not unready:
            return chunks
        if len(unready) == len(chunks):
            wait(unready.values(), UNREADY_WAIT_S)
        return [chunk for at, chunk in enumerate(chunks) if at not in unready or unready[at].done()]

    def begin(
        self, chunks: list[tuple[Request, int]], drafts: Mapping[Request, Sequence[int]] = MappingProxyType({})
    ) -> Masks:
        """Starts computing the masks of requests that choose a token in this step, also after each of their drafts."""
        requests = [r for r, num_tokens in chunks if r.sampling.guide is not None and num_tokens == r.num_behind]
        if not requests:
            return NO_MASKS
        for request in requests:
            self.prepare(request)
        if self._masking is None:
            self._masking = _one_thread("masks")
        return Masks(self._masking.submit(self._make, requests, drafts), [r.key for r in requests], self._give_up)

    def forced(self, requests: Sequence[Request]) -> dict[Request, list[int]]:
        """Returns the tokens that must follow each output; empty if its guide is not compiled."""
        following = [request for request in requests if isinstance(self.states.get(request), _State)]
        if not following or self._masking is None:
            return {}
        try:
            return self._masking.submit(self._forced, following).result(MASKS_TIMEOUT_S)
        except TimeoutError:
            self._give_up()
            return {}

    def _give_up(self) -> None:
        """Abandons a mask thread that does not return; the next step starts a new thread."""
        if self._masking is not None:
            self._masking.shutdown(wait=False)
        self._masking = None

    def _future(self, guide: Guide) -> Future[Matcher]:
        future = self.compiled.get(guide)
        if future is None:
            if self._compiling is None:
                self._compiling = _one_thread("guides")
            future = self.compiled[guide] = self._compiling.submit(self._compile, guide)
            self._num_chars += len(guide.text)
            while len(self.compiled) > MAX_GUIDES or (self._num_chars > MAX_NUM_CHARS and len(self.compiled) > 1):
                self._num_chars -= len(self.compiled.popitem(last=False)[0].text)
        self.compiled.move_to_end(guide)
        return future

    def _compile(self, guide: Guide) -> Matcher:
        if self.compiler is None:
            self.compiler = self._load()
        return self.compiler.compile(guide)

    def close(self) -> None:
        """Ends the threads without waiting for a guide that is being compiled; call no method afterwards."""
        for threads in (self._compiling, self._masking):
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)
        self._compiling = self._masking = self.compiler = None  # the compiler has threads of its own
        self.compiled.clear()
        self.states.clear()

    # ---- on the mask thread

    def _forced(self, requests: Sequence[Request]) -> dict[Request, list[int]]:
        found: dict[Request, list[int]] = {}
        for request in requests:
            with contextlib.suppress(GuideError):  # `_make` reports it
                found[request] = self._state_of(request).follow(request.output_token_ids).forced()
        return found

    def _make(self, requests: Sequence[Request], drafts: Mapping[Request, Sequence[int]]) -> dict[str, list[TokenMask]]:
        """Computes the masks; a request whose guide has an error gets a mask with the problem."""
        masks: dict[str, list[TokenMask]] = {}
        following: list[tuple[Request, Matcher]] = []
        for request in requests:
            try:
                matcher = self._state_of(request).follow(request.output_token_ids)
            except GuideError as error:
                masks[request.key] = [_no_mask(str(error))]
                continue
            following.append((request, matcher))
            following += [(request, each) for each in _behind(matcher, drafts.get(request, ()))]
        compiler = self.compiler
        if compiler is None or not following:
            return masks
        table = np.zeros((len(following), compiler.num_words), dtype=np.uint32)
        problems = compiler.write_masks([matcher for _, matcher in following], table)
        going_on = table & ~compiler.end_words
        can_go_on: list[bool] = np.any(going_on, axis=1).tolist()
        can_end: list[bool] = np.any(table & compiler.end_words, axis=1).tolist()
        for at, (request, matcher) in enumerate(following):
            sampling, own = request.sampling, masks.setdefault(request.key, [])
            if problems[at]:
                own.append(_no_mask(problems[at]))
                continue
            accepts = (can_end[at] or bool(sampling.stop_token_ids)) and matcher.accepts
            is_forced = matcher.is_forced or (accepts and not can_go_on[at])
            goes_on = accepts and sampling.ignore_eos and can_go_on[at]
            own.append(TokenMask(going_on[at] if goes_on else table[at], accepts, is_forced))
        return masks

    def _state_of(self, request: Request) -> _State:
        """Returns the request's state. Raises GuideError if its guide could not be compiled."""
        state = self.states[request]
        if isinstance(state, _State):
            return state
        if (error := state.exception()) is not None:
            raise GuideError(str(error))
        made = self.states[request] = _State(state.result())
        return made


def _behind(matcher: Matcher, drafts: Sequence[int]) -> list[Matcher]:
    """Returns a matcher after each draft token, up to the first one that is not allowed."""
    found: list[Matcher] = []
    for token_id in drafts:
        matcher = matcher.copy()
        try:
            matcher.take([token_id])
        except GuideError:
            break
        found.append(matcher)
    return found


def _no_mask(problem: str) -> TokenMask:
    return TokenMask(NO_WORDS, problem=f"its guide cannot be followed: {problem}")


def _one_thread(name: str) -> ThreadPoolExecutor:
    """Starts a thread with enough stack for nested grammars. Starts it at once, because the stack size is a setting of
    the process.
    """
    before = threading.stack_size(STACK_NBYTES)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        executor.submit(int).result()
    finally:
        threading.stack_size(before)
    return executor


def no_guides() -> Guides:
    """Returns guides for an engine without a tokenizer: every guide is an error."""

    def load() -> Compiler:
        raise GuideError("this engine has no tokenizer, which guides need")

    return Guides(load)
