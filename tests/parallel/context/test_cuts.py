"""Positions of context ranks, by hand."""

import numpy as np
import pytest

from engine.parallel.context.cuts import contiguous, zigzag
from engine.parallel.tensor.global_tensor.index_runs import indices_of, meet, places_in, runs_from
from engine.parallel.tensor.global_tensor.layout import Layout, reshaped


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


def _drawn(draw: np.random.Generator, size: int) -> np.ndarray:
    return np.flatnonzero(draw.random(size) < draw.random())


def test_runs_are_sets_of_indices() -> None:
    draw = np.random.default_rng(0)
    for size in [*range(1, 9)] * 20:
        a, b = _drawn(draw, size), _drawn(draw, size)
        runs = [runs_from(each) for each in (a, b)]
        assert [indices_of(each).tolist() for each in runs] == [a.tolist(), b.tolist()]
        assert indices_of(meet(*runs)).tolist() == np.intersect1d(a, b).tolist()
        places = places_in(*runs)
        inside = bool(np.isin(b, a).all())
        assert (places is not None) == inside
        if places is not None:
            assert a[indices_of(places)].tolist() == b.tolist()


def test_ten_million_positions_cost_nothing_to_describe() -> None:
    index = zigzag(10_000_000, 8)
    assert all(runs.shape == (2, 2) for runs in index.runs[:-1]) and index.even and index.kinds[0] == 1
    flat = reshaped(Layout((4, index.size, 64), (None, index, None)), (4 * index.size, 64))
    assert reshaped(flat, (4, index.size, 64)).sets == (None, index, None)
    assert "ranks" not in vars(index)  # no array of positions exists
