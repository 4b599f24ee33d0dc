"""A conversation's second turn: tokens that the instances hold are neither computed nor moved again."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.cluster import LiveCluster
from tests.support.engines import assert_same, random_prompt

BLOCK_SIZE = 16
MAX_TOKENS = 16


def received(cluster: LiveCluster, turn: list[int]) -> tuple[list[int], int]:
    """The answer, and the bytes of KV cache that came to the decode instance for it."""
    cluster.assert_home()
    before = cluster.instance("decode-0")["kv_received_nbytes"]
    answer = cluster.complete(turn, MAX_TOKENS, ignore_eos=True)
    cluster.assert_home()
    nbytes: int = cluster.instance("decode-0")["kv_received_nbytes"] - before
    return answer, nbytes


def test_a_second_turn_moves_only_what_is_new(cluster: LiveCluster, model: Path) -> None:
    """The decode instance keeps what it landed and what it generated."""
    first = random_prompt(random.Random(12), 4 * BLOCK_SIZE)
    answer, whole = received(cluster, first)
    block_nbytes = whole // 4
    second = [*first, *answer, *random_prompt(random.Random(13), 2 * BLOCK_SIZE)]
    again, rest = received(cluster, second)
    # The block that the answer's last token fills, whose KV was never computed there, and two of the new turn.
    assert rest == 3 * block_nbytes
    assert_same(model, second, again, MAX_TOKENS)
    _, nothing = received(cluster, first)
    assert nothing == 0
