"""How many requests run at once in a given memory if windowed layers have their own blocks."""

from __future__ import annotations

import pytest

from benchmarks.windows import num_at_once
from pd_cluster import host
from pd_cluster.kv.kv_layout import keys_and_values
from pd_cluster.model.language_model.cache_declaration import LayerCache
from pd_cluster.model.planning.pool_sizing import GIB
from pd_cluster.settings.engine_config import EngineConfig

LENGTH, STEP, WINDOW, BLOCK_SIZE = 320, 64, 12, 4
TOKEN_NBYTES = 2 * 4 * 2 * 8  # keys and values of a layer with 2 heads of dimension 8


@pytest.mark.parametrize(("num_full", "num_near"), [(1, 1), (1, 3), (3, 1)])
def test_more_long_requests_fit(monkeypatch: pytest.MonkeyPatch, num_full: int, num_near: int) -> None:
    """Each running request keeps a free block to grow into; a window of 12 tokens takes 4 blocks at any offset."""
    monkeypatch.setattr(host, "memory", lambda: host.HostMemory(8 * GIB, 16 * GIB, "this host"))
    monkeypatch.setattr(host, "own_nbytes", lambda: 0)
    caches = [LayerCache(2, keys_and_values(8), window) for window in [0] * num_full + [WINDOW] * num_near]
    nbytes = 12 * LENGTH * TOKEN_NBYTES * len(caches)
    config = EngineConfig(model="", kv_cache_memory_gib=nbytes / GIB, max_num_seqs=64, block_size=BLOCK_SIZE)
    whole, split = (num_at_once(config, caches, LENGTH, STEP, splits) for splits in (False, True))
    blocks = LENGTH // BLOCK_SIZE
    assert whole == 12 * blocks // (blocks + 1)
    near = (64 * 4 + STEP // BLOCK_SIZE) * 5 // 4
    full = (12 * blocks * len(caches) - near * num_near) // num_full
    assert split == min(64, full // (blocks + 1))
    assert split > {(1, 1): 1.5, (1, 3): 2.5, (3, 1): 1.1}[num_full, num_near] * whole
