"""Who holds what, as pure arithmetic."""

import pickle

import numpy as np
import pytest

from engine.parallel.shard_table import Range
from engine.parallel.tensor.global_tensor.index_sets import (
    Index,
    Indices,
    NoRuleError,
    common,
    covers,
    held_once,
    index_of,
    positions,
)
from engine.parallel.tensor.global_tensor.layout import Layout, concatenated, local_shape, repeated, reshaped, sliced
from tests.parallel.tensor.global_tensor.rig import KINDS, index


def test_equal_sets_are_equal_objects_in_every_way() -> None:
    one, other = index("thirds", 12, 2), index("thirds", 12, 2)
    assert one == other and one is not other and hash(one) == hash(other)
    assert one != index("blocks", 12, 2)
    assert pickle.loads(pickle.dumps(one)) == one
    assert repr(one) == "Index(12 over 2: 6 6)"


@pytest.mark.parametrize(
    ("kind", "once", "even", "blocks"),
    [
        ("blocks", True, True, True),
        ("interleaved", True, True, False),
        ("thirds", True, True, False),
        ("uneven", True, False, False),
        ("shared", False, False, False),
        ("pairs", False, False, False),
    ],
)
def test_kinds(kind: str, once: bool, even: bool, blocks: bool) -> None:
    found = index(kind, 12, 4)
    assert (found.once, found.even, found.blocks) == (once, even, blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_holder_owns(kind: str) -> None:
    found = index(kind, 24, 4)
    assert sorted(np.concatenate(found.owned.ranks).tolist()) == list(range(24))
    seen: set[int] = set()
    for held, owned in zip(found.ranks, found.owned.ranks, strict=True):
        assert owned.tolist() == [one for one in held.tolist() if one not in seen]
        seen.update(held.tolist())
    if found.even:
        joined = np.concatenate(found.ranks)
        assert joined[found.order].tolist() == list(range(24))


def test_ranges_of_the_shard_table() -> None:
    thirds = [Range(start, start + 2, (start // 2 % 2,)) for start in range(0, 12, 2)]
    assert Index.of_ranges(thirds, 2) == index("thirds", 12, 2)
    assert Index.of_ranges([Range(0, 4, (0, 1))], 2) is None


def test_what_all_hold_is_no_index_and_one_element_cannot_be_cut() -> None:
    assert index_of([np.arange(3)] * 2, 3) is None
    with pytest.raises(NoRuleError):
        index_of([np.arange(1), np.arange(0)], 1)


def test_common_of_what_two_operands_hold() -> None:
    pairs, blocks = index("pairs", 24, 4), index("blocks", 24, 4)
    assert common(pairs, blocks) == blocks and common(None, pairs) is pairs and common(pairs, None) is pairs
    with pytest.raises(NoRuleError):
        common(blocks, index("interleaved", 24, 4))


def test_two_cut_dims_may_leave_elements_to_nobody() -> None:
    blocks = index("blocks", 12, 4)
    assert covers([blocks, None]) and not covers([blocks, blocks])
    tiles = reshaped(Layout((24,), (index("blocks", 24, 4),)), (2, 12))
    assert all(tiles.sets) and covers(tiles.sets) and held_once(tiles.sets)
    assert not held_once([None]) and not held_once([index("pairs", 12, 4)])


def test_positions_within_what_is_held() -> None:
    thirds, blocks = index("thirds", 12, 2), index("blocks", 12, 2)
    assert positions(thirds, thirds, 0) is None
    found = positions(None, thirds, 1)
    assert found is not None and found.tolist() == [[2, 4], [6, 8], [10, 12]]
    with pytest.raises(NoRuleError):
        positions(thirds, blocks, 0)
    with pytest.raises(NoRuleError):
        positions(thirds, None, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_reshape_holds_the_same_elements(kind: str, ranks: int) -> None:
    layout = Layout((2, 24, 3), (None, index(kind, 24, ranks), None))
    numbers = np.arange(2 * 24 * 3)
    shapes = [
        (2, 72),
        (48, 3),
        (2, 4, 6, 3),
        (2, 3, 8, 3),
        (2, 24, 1, 3),
        (144,),
        (1, 2, 24, 3),
        (4, 12, 3),
        (2, 2, 36),
    ]
    agreed = 0
    for shape in shapes:
        try:
            made = reshaped(layout, shape)
        except NoRuleError:
            continue
        agreed += 1
        for rank in range(ranks):
            assert _held(numbers.reshape(shape), made, rank) == _held(numbers.reshape(2, 24, 3), layout, rank), shape
            assert len(_held(numbers.reshape(shape), made, rank)) == np.prod(local_shape(made, rank))
    assert agreed >= 3


def _held(numbers: Indices, layout: Layout, rank: int) -> list[int]:
    axes = [np.arange(n) if s is None else s.ranks[rank] for n, s in zip(layout.shape, layout.sets, strict=True)]
    found: list[int] = numbers[np.ix_(*axes)].ravel().tolist()
    return found


def test_slices_repetitions_and_joins() -> None:
    thirds = index("thirds", 12, 2)
    old, new = sliced(thirds, np.arange(4, 8))
    assert [held.tolist() for held in old.ranks] == [[4, 5], [6, 7]]
    assert new == index("blocks", 4, 2)
    assert [held.tolist() for held in repeated(index("blocks", 2, 2), 2, True).ranks] == [[0, 1], [2, 3]]
    assert [held.tolist() for held in repeated(index("blocks", 2, 2), 2, False).ranks] == [[0, 2], [1, 3]]
    joined = concatenated([(1, None), (4, index("blocks", 4, 2))], 2)
    assert joined is not None and [held.tolist() for held in joined.ranks] == [[0, 1, 2], [0, 3, 4]]
    assert concatenated([(1, None), (2, None)], 2) is None
