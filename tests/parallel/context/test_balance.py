"""Zig-zag sharding divides causal attention evenly, as counting each pair confirms."""

from itertools import product

import pytest

from engine.parallel.context.balance import causal_balance
from engine.parallel.context.cuts import zigzag


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_planned_pairs_are_those_that_queries_see(ranks: int) -> None:
    for length, unit in product((2 * ranks * 2, 37, 64, 100), (1, 2)):
        if length < 2 * ranks * unit or length % unit:
            continue
        held = zigzag(length, ranks, unit).ranks
        seen = tuple(sum(1 for query in own for key in range(length) if key <= query) for own in held)
        balance = causal_balance(length, ranks, unit)
        assert balance.pairs == seen
        assert balance.most_over_mean == pytest.approx(max(seen) / (sum(seen) / ranks))


def test_the_rank_with_the_most_work_is_near_the_mean() -> None:
    for ranks, length in product(range(1, 17), (32, 33, 47, 64, 127, 1000, 4096, 8191)):
        if length >= 2 * ranks:
            assert causal_balance(length, ranks).most_over_mean <= 1 + 4 * ranks / length, (ranks, length)


def test_equal_chunks_are_balanced_exactly_and_a_million_tokens_are_counted() -> None:
    assert causal_balance(4096, 8).most_over_mean == 1.0
    assert sum(causal_balance(1_000_000, 16).pairs) == 1_000_000 * 1_000_001 // 2
