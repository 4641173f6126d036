"""The flat layout: every element has one place and one owner, whatever the parameters look like."""

import math
from dataclasses import replace
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.parallel.grid import Spread
from engine.zero.layout import ALIGNMENT, Bucket, FlatLayout, Item, build_layout

shapes_st = st.lists(st.sampled_from([0, 1, 2, 3, 7, 32, 64, 65, 129]), max_size=3).map(tuple)
dtypes_st = st.sampled_from(["float32", "bfloat16", "float64"])


@st.composite
def items_st(draw: st.DrawFn) -> list[Item]:
    """Parameters with distinct names: empty, 0-dim, odd and large ones, of several dtypes and groups."""
    kinds = draw(st.lists(st.tuples(shapes_st, dtypes_st, st.integers(0, 3)), min_size=1, max_size=12))
    return [Item(name=f"p{i}", shape=shape, dtype=dtype, group=group) for i, (shape, dtype, group) in enumerate(kinds)]


ranks_st = st.sampled_from([1, 2, 3, 4, 5, 8])
limits_st = st.sampled_from([1, 63, 64, 65, 200, 1000, 10**9])
layouts_st = st.builds(build_layout, items_st(), ranks_st, limits_st)


@given(items_st(), ranks_st, limits_st)
@example([Item(name="nothing", shape=(0,), dtype="float32")], 8, 1)
@example([Item(name="scalar", shape=(), dtype="bfloat16", group=3)], 8, 64)
def test_every_parameter_has_one_slot_of_its_own_size(items: list[Item], ranks: int, limit: int) -> None:
    layout = build_layout(items, ranks, limit)
    placed = {slot.name: (slot.shape, bucket.dtype, slot.group) for bucket in layout.buckets for slot in bucket.slots}
    assert placed == {item.name: (item.shape, item.dtype, item.group) for item in items}
    assert sum(len(bucket.slots) for bucket in layout.buckets) == len(items)
    assert all(slot.stop - slot.start == math.prod(slot.shape) for b in layout.buckets for slot in b.slots)


@given(layouts_st)
def test_slots_are_disjoint_aligned_in_order_and_inside(layout: FlatLayout) -> None:
    for bucket in layout.buckets:
        assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)
        assert all(a.stop <= b.start for a, b in pairwise(bucket.slots))
        assert all(b.start - a.stop < ALIGNMENT for a, b in pairwise(bucket.slots))
        assert bucket.slots[0].start >= 0 and bucket.slots[-1].stop <= bucket.elements


@given(layouts_st)
def test_buckets_divide_evenly_and_are_padded_no_more_than_that(layout: FlatLayout) -> None:
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    for bucket in layout.buckets:
        quantum = ALIGNMENT * layout.ranks
        assert bucket.elements % quantum == 0 and bucket.elements > 0
        assert bucket.elements - max(bucket.slots[-1].stop, 1) < quantum


@given(layouts_st)
def test_shards_partition_each_bucket_equally(layout: FlatLayout) -> None:
    for bucket in layout.buckets:
        shards = [bucket.shard(index) for index in range(layout.ranks)]
        assert [shard.start for shard in shards] == [0, *(shard.stop for shard in shards[:-1])]
        assert shards[-1].stop == bucket.elements
        assert len({shard.stop - shard.start for shard in shards}) == 1
        assert all(shard.start % ALIGNMENT == 0 for shard in shards)


@given(layouts_st)
def test_segments_partition_each_shard(layout: FlatLayout) -> None:
    for bucket in layout.buckets:
        for index in range(layout.ranks):
            shard = bucket.shard(index)
            segments = bucket.segments(shard)
            assert segments[0].start == shard.start and segments[-1].stop == shard.stop
            assert all(a.stop == b.start for a, b in pairwise(segments))
            assert all(segment.start < segment.stop for segment in segments)


def group_at(bucket: Bucket, element: int) -> int | None:
    """Group of the parameter that ``element`` belongs to; None in padding."""
    return next((slot.group for slot in bucket.slots if slot.start <= element < slot.stop), None)


@given(layouts_st)
def test_each_element_lies_in_a_segment_of_its_own_group(layout: FlatLayout) -> None:
    for bucket in layout.buckets:
        shards = [bucket.shard(index) for index in range(layout.ranks)]
        for segment in (segment for shard in shards for segment in bucket.segments(shard)):
            corners = {segment.start, segment.stop - 1}
            inside = {s.start for s in bucket.slots} | {s.stop - 1 for s in bucket.slots}
            for element in corners | {e for e in inside if segment.start <= e < segment.stop}:
                assert group_at(bucket, element) in (segment.group, None)


