"""Loads the adapters on the scheduler's list, during steps. docs/protocol/requests.md has the rules.

Only the loading itself runs on another thread; the rest runs on the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

import msgspec

from pd_cluster import wire
from pd_cluster.engine.handover.engine_events import AdapterLoaded, Event
from pd_cluster.engine.legs.held_legs import HeldLegs
from pd_cluster.engine.stages.adapter_cache import AdapterCache
from pd_cluster.engine.stages.adapter_loader import AdapterSource
from pd_cluster.engine.stages.stage import Released, Stage
from pd_cluster.types.variants import lora_of, short_name

log = logging.getLogger(__name__)


MAX_OWNERS = 4096  # the most owners whose last loads are remembered
MAX_LOADING = 2  # one that is being read, and the next; the order of later ones can still change


class OwnerRotation:
    """Records when an adapter was last loaded for each owner of held legs. Owners without a load come first."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, int] = OrderedDict()  # the earliest first
        self._num_turns = 0

    def last(self, owners: Collection[bytes]) -> int:
        """Returns the earliest turn in which one of these owners had its last load; 0 if one never had any."""
        return min(self._last.get(owner, 0) for owner in owners)

    def took(self, owners: Collection[bytes]) -> None:
        self._num_turns += 1
        for owner in owners:
            self._last[owner] = self._num_turns
            self._last.move_to_end(owner)
        while len(self._last) > MAX_OWNERS:
            self._last.popitem(last=False)


