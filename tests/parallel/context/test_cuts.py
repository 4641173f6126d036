"""Positions of context ranks, by hand."""

import numpy as np
import pytest

from engine.parallel.context.cuts import contiguous, position_runs, zigzag


@pytest.mark.parametrize("length", [4, 8, 13, 37, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_position_is_on_one_rank(length: int, ranks: int) -> None:
    for cut in (zigzag, contiguous):
        held = np.concatenate(cut(length, ranks).ranks)
        assert sorted(held.tolist()) == list(range(length))


@pytest.mark.parametrize(("length", "ranks"), [(64, 4), (61, 4), (37, 3), (1000, 7)])
def test_causal_work_of_a_zigzag_is_balanced(length: int, ranks: int) -> None:
    work = [int((held + 1).sum()) for held in zigzag(length, ranks).ranks]
    assert max(work) / (sum(work) / ranks) <= 1 + 4 * ranks / length


def test_runs_are_neighbouring_positions() -> None:
    assert position_runs(np.array([0, 1, 2, 7, 8, 11])) == [(0, 3), (3, 5), (5, 6)]
    assert position_runs(np.array([], dtype=np.int64)) == []
