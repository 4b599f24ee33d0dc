"""An engine in the test's process with tiers below host memory: real stores and threads, one loop."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pd_cluster import wire
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.legs.legs import request_of
from pd_cluster.engine.stages.tier_stage import EngineTiers
from pd_cluster.engine.stages.tier_stores import origin_of
from pd_cluster.kv.block_seal import Seal
from pd_cluster.kv.lower_tier import LowerTier
from pd_cluster.kv.open_stores import seal_of
from pd_cluster.kv.tier_commands import LowerKind, TierContents, TierDone
from pd_cluster.kv.tier_thread import Store, TierThread
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import RequestSpec, Sampling

WAIT_S = 60.0
SECRET = b"a secret of the tests, of 32 bytes or more"


class TieredEngine:
    """`stores` makes stores from the seal of the engine's layout. Loading always counts as faster than computing."""

    def __init__(
        self,
        model: Path,
        stores: Callable[[Seal], dict[LowerKind, Store]],
        capacity: int = 10_000,
        secrets: tuple[bytes, ...] = (SECRET,),
        host_gib: float = 0.01,
    ) -> None:
        config = EngineConfig(
            model=str(model), num_blocks=16, block_size=8, max_model_len=128, kv_host_cache_gib=host_gib
        )
        self.core, self.runner = build_core(config)
        self.reports: queue.SimpleQueue[TierDone | TierContents] = queue.SimpleQueue()
        self.blocks = self.core.scheduler.blocks
        host = self.blocks.tier
        assert host is not None
        host.cost.is_worth_it = lambda: True  # type: ignore[method-assign]
        self.stores = stores(seal_of(secrets, self.runner.pool.layout, origin_of(config, self.runner)))
        self.lower = {}
        for kind, store in self.stores.items():
            self.runner.tiers[kind] = TierThread(kind, 0, store, self.runner.swap.bytes_of, self.reports.put)
            size = capacity if kind == "disk" else 0
            self.lower[kind] = LowerTier(kind, host, size, 1, 8, time.monotonic)
            self.lower[kind].cost.is_worth_it = lambda: True  # type: ignore[method-assign]
        host.lower = list(self.lower.values())
        self.tiers = EngineTiers(self.core.scheduler, self.lower, self.runner, time.monotonic)
        self.core.after_moves.append(self.tiers.moved)
        if (disk := self.stores.get("disk")) is not None:
            contents: list[bytes] = disk.read_index()  # type: ignore[attr-defined]
            self.tiers.handle(TierContents("disk", 0, b"".join(contents)))
        self._num_asked = 0

    def ask(self, prompt: list[int], max_tokens: int = 4, salt: str = "") -> list[int]:
        """Serves a prompt as a worker does, including the wait for its blocks from lower tiers."""
        self._num_asked += 1
        order = msgspec.structs.replace(
            RequestSpec(prompt, Sampling(max_tokens=max_tokens, temperature=0.0)), cache_salt=salt
        )
        submit = wire.Submit(f"r{self._num_asked}", 0, "", "hybrid", "", order, 0.0)
        if not self.tiers.admits("c", submit):
            stop_s = time.monotonic() + WAIT_S
            while not (released := self.tiers.released()):
                assert time.monotonic() < stop_s, "a leg is held for too long"
                self._hear(0.02)
                self.tiers.tick()
            (leg,) = released
            submit = leg.submit
        request = request_of(submit, "c", float(self._num_asked))
        self.core.scheduler.add(request)
        while self.core.scheduler.requests:
            self.core.step()
            self.core.scheduler.check()
        return request.output_token_ids

    def _hear(self, wait_s: float) -> None:
        try:
            report = self.reports.get(timeout=wait_s)
        except queue.Empty:
            return
        assert isinstance(report, TierDone)
        self.tiers.handle(report)

    def settle(self) -> None:
        """Waits until no tier has a pending job."""
        stop_s = time.monotonic() + WAIT_S
        while any(lower.num_jobs for lower in self.lower.values()):
            assert time.monotonic() < stop_s, "a job does not end"
            self._hear(0.02)
        self.core.scheduler.check()

    def close(self) -> None:
        self.runner.close_tiers()
        for store in self.stores.values():
            if hasattr(store, "close"):
                store.close()