class WorkerAdapters(Stage):
    """Loads the adapters on the scheduler's list.

    An adapter that was loaded once counts as loaded while it is on the list. If memory is limited, the least recently
    requested adapter is evicted; a leg whose adapter is not in memory is held until the adapter has been read again.
    """

    def __init__(
        self,
        source: AdapterSource | None,
        send: Callable[[str, wire.Body], None],
        used: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source` None: the model was loaded without slots for adapters.

        `used` returns the digests of the adapters of requests that are or will be computed here.
        """
        keeper = source.keeper if source is not None else None
        most = source.most if source is not None else None
        self._keeper, self._thread = keeper, source.thread if source is not None else None
        self._send, self._used = send, used
        self._conn = ""  # the connection of the scheduler that sent the latest list
        self._paths: dict[str, str] = dict(source.named) if source is not None else {}  # by digest
        self._has_list = False  # a list has arrived
        self._proven = set(self._paths)  # adapters that have been in memory
        present = [each for each in keeper.variants if lora_of(each)] if keeper is not None else []
        self._cache = None if most is None else AdapterCache(most, present)  # None: there is memory for all
        self._problems: dict[str, str] = {}
        self._due: dict[str, None] = {}  # adapters to load, in order of arrival
        self._turns = OwnerRotation()
        self._loading: set[str] = set()
        self._held = HeldLegs(clock)
        self._released: list[Released] = []

    # ---- the scheduler's list

    def read(self, conn: str, body: wire.Body, is_scheduler: bool) -> bool:
        if not is_scheduler or not isinstance(body, wire.WantedAdapters):
            return False
        self._follow(conn, body)
        return True

    def _follow(self, conn: str, news: wire.WantedAdapters) -> None:
        """Applies the scheduler's list, and retries loads that have failed."""
        self._conn, self._has_list = conn, True
        self._paths = {each.digest: each.path for each in news.adapters}
        self._proven &= self._paths.keys()
        self._problems = {}
        for digest in self._paths:
            if self._keeper is None:
                self._problems[digest] = "--enable-lora, --enable-prompt-adapter: this worker was started without them"
            elif digest in self._loading:
                continue
            elif digest in self._keeper.variants:  # still in memory, because it was not dropped yet
                self._proven.add(digest)
            elif digest not in self._proven:
                self._due.setdefault(digest)
        self._go_on()
        self._report()

    def handle(self, event: Event) -> bool:
        if not isinstance(event, AdapterLoaded):
            return False
        self._loaded(event)
        return True

    def _loaded(self, event: AdapterLoaded) -> None:
        digest = event.digest
        self._loading.discard(digest)
        if event.problem:
            log.warning("adapter %s: %s", digest[:12], event.problem)
            self._problems[digest] = event.problem
        else:
            self._problems.pop(digest, None)
            if self._cache is not None and lora_of(digest):
                self._cache.use(digest)
            if digest in self._paths:
                self._proven.add(digest)
        lost = f"the adapter {digest[:12]} could not be read again; this instance's log says why"
        self._release(digest, lost if event.problem else "")
        self._go_on()
        if self._has_list:
            self._report()

    def tick(self) -> None:
        """Drops adapters that are neither on the list nor used. Continues loads that wait for memory."""
        if self._keeper is None:
            return
        if self._has_list and (unwanted := self._keeper.variants.keys() - self._paths.keys()):
            for digest in unwanted - self._in_use() - set(self._held):
                self._drop(digest)
        for leg in self._held.take_expired():
            self._released.append(Released(leg.conn, leg.submit, error="the request's deadline has passed"))
        self._go_on()

    def counted(self, load: wire.Load, schedulers: Mapping[str, str]) -> wire.Load:
        in_memory = self._in_memory
        return load if in_memory is None else msgspec.structs.replace(load, adapters=in_memory)

    @property
    def _in_memory(self) -> tuple[str, ...] | None:
        """The short names of the LoRA adapters in memory; None if all adapters are in memory."""
        if self._keeper is None or self._cache is None:
            return None
        return tuple(
            sorted(short_name(each) for each in self._keeper.variants if lora_of(each) and self._is_open(each))
        )

    # ---- legs

    def admits(self, conn: str, submit: wire.Submit) -> bool:
        """Holds a leg until its adapter is in memory again."""
        digest = submit.order.variant
        if not digest or self._keeper is None or digest not in self._proven:
            return True
        if digest in self._keeper.variants and self._is_open(digest) and digest not in self._loading:
            if self._cache is not None and lora_of(digest):
                self._cache.use(digest)
            return True
        self._held.add(conn, submit)
        if digest not in self._loading:
            self._due.setdefault(digest)
        self._go_on()
        return False

    def abort(self, conn: str, abort: wire.Abort) -> None:
        self._held.abort(conn, abort)

    def closed(self, conn: str, reason: str, was_scheduler: bool) -> None:
        self._held.closed(conn)

    def release_all(self) -> None:
        for digest in self._held:
            self._release(digest)

    def _release(self, digest: str, why: str = "") -> None:
        for leg in self._held.take(digest):
            self._released.append(Released(leg.conn, leg.submit, why))

    def released(self) -> list[Released]:
        released, self._released = self._released, []
        return released

    def _in_use(self) -> set[str]:
        """Returns the adapters of requests that have begun or are about to begin."""
        return {*self._used(), *(leg.submit.order.variant for leg in self._released)}

    # ---- capacity

    def _go_on(self) -> None:
        """Loads adapters that are due, as long as there is memory. Owners of held legs take turns."""
        if self._keeper is None:
            return
        for digest in list(self._due):
            if digest in self._proven and digest not in self._held:
                del self._due[digest]  # no leg waits for it any more
            elif digest not in self._paths:
                del self._due[digest]
                self._release(digest)
        while self._due and len(self._loading) < MAX_LOADING:
            digest = min(self._due, key=lambda each: self._turns.last(self._held.owners(each)))
            if digest in self._keeper.variants:
                del self._due[digest]
                self._open(digest)
            elif self._can_load(digest):
                del self._due[digest]
                self._load(digest)
            else:
                return
        if self._due:
            return
        for digest in list(self._cache.closing) if self._cache is not None else []:  # none need be evicted now
            self._open(digest)

    def _is_open(self, digest: str) -> bool:
        return self._cache is None or digest not in self._cache.closing

    def _open(self, digest: str) -> None:
        if self._cache is not None:
            self._cache.open(digest)
        self._release(digest)

    def _can_load(self, digest: str) -> bool:
        """Whether a further adapter may be loaded now, possibly after an eviction."""
        assert self._keeper is not None
        if self._cache is None or not lora_of(digest):
            return True
        present = [each for each in self._keeper.variants if lora_of(each)]
        if self._cache.has_one_free([*present, *(each for each in self._loading if lora_of(each))]):
            return True
        used = {*self._in_use(), *(each for each in self._held if self._is_open(each))}
        given_up = self._cache.next_out(present, used)
        if given_up is None:
            return False
        self._drop(given_up)
        return True

    def _drop(self, digest: str) -> None:
        assert self._keeper is not None
        self._keeper.drop_adapter(digest)
        if self._cache is not None:
            self._cache.drop(digest)
        if digest in self._held:
            self._due.setdefault(digest)

    def _load(self, digest: str) -> None:
        self._turns.took(self._held.owners(digest))
        self._loading.add(digest)
        assert self._thread is not None
        self._thread.load(digest, self._paths[digest])

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    def _report(self) -> None:
        problems = {digest: why[:1000] for digest, why in self._problems.items() if digest in self._paths}
        known = [digest for digest in self._paths if digest in self._proven]
        self._send(self._conn, wire.AdapterStates(known, problems))
