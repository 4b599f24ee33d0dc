"""Divides the memory for KV caches among the pools of several groups of layers. Does not use tensors.

The group of sliding windows gets blocks for the windows of all sequences, for the tokens of one step, and a quarter
more for the prefix cache. The group of states gets one state per sequence, and checkpoints. The group that keeps all
tokens gets the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pd_cluster import host
from pd_cluster.errors import ConfigError, called
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import NUM_EXTRA_BLOCKS
from pd_cluster.model.planning.pool_sizing import (
    DEFAULT_KV_CACHE_NBYTES,
    DEFAULT_SHARE,
    GIB,
    check_fits,
    host_share,
    num_swap_blocks,
    shared,
)
from pd_cluster.settings.engine_config import DEFAULT_NUM_SEQS, EngineConfig

STATES_SHARE = 4  # checkpoints get one part in 4 of the memory
WINDOWS_CACHED = 4  # one cached block for 4 blocks in use


class GroupSizes(NamedTuple):
    """The number of blocks in each group's pool, and in its swap space.

    The pool of states has `max_num_seqs` blocks for running sequences, and `num_checkpoints` for checkpoints.
    """

    nums_blocks: tuple[int, ...]
    nums_swapped: tuple[int, ...]
    max_num_seqs: int
    num_checkpoints: int = 0

    def describe(self, layouts: Sequence[KVLayout]) -> str:
        """Returns text that says for how many tokens, sequences and checkpoints groups with these layouts have room."""
        said = f"{self.nums_blocks[0] * layouts[0].block_size} tokens"
        for layout, count in zip(layouts[1:], self.nums_blocks[1:], strict=True):
            if layout.window:
                said += f", {count * layout.block_size} of them in layers with windows of {layout.window}"
        said += f", {self.max_num_seqs} sequences at once"
        if not layouts[-1].holds.is_state:
            return said
        return f"{said} and {self.num_checkpoints} checkpoints, with states of {_mib(layouts[-1])}"


@dataclass(frozen=True, slots=True)
class GroupNeeds:
    """Computes the least memory that the groups with these layouts need, and the most that they can use.

    `left`: the bytes on an accelerator that are left for pools, and the setting that determines them; None: the pools
    are in host memory.
    """

    config: EngineConfig
    layouts: Sequence[KVLayout]
    max_model_len: int
    max_num_batched_tokens: int
    left: tuple[int, str] | None = None

    @property
    def left_nbytes(self) -> int | None:
        """Returns the bytes left on an accelerator for blocks that requests can hold, without the pools' extra blocks.

        None: the pools are in host memory.
        """
        extra = NUM_EXTRA_BLOCKS * sum(layout.block_nbytes for layout in self.layouts)
        return None if self.left is None else max(0, self.left[0] - extra)

    @property
    def window(self) -> KVLayout | None:
        """Returns the layout of the sliding-window layers if they have their own group."""
        return next((layout for layout in self.layouts[1:] if layout.window), None)

    @property
    def state(self) -> KVLayout | None:
        return self.layouts[-1] if self.layouts[-1].holds.is_state else None

    @property
    def state_nbytes(self) -> int:
        return self.state.block_nbytes if self.state is not None else 0

    @property
    def per_request(self) -> int:
        """Returns the number of blocks of the longest request in the group that keeps all tokens."""
        return self.layouts[0].num_blocks_for(self.max_model_len)

    @property
    def token_nbytes(self) -> int:
        """Returns the bytes of one more block of tokens in all groups of tokens, before the window drops any."""
        return self.layouts[0].block_nbytes + (0 if self.window is None else self.window.block_nbytes)

    def num_window_blocks(self, num_seqs: int) -> int:
        """Returns how many window blocks `num_seqs` sequences can use, but at least those of one whole prompt, which a
        handover needs.
        """
        if (layout := self.window) is None:
            return 0
        held = num_seqs * (layout.num_blocks_for(layout.window - 1) + 1)
        held += layout.num_blocks_for(self.max_num_batched_tokens)
        return max(held + held // WINDOWS_CACHED, self.per_request)

    def nbytes_of(self, num_blocks: int, num_seqs: int) -> int:
        """Returns the bytes of all groups of tokens if the first group has `num_blocks` blocks."""
        window = 0 if self.window is None else self.window.block_nbytes
        return num_blocks * self.layouts[0].block_nbytes + window * min(num_blocks, self.num_window_blocks(num_seqs))

    def num_blocks_in(self, nbytes: int, num_seqs: int) -> int:
        """Returns the most blocks for which `nbytes_of` is at most `nbytes`."""
        most, window = self.num_window_blocks(num_seqs), self.window
        found = max(0, nbytes) // self.token_nbytes
        if window is None or found <= most:
            return found
        return (nbytes - most * window.block_nbytes) // self.layouts[0].block_nbytes

    @property
    def keeps_states(self) -> bool:
        """Whether the pool keeps checkpoints of states."""
        config = self.config
        return self.state is not None and config.enable_prefix_caching and config.mamba_cache_mode != "none"

    @property
    def is_default(self) -> bool:
        """Whether the number of sequences is not configured, so that fewer than the default may be served."""
        return self.config.max_num_seqs == DEFAULT_NUM_SEQS

    def share_of(self, free: host.HostMemory, share: float) -> int:
        """Returns the largest total of all pools in bytes, if they get this share of host memory."""
        left = self.left_nbytes
        return left if left is not None else host_share(free, share, self.config.num_local_ranks)

    def check(self, nbytes: int, free: host.HostMemory, flag: str) -> None:
        """Raises ConfigError if pools of `nbytes` exceed host memory. On an accelerator, allocation fails instead."""
        if self.left is None:
            check_fits(nbytes, free, self.config.num_local_ranks, flag)

    def num_checkpoints(self, nbytes: int) -> int:
        """Returns the number of checkpoints of states if all pools have `nbytes` together. Raises ConfigError."""
        if not self.keeps_states:
            return 0
        if (given := self.config.state_cache_gib) is None:
            return max(1, nbytes // STATES_SHARE // self.state_nbytes)
        if found := int(given * GIB) // self.state_nbytes:
            return found
        raise ConfigError(
            f"{called('state_cache')} {given:g}: one state of this model takes {self.state_nbytes / GIB:.4g} GiB; give "
            f"more, or {called('mamba_cache_mode')} none to keep none"
        )


def _mib(layout: KVLayout) -> str:
    return f"{layout.block_nbytes / 2**20:.2f} MiB"


def group_sizes(needs: GroupNeeds, free: host.HostMemory | None = None) -> GroupSizes:
    """Returns the sizes of several groups. Raises ConfigError unless one request of max_model_len fits.

    `free`: the host's free memory with weights loaded; None: measured now, because they are loaded.

    If max_num_seqs is not configured and memory cannot hold that many states, fewer sequences are served; a configured
    number must fit.
    """
    config, free = needs.config, free or host.memory()
    nbytes, flag = _budget(needs, free)
    num_checkpoints = needs.num_checkpoints(nbytes)
    of_checkpoints = num_checkpoints * needs.state_nbytes
    if config.state_cache_gib is not None:
        needs.check(of_checkpoints, free, f"{called('state_cache')} {config.state_cache_gib:g}")
    least = needs.nbytes_of(config.num_blocks or needs.per_request, config.max_num_seqs)
    if config.num_blocks is not None:
        needs.check(least + of_checkpoints, free, flag)
    num_seqs = _num_seqs(needs, nbytes - least - of_checkpoints, flag)
    of_states = (num_seqs + num_checkpoints) * needs.state_nbytes
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = needs.num_blocks_in(nbytes - of_states, num_seqs)
    is_given = config.num_blocks is not None or config.kv_cache_memory_gib is not None
    if not is_given and config.gpu_memory_utilization is None and needs.left is None:
        num_blocks = min(num_blocks, needs.per_request * num_seqs)
    needs.check(needs.nbytes_of(num_blocks, num_seqs) + of_states, free, flag)
    if num_blocks < needs.per_request:
        raise ConfigError(
            f"{flag}: {num_blocks} blocks of {needs.layouts[0].block_size} tokens cannot hold one request of "
            f"{called('max_model_len')} {needs.max_model_len} ({needs.per_request} blocks); give more memory, or lower "
            f"{called('max_model_len')}"
        )
    return _sizes(needs, num_blocks, num_seqs, num_checkpoints)


def _num_seqs(needs: GroupNeeds, nbytes: int, flag: str) -> int:
    """Returns how many sequences can be served if their states get `nbytes`. Raises ConfigError."""
    wanted = needs.config.max_num_seqs
    if needs.state is None:
        return wanted
    room = max(0, nbytes) // needs.state_nbytes
    if wanted <= room:
        return wanted
    if needs.is_default and room:
        return room
    raise ConfigError(
        f"{called('max_num_seqs')} {wanted}: room for {room} states of {_mib(needs.layouts[-1])} ({flag}) "
        f"in addition to checkpoints and one request of {called('max_model_len')} {needs.max_model_len}; give more "
        f"memory, lower {called('max_num_seqs')} or {called('max_model_len')}, or less {called('state_cache')}"
    )


def _budget(needs: GroupNeeds, free: host.HostMemory) -> tuple[int, str]:
    """Returns the bytes of all pools together, and the setting that determines this number."""
    config = needs.config
    if config.num_blocks is not None:
        most = needs.share_of(free, DEFAULT_SHARE if needs.is_default else 1.0)
        held = needs.nbytes_of(config.num_blocks, config.max_num_seqs) + config.max_num_seqs * needs.state_nbytes
        found = _with_checkpoints(needs, held)
        return found if needs.state is None else min(most, found), f"{called('num_blocks')} {config.num_blocks}"
    if config.kv_cache_memory_gib is not None:
        return int(config.kv_cache_memory_gib * GIB), f"{called('kv_cache_memory')} {config.kv_cache_memory_gib:g}"
    if needs.left is not None:
        return needs.left_nbytes or 0, needs.left[1]
    if (share := config.gpu_memory_utilization) is not None:
        flag = f"{called('gpu_memory_utilization')} {share:g}, {shared(free, config)}"
        return host_share(free, share, config.num_local_ranks), flag
    num_seqs = 1 if needs.is_default else config.max_num_seqs
    held = needs.nbytes_of(needs.per_request, config.max_num_seqs) + num_seqs * needs.state_nbytes
    enough = _with_checkpoints(needs, held)
    fitting = host_share(free, DEFAULT_SHARE, config.num_local_ranks)
    flag = f"{shared(free, config)}, of which {DEFAULT_SHARE:.0%} is for KV caches"
    return min(max(enough, DEFAULT_KV_CACHE_NBYTES), fitting), flag


def _with_checkpoints(needs: GroupNeeds, nbytes: int) -> int:
    """Returns `nbytes` plus the bytes of the checkpoints that pools of this size have."""
    if not needs.keeps_states:
        return nbytes
    if needs.config.state_cache_gib is not None:
        return nbytes + int(needs.config.state_cache_gib * GIB)
    return nbytes + max(needs.state_nbytes, -(-nbytes // (STATES_SHARE - 1)))


def _sizes(needs: GroupNeeds, num_blocks: int, num_seqs: int, num_checkpoints: int) -> GroupSizes:
    """Returns the sizes of all groups, with each group's part of the swap space."""
    found, held = [num_blocks], [num_blocks]
    if needs.window is not None:
        found.append(min(num_blocks, needs.num_window_blocks(num_seqs)))
        held.append(found[-1])
    if needs.state is not None:
        found.append(num_seqs + num_checkpoints)
        held.append(num_seqs)
    sizes = [layout.block_nbytes * count for layout, count in zip(needs.layouts, held, strict=True)]
    parts = [size / sum(sizes) for size in sizes]
    swapped = [num_swap_blocks(needs.config, *each) for each in zip(needs.layouts, parts, strict=True)]
    return GroupSizes(tuple(found), tuple(swapped), num_seqs, num_checkpoints)
