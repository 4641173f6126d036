"""Ranges cover each row once per holder group; parts and whole are inverse. One process."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.shard_table import Range
from engine.parallel.tensor.layers.apply_plan import assemble, local_shard
from engine.parallel.tensor.plan.ranges import cut_parts, cut_unevenly, held
from engine.parallel.tensor.plan.tensor_plan import ParameterCut

ranks_st = st.sampled_from([1, 2, 3, 4, 6, 8])


@st.composite
def cuts_st(draw: st.DrawFn) -> tuple[int, int, tuple[Range, ...]]:
    """(rows, ranks, ranges) of every kind of cut."""
    tp, unit, parts = draw(ranks_st), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["even", "shared", "vocabulary"]))
    if kind == "vocabulary":
        size = draw(st.integers(tp, 50))
        return size, tp, cut_unevenly(size, tp)
    divisors = [n for n in range(1, tp + 1) if tp % n == 0]
    units = draw(st.sampled_from(divisors)) if kind == "shared" else tp * draw(st.integers(1, 3))
    size = units * unit * parts
    return size, tp, cut_parts(size, tp, parts, unit)


@given(cuts_st())
def test_ranges_cover_each_row_once_in_order_and_every_rank_holds_some(cut: tuple[int, int, tuple[Range, ...]]) -> None:
    size, tp, ranges = cut
    assert [row for part in ranges for row in range(part.start, part.stop)] == list(range(size))
    widths = [held(ranges, index) for index in range(tp)]
    assert min(widths) > 0 and max(widths) - min(widths) <= 1
    for part in ranges:
        assert part.holders == tuple(range(part.holders[0], part.holders[-1] + 1))


@given(cuts_st(), st.integers(0, 1), st.integers(1, 4))
def test_parts_assemble_to_the_whole(cut: tuple[int, int, tuple[Range, ...]], dim: int, other: int) -> None:
    size, tp, ranges = cut
    plan = ParameterCut(dim, ranges)
    full = torch.arange(size * other).view((size, other) if dim == 0 else (other, size))
    parts = [local_shard(full, plan, index) for index in range(tp)]
    assert torch.equal(assemble(parts, plan), full)
    for part, width in zip(parts, plan.widths(tp), strict=True):
        assert part.shape[dim] == width and part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.numel() * 8  # nothing of the whole is kept alive


def test_examples_of_the_docstring() -> None:
    def holders(ranges: tuple[Range, ...]) -> list[tuple[int, ...]]:
        return [part.holders for part in ranges for _ in range(part.start, part.stop)]

    assert holders(cut_parts(8, 4)) == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    assert holders(cut_parts(2, 4)) == [(0, 1), (2, 3)]
    assert holders(cut_parts(6, 2, parts=3)) == [(0,), (1,), (0,), (1,), (0,), (1,)]
    assert holders(cut_unevenly(5, 2)) == [(0,), (0,), (0,), (1,), (1,)]


def test_a_shared_range_is_taken_from_its_first_holder() -> None:
    cut = ParameterCut(0, cut_parts(2, 4))
    assert assemble([torch.tensor([float(rank)]) for rank in range(4)], cut).tolist() == [0.0, 2.0]
