"""All ranks distribute pictures in the same way, almost as evenly as possible."""

from __future__ import annotations

import itertools
import random

from pd_cluster.model.vision.vision_tower import shared


def longest(sizes: list[int], owners: tuple[int, ...] | list[int], num_ranks: int) -> int:
    return max(sum(size for size, own in zip(sizes, owners, strict=True) if own == rank) for rank in range(num_ranks))


def test_no_rank_has_much_more_than_it_must() -> None:
    """Checks Graham's bound, (4/3 - 1/(3 * ranks)) times the optimum, which the test finds by search."""
    rng = random.Random(1)
    for _ in range(60):
        num_ranks = rng.randint(1, 3)
        sizes = [rng.randint(1, 40) for _ in range(rng.randint(0, 7))]
        found = shared(sizes, num_ranks)
        assert found == shared(list(sizes), num_ranks)
        best = min(longest(sizes, ways, num_ranks) for ways in itertools.product(range(num_ranks), repeat=len(sizes)))
        assert 3 * num_ranks * longest(sizes, found, num_ranks) <= (4 * num_ranks - 1) * best


def test_equal_pictures_go_to_all_ranks_in_turn() -> None:
    assert shared([9] * 5, 2) == [0, 1, 0, 1, 0]
    assert shared([1, 5, 1, 1], 2) == [1, 0, 1, 1]