@given(layouts_st)
def test_a_group_is_one_run_of_each_bucket(layout: FlatLayout) -> None:
    for bucket in layout.buckets:
        runs = bucket.segments(slice(0, bucket.elements))
        assert len({run.group for run in runs}) == len(runs)
        assert [run.group for run in runs] == sorted(run.group for run in runs)


@given(layouts_st)
def test_elements_of_buckets_add_up(layout: FlatLayout) -> None:
    assert layout.elements == sum(bucket.elements for bucket in layout.buckets)


@given(items_st(), limits_st)
def test_a_bucket_exceeds_its_limit_only_with_a_single_parameter(items: list[Item], limit: int) -> None:
    for bucket in build_layout(items, 1, limit).buckets:
        filled = sum(-(-math.prod(slot.shape) // ALIGNMENT) * ALIGNMENT for slot in bucket.slots)
        nonempty = [slot for slot in bucket.slots if math.prod(slot.shape)]
        assert filled <= limit or len(nonempty) == 1


@given(items_st(), ranks_st, ranks_st, limits_st)
def test_places_depend_on_the_items_alone(items: list[Item], ranks: int, others: int, limit: int) -> None:
    first, again = build_layout(items, ranks, limit), build_layout(tuple(items), ranks, limit)
    assert first == again and hash(first) == hash(again)
    elsewhere = build_layout(items, others, limit)  # so that a checkpoint fits another number of ranks
    assert [bucket.slots for bucket in elsewhere.buckets] == [bucket.slots for bucket in first.buckets]


@given(items_st(), ranks_st)
def test_with_one_group_slots_follow_backward(items: list[Item], ranks: int) -> None:
    plain = [Item(name=item.name, shape=item.shape, dtype="float32") for item in items]
    for limit in (1, 300, 10**9):
        order = [slot.name for bucket in build_layout(plain, ranks, limit).buckets for slot in bucket.slots]
        assert order == [item.name for item in reversed(plain)]


def test_dtypes_never_share_a_bucket_but_fill_theirs_across_each_other() -> None:
    items = [
        Item(name=name, shape=(64,), dtype=dtype)
        for name, dtype in zip("abcd", ["float32", "bfloat16"] * 2, strict=True)
    ]
    buckets = build_layout(items, 2, 1000).buckets
    assert [(b.dtype, [slot.name for slot in b.slots]) for b in buckets] == [
        ("bfloat16", ["d", "b"]),
        ("float32", ["c", "a"]),
    ]


def test_a_bucket_is_filled_up_to_its_limit_padding_included() -> None:
    items = [Item(name=name, shape=(33,), dtype="float32") for name in "abc"]
    assert [len(bucket.slots) for bucket in build_layout(items, 1, 2 * ALIGNMENT).buckets] == [2, 1]
    assert [len(bucket.slots) for bucket in build_layout(items, 1, 2 * ALIGNMENT - 1).buckets] == [1, 1, 1]


def test_a_large_parameter_is_alone_and_its_neighbours_are_not_lost() -> None:
    items = [
        Item(name="a", shape=(64,), dtype="float32"),
        Item(name="big", shape=(50, 50), dtype="float32"),
        Item(name="c", shape=(64,), dtype="float32"),
    ]
    buckets = build_layout(items, 4, 128).buckets
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["c"], ["big"], ["a"]]
    assert [bucket.elements for bucket in buckets] == [256, 2560, 256]


def test_fewer_elements_than_ranks_leave_whole_shards_of_padding() -> None:
    (bucket,) = build_layout([Item(name="scalar", shape=(), dtype="float32", group=1)], 8, 1).buckets
    assert bucket.elements == 8 * ALIGNMENT and bucket.slots[0].stop == 1
    assert [bucket.segments(bucket.shard(i))[0].group for i in range(8)] == [1] * 8


def test_nothing_to_lay_out_is_no_bucket() -> None:
    assert build_layout([], 4, 64) == FlatLayout(4, ())


@given(items_st(), ranks_st, limits_st, st.data())
def test_what_several_ranks_share_lies_last_and_apart(
    items: list[Item], ranks: int, limit: int, data: st.DataObject
) -> None:
    kinds = st.tuples(st.sampled_from([(), (0, 2), (1, 2)]), st.booleans())
    marked = [replace(item, ties=ties, partial=part) for item in items for ties, part in [data.draw(kinds)]]
    layout = build_layout(marked, ranks, limit)
    kind_of = {item.name: (item.dtype, item.ties, item.partial) for item in marked}
    for bucket in layout.buckets:
        assert {kind_of[slot.name] for slot in bucket.slots} == {(bucket.dtype, bucket.ties, bucket.partial)}
        assert bucket.late == (bool(bucket.ties) or bucket.partial)
    late = [bucket.late for bucket in layout.buckets]
    assert late == sorted(late), "early buckets can be reduced while backward still runs"
    # another owner of a tie has other neighbours and counts other copies, and lays it out alike all the same
    elsewhere = [replace(item, counted=data.draw(st.booleans())) for item in marked if item.ties == (0, 2)]
    alone = build_layout(elsewhere, ranks, limit)
    shared = [bucket for bucket in layout.buckets if bucket.ties == (0, 2)]
    assert [_places(bucket) for bucket in shared] == [_places(bucket) for bucket in alone.buckets]


@given(items_st(), ranks_st, limits_st, st.data())
def test_the_norm_counts_every_counted_element_once(
    items: list[Item], ranks: int, limit: int, data: st.DataObject
) -> None:
    marked = [replace(item, counted=data.draw(st.booleans())) for item in items]
    counted = {item.name for item in marked if item.counted}
    for bucket in build_layout(marked, ranks, limit).buckets:
        times = [0] * bucket.elements
        for index in range(ranks):
            for piece in bucket.counted(bucket.shard(index)):
                for element in range(piece.start, piece.stop):
                    times[element] += 1
        for slot in bucket.slots:
            assert set(times[slot.start : slot.stop]) <= {int(slot.name in counted)}, slot


@settings(max_examples=40)
@given(items_st(), ranks_st, limits_st, st.data())
def test_the_norm_leaves_out_the_copies_in_a_parameter(
    items: list[Item], ranks: int, limit: int, data: st.DataObject
) -> None:
    """A fused projection with a shared key has own rows and rows that another rank counts."""
    marked = []
    for item in items:
        start, stop = sorted(data.draw(st.lists(st.integers(0, math.prod(item.shape)), min_size=2, max_size=2)))
        marked.append(replace(item, copies=((start, stop),) if start < stop else ()))
    copies = {item.name: item.copies for item in marked}
    for bucket in build_layout(marked, ranks, limit).buckets:
        yes, no = [0] * bucket.elements, [0] * bucket.elements
        for index in range(ranks):
            for times, pieces in ((yes, bucket.counted), (no, bucket.uncounted)):
                for piece in pieces(bucket.shard(index)):
                    for element in range(piece.start, piece.stop):
                        times[element] += 1
        assert [a + b for a, b in zip(yes, no, strict=True)] == [1] * bucket.elements
        for slot in bucket.slots:
            copied = {slot.start + i for start, stop in copies[slot.name] for i in range(start, stop)}
            assert all(no[element] == (element in copied) for element in range(slot.start, slot.stop))


@given(items_st(), ranks_st, limits_st, st.data())
def test_tensor_ranks_lay_out_what_they_share_alike(
    items: list[Item], ranks: int, limit: int, data: st.DataObject
) -> None:
    """One rank counts it in the norm and the others do not; a sum over data ranks may depend on the place."""
    both: tuple[list[Item], list[Item]] = ([], [])
    for item in items:
        shared, first = data.draw(st.booleans()), data.draw(st.booleans())
        for number, mine in enumerate(both):
            mine.append(replace(item, shared=shared, counted=not shared or first == (number == 0)))
    left, right = (build_layout(mine, ranks, limit).buckets for mine in both)
    assert [_places(bucket) for bucket in left] == [_places(bucket) for bucket in right]


def _places(bucket: Bucket) -> tuple[object, ...]:
    return bucket.elements, bucket.partial, [(slot.name, slot.start, slot.stop) for slot in bucket.slots]


def test_items_of_other_axes_have_buckets_of_their_own_and_other_shards() -> None:
    apart = Spread("edp", "edp_replicate", "edp", "edp", "edp_replicate", 2)
    items = [Item("expert", (3 * ALIGNMENT,), "float32", spread=apart), Item("norm", (3 * ALIGNMENT,), "float32")]
    shared, of_experts = build_layout(items, 4, 10**9).buckets
    assert ([slot.name for slot in shared.slots], [slot.name for slot in of_experts.slots]) == (["norm"], ["expert"])
    assert (shared.spread, of_experts.spread) == (Spread(ranks=4), apart)
    assert (shared.elements, of_experts.elements) == (4 * ALIGNMENT, 4 * ALIGNMENT)
    assert [of_experts.shard(index).start for index in range(2)] == [0, 2 * ALIGNMENT]
    assert shared.shard(3) == slice(3 * ALIGNMENT, 4 * ALIGNMENT)
