"""Pieces against a model that writes down the index of every element."""

import math
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.checkpoint.format.manifest import StoredPiece
from engine.checkpoint.format.manifest_parts import StoredRuns, fold, run_to_json, runs_from_json
from engine.checkpoint.format.pieces import Numbers, Part, Piece, covers_once, runs
from engine.errors import CheckpointError

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


def indices(piece: Piece) -> Numbers:
    """The place in the whole tensor of every element of a piece, in the order of the piece."""
    part = piece.part
    every = np.arange(math.prod(part.shape), dtype=np.int64).reshape(part.shape)
    if part.dim is not None:
        every = np.concatenate([every.take(range(*row), axis=part.dim) for row in part.rows], axis=part.dim)
        # the rows of a part lie behind one another along its dim, inside every index of the dims before
    return every.reshape(-1)[piece.start : piece.stop]


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> Part:
    """Any rows of any dim."""
    uncut = draw(st.booleans())
    if uncut or not shape:
        return Part(shape)
    dim = draw(st.integers(0, len(shape) - 1))
    bounds = draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=6))
    pairs = sorted(bounds[: len(bounds) // 2 * 2])
    rows = tuple((a, b) for a, b in zip(pairs[::2], pairs[1::2], strict=True) if a < b)
    assume(rows)
    return Part(shape, dim, rows)


@st.composite
def pieces(draw: st.DrawFn, shape: tuple[int, ...]) -> Piece:
    part = draw(parts(shape))
    start = draw(st.integers(0, part.elements))
    return Piece(part, start, draw(st.integers(start, part.elements)))


@st.composite
def covers(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece]]:
    """A tensor as a grid stores it: rows of one dim dealt out to tensor ranks, each part cut flat over data ranks."""
    shape = draw(SHAPES)
    found = []
    if draw(st.booleans()) and shape:
        dim = draw(st.integers(0, len(shape) - 1))
        inner = draw(st.lists(st.integers(1, shape[dim]), max_size=4))
        bounds = sorted({0, shape[dim], *inner})
        rows = list(pairwise(bounds))
        ranks = [draw(st.integers(0, 2)) for _ in rows]
        held = [tuple(row for row, at in zip(rows, ranks, strict=True) if at == rank) for rank in range(3)]
        cut = [Part(shape, dim, mine) for mine in held if mine]
    else:
        cut = [Part(shape)]
    for part in cut:
        bounds = sorted({0, part.elements, *draw(st.lists(st.integers(0, part.elements), max_size=3))})
        found += [Piece(part, a, b) for a, b in pairwise(bounds)]
    return shape, draw(st.permutations(found))


@given(SHAPES.flatmap(pieces))
def test_spans_are_the_elements_in_order(piece: Piece) -> None:
    spans = piece.spans()
    found = [np.arange(full, full + count) for full, count in zip(spans.full, spans.length, strict=True)]
    assert np.array_equal(np.concatenate([np.zeros(0, dtype=np.int64), *found]), indices(piece))
    assert np.array_equal(spans.local, np.cumsum(spans.length) - spans.length)
    assert (spans.length > 0).all() and piece.elements == len(indices(piece))


@settings(max_examples=300)
@given(SHAPES.flatmap(lambda shape: st.tuples(pieces(shape), pieces(shape))))
def test_runs_are_what_two_pieces_share(pair: tuple[Piece, Piece]) -> None:
    source, target = pair
    shared = runs(source, target)
    left, right = indices(source), indices(target)
    moved = np.full(len(right), -1, dtype=np.int64)
    for start, place, count in zip(*shared, strict=True):
        assert count > 0 and (moved[place : place + count] == -1).all(), "an element is copied twice"
        moved[place : place + count] = left[start : start + count]
    expected = np.where(np.isin(right, left), right, -1)
    assert np.array_equal(moved, expected)


@given(SHAPES.flatmap(lambda shape: st.tuples(pieces(shape), pieces(shape))))
def test_runs_are_as_long_as_can_be(pair: tuple[Piece, Piece]) -> None:
    shared = runs(*pair)
    for at in range(len(shared.length) - 1):
        goes_on = (shared.source[at] + shared.length[at], shared.target[at] + shared.length[at])
        assert goes_on != (shared.source[at + 1], shared.target[at + 1])


@given(SHAPES.flatmap(pieces), st.data())
def test_within_keeps_what_is_in_the_narrower_part(piece: Piece, data: st.DataObject) -> None:
    part = piece.part
    narrower = part
    if part.dim is not None:
        kept = tuple(row for row in part.rows if data.draw(st.booleans()))
        assume(kept)
        narrower = Part(part.shape, part.dim, kept)
    inside = indices(piece.within(narrower))
    assert np.array_equal(inside, [i for i in indices(piece) if i in set(indices(narrower.whole()))])


def test_within_counts_what_lies_before_the_piece() -> None:
    """Rows 0, 1, 3 and 4 of six, four elements each; the piece has row 1, row 3 and half of row 4."""
    shape = (6, 4)
    piece = Piece(Part(shape, 0, ((0, 2), (3, 5))), 4, 14)
    first, last = Part(shape, 0, ((0, 2),)), Part(shape, 0, ((3, 5),))
    assert piece.within(first) == Piece(first, 4, 8) and piece.within(last) == Piece(last, 0, 6)


@settings(max_examples=200)
@given(covers())
def test_what_a_grid_stores_covers_once(cover: tuple[tuple[int, ...], list[Piece]]) -> None:
    assert covers_once(*cover)


@settings(max_examples=300)
@given(covers(), st.data())
def test_no_other_pieces_cover_once(cover: tuple[tuple[int, ...], list[Piece]], data: st.DataObject) -> None:
    """One piece is lost, doubled, moved, cut, or replaced by any other: said as the model says it."""
    shape, found = cover
    at = data.draw(st.integers(0, len(found) - 1))
    change = data.draw(st.sampled_from(("lose", "double", "replace", "add")))
    other = data.draw(pieces(shape))
    changed = {
        "lose": [*found[:at], *found[at + 1 :]],
        "double": [*found, found[at]],
        "replace": [*found[:at], other, *found[at + 1 :]],
        "add": [*found, other],
    }[change]
    held = np.concatenate([np.zeros(0, dtype=np.int64), *(indices(piece) for piece in changed)])
    exactly_once = np.array_equal(np.sort(held), np.arange(math.prod(shape)))
    if covers_once(shape, changed):
        assert exactly_once
    if change in ("lose", "double"):
        assert not exactly_once and not covers_once(shape, changed)


@given(st.lists(pieces((4, 6)), max_size=4))
def test_what_is_called_a_cover_is_one(found: list[Piece]) -> None:
    if covers_once((4, 6), found):
        assert np.array_equal(np.sort(np.concatenate([indices(piece) for piece in found])), np.arange(24))


def test_nothing_covers_an_empty_tensor() -> None:
    assert covers_once((0, 3), []) and covers_once((0, 3), [Part((0, 3)).whole()])
    assert not covers_once((), []) and covers_once((), [Part(()).whole()])


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_cover_of_a_huge_tensor_is_only_arithmetic(dim: int | None) -> None:
    shape = (2**31, 2**31)
    part = Part(shape) if dim is None else Part(shape, dim, ((0, 2**31),))
    halves = [Piece(part, 0, 2**61), Piece(part, 2**61, 2**62)]
    assert covers_once(shape, halves) and not covers_once(shape, halves[:1])


def test_parts_of_another_shape_cover_nothing() -> None:
    assert not covers_once((4, 6), [Part((6, 4)).whole()])


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,)])
def test_shapes_at_the_edge(shape: tuple[int, ...]) -> None:
    whole = Part(shape).whole()
    assert whole.elements == math.prod(shape) == int(runs(whole, whole).length.sum())


