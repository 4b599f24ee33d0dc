"""Keeps long block tables as arrays between steps, so that a step copies only the entries that are new."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from pd_cluster.types import Request

LEAST_BLOCKS = 512  # shorter tables are copied as quickly as they are looked up


class KeptTable:
    """A copy of a block table, up to the last entry read."""

    def __init__(self, table: list[int], num_blocks: int) -> None:
        self.table, self.blocks = table, np.empty(2 * num_blocks, dtype=np.int64)
        self._num_known = self._num_passed = 0

    def up_to(self, first: int, num_blocks: int) -> npt.NDArray[np.int64]:
        """Returns the first blocks as an array, which the next call may overwrite.

        Entries before `first` hold only computed tokens. They change only when the window passes them: then the padding
        block replaces them, one after another.
        """
        table, blocks, first = self.table, self.blocks, min(first, self._num_known)
        blocks[first:num_blocks] = table[first:num_blocks]
        self._num_known, at = num_blocks, self._num_passed
        padding = table[0] if table[0] == table[1] else -1  # only the padding block occurs more than once
        while at < first and (blocks[at] != table[at] or table[at] == padding):
            blocks[at] = table[at]
            at += 1
        self._num_passed = at
        return blocks[:num_blocks]


_kept: WeakKeyDictionary[Request, dict[int, KeptTable]] = WeakKeyDictionary()


def kept_blocks(request: Request, group: int, first: int, num_blocks: int) -> npt.NDArray[np.int64]:
    """Returns the first blocks of a request's table in a group of layers: see `KeptTable.up_to`."""
    table, tables = request.tables[group], _kept.setdefault(request, {})
    kept = tables.get(group)
    if kept is None or kept.table is not table or len(kept.blocks) < num_blocks:
        kept = tables[group] = KeptTable(table, num_blocks)
    return kept.up_to(first, num_blocks)