SHAPE = (12, 10)
PARTS = {
    "whole": [Part(SHAPE)],
    "rows": [Part(SHAPE, 0, ((3 * rank, 3 * rank + 3),)) for rank in range(4)],
    "columns": [Part(SHAPE, 1, ((5 * rank, 5 * rank + 5),)) for rank in range(2)],
    "fused rows": [Part(SHAPE, 0, ((3 * rank, 3 * rank + 3), (6 + 3 * rank, 9 + 3 * rank))) for rank in range(2)],
}
"""How tensor ranks cut a tensor."""


def cut(parts: str, data_ranks: int) -> list[StoredPiece]:
    """Each part in equal shares, the last one smaller."""
    found = []
    for tp, part in enumerate(PARTS[parts]):
        size = -(-part.elements // data_ranks)
        for dp in range(data_ranks):
            piece = Piece(part, min(part.elements, dp * size), min(part.elements, dp * size + size))
            found.append(StoredPiece(f"{dp * len(PARTS[parts]) + tp:03d}", "key", piece))
    return found


def stored(pieces: list[StoredPiece]) -> StoredRuns:
    """Through JSON."""
    files = [f"{number:03d}" for number in range(64)]
    told = [run_to_json(run) for run in fold(pieces, {name: number for number, name in enumerate(files)})]
    return runs_from_json(told, SHAPE, files, "it")


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("data_ranks", [1, 4, 7, 10])
def test_pieces_come_back_and_the_ones_that_share_are_found(parts: str, data_ranks: int) -> None:
    pieces = cut(parts, data_ranks)
    found = stored(pieces)
    assert sorted(found, key=repr) == sorted(pieces, key=repr) and len(found) == len(pieces)
    for other, ranks in product(PARTS, (1, 3)):
        for want in (one.piece for one in cut(other, ranks)):
            shared = [one for one in pieces if len(runs(one.piece, want).length)]
            candidates = list(found.sharing(want))
            assert not [one for one in shared if one not in candidates], (parts, other, want)
            if other == parts or {other, parts} <= {"whole", "rows"}:
                assert sorted(candidates, key=repr) == sorted(shared, key=repr), "and no other"


def test_equal_shares_are_one_run_however_many_they_are() -> None:
    part = Part((4096, 4))
    pieces = [StoredPiece(f"{3 * rank:05d}", "key", Piece(part, 4 * rank, 4 * rank + 4)) for rank in range(4096)]
    (run,) = fold(pieces, {f"{number:05d}": number for number in range(3 * 4096)})
    assert run_to_json(run) == {"file": 0, "key": "key", "rows": None, "flat": [0, 4], "step": 3, "count": 4096}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "endless": ({"step": 1, "count": 2**62}, "file numbers are below 64"),
    "in one file": ({"step": 0, "count": 30}, "but needs a .count. of at least 2"),
    "of one": ({"step": 1, "count": 1}, "but needs a .count. of at least 2"),
    "without a step": ({"count": 30}, "whole number"),
    "of nothing": ({"step": 1, "count": 30, "flat": [4, 4]}, "but needs a .count. of at least 2"),
    "too long": ({"step": 1, "count": 31}, "but this part of the tensor has only"),
    "too short": ({"step": 1, "count": 29}, "exactly once"),
    "overlapping": ({"step": 1, "count": 29, "flat": [0, 8]}, "but this part of the tensor has only"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_run_that_cannot_be_is_refused(how: str) -> None:
    change, words = HOSTILE[how]
    sound = {"file": 0, "key": "key", "rows": None, "flat": [0, 4], "step": 1, "count": 30}
    if how == "without a step":
        del sound["step"]
    with pytest.raises(CheckpointError, match=words):
        runs_from_json([sound | change], SHAPE, [str(number) for number in range(64)], "it")
