"""When sharded parameters are whole: pure arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parallel.pipeline.schedule.actions import Action
from engine.zero.gather.gather_schedule import EVERYWHERE, GatherOrder, count_gathers, gather_order
from engine.zero.layout import Item, Turn, build_layout

F, B = Action.parse("0F0"), Action.parse("0B0")


def order_of(*users: tuple[int | Turn, ...], frozen: tuple[int, ...] = (), fed: bool = False) -> GatherOrder:
    """One parameter for each set of groups that use it; ``frozen`` are indices into ``users``."""
    items = [
        Item(name=f"p{number}", shape=(100,), dtype="float32", gathers=turns(*groups), trainable=number not in frozen)
        for number, groups in enumerate(users)
    ]
    return gather_order(build_layout(items, 2, 1), (0,) if fed else ())


def turns(*groups: int | Turn) -> tuple[Turn, ...]:
    """Of the only stage."""
    return tuple(group if isinstance(group, Turn) else Turn(0, group) for group in groups)


def names(order: GatherOrder, indices: frozenset[int]) -> set[str]:
    return {slot.name for index in indices for slot in order.buckets[index].slots}


def times(order: GatherOrder, *passes: Action, pinned: frozenset[int] = frozenset()) -> tuple[int, dict[str, int]]:
    """Calls, and by name how often a bucket is gathered."""
    found = count_gathers(order, passes, pinned)
    return found.calls, {bucket.slots[0].name: n for bucket, n in zip(order.buckets, found.times, strict=True)}


def test_a_group_is_whole_while_it_runs_and_the_one_at_the_turn_is_gathered_once() -> None:
    order = order_of((0,), (1,), (2,), (3,))
    assert times(order, F, B) == (7, {"p0": 2, "p1": 2, "p2": 2, "p3": 1})
    assert times(order, F, B, F, B) == (13, {"p0": 3, "p1": 4, "p2": 4, "p3": 2})
    assert times(order, F, F, B, B) == (15, {"p0": 4, "p1": 4, "p2": 4, "p3": 3}), "two forwards meet end and start"
    assert times(order, F) == (4, dict.fromkeys(("p0", "p1", "p2", "p3"), 1))


def test_blocks_plus_two_gathers_a_direction_at_most() -> None:
    blocks = 8
    order = order_of(*((group,) for group in range(blocks + 2)))
    calls, _ = times(order, F, B)
    assert calls == 2 * (blocks + 2) - 1


def test_what_several_groups_use_is_whole_from_the_first_to_the_last() -> None:
    order = order_of((0, 2), (1,), (2,), (3,))
    assert [names(order, members) for members in order.members] == [{"p0"}, {"p0", "p1"}, {"p0", "p2"}, {"p3"}]
    assert times(order, F, B)[1] == {"p0": 2, "p1": 2, "p2": 2, "p3": 1}
    tied = order_of((0, 3), (1,), (2,), (3,))
    assert times(tied, F, B, F, B)[1]["p0"] == 1, "it is whole at both turns"


def test_what_is_read_outside_modules_is_whole_through_every_pass() -> None:
    order = order_of((EVERYWHERE,), (4,), (7,))
    assert order.turns == turns(4, 7) and names(order, order.everywhere) == {"p0"}
    assert times(order, F, B, F, B)[1] == {"p0": 1, "p1": 3, "p2": 2}
    assert order_of((EVERYWHERE,)).turns == turns(0), "a model that is nothing else has one group"


def test_backward_begins_and_ends_where_something_is_trained() -> None:
    frozen = (0, 1)
    assert list(order_of((0,), (1,), (2,), (3,), frozen=frozen).positions(B)) == [3, 2]
    assert list(order_of((0,), (1,), (2,), (3,), frozen=frozen, fed=True).positions(B)) == [3, 2, 1, 0]
    assert times(order_of((0,), (1,), (2,), (3,), frozen=frozen), F, B) == (5, {"p2": 2, "p3": 1, "p0": 1, "p1": 1})
    nothing = order_of((0,), (1,), frozen=(0, 1))
    assert not nothing.positions(B) and not nothing.at_start(B)


def test_a_byte_limit_keeps_the_first_groups() -> None:
    order = order_of((0,), (1,), (2,))
    sizes = [512] * 3
    assert names(order, order.pinned(1024, sizes)) == {"p0", "p1"}
    assert order.pinned(511, sizes) == frozenset() and len(order.pinned(None, sizes)) == 3
    pinned = order.pinned(512, sizes)
    assert times(order, F, F, B, B, pinned=pinned)[1] == {"p0": 1, "p1": 4, "p2": 3}
    everything = order.pinned(None, sizes)
    assert times(order, F, F, B, B, pinned=everything) == (3, {"p0": 1, "p1": 1, "p2": 1}), "gather: step"


USERS = st.lists(
    st.one_of(
        st.just((EVERYWHERE,)), st.sets(st.integers(0, 5), min_size=1, max_size=3).map(lambda s: tuple(sorted(s)))
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(USERS, st.lists(st.sampled_from((F, B)), min_size=1, max_size=8))
def test_no_more_is_whole_than_a_group_and_what_is_shared(
    users: list[tuple[int | Turn, ...]], passes: list[Action]
) -> None:
    order = order_of(*users, fed=True)
    for bucket, spec in enumerate(order.buckets):
        held = [position for position, members in enumerate(order.members) if bucket in members]
        assert held == list(range(held[0], held[-1] + 1)), "without a gap"
        wanted = [order.turns.index(Turn(*turn)) for turn in spec.gathers if turn != EVERYWHERE]
        assert set(wanted) <= set(held)
        assert EVERYWHERE in spec.gathers or (held[0], held[-1]) == (min(wanted), max(wanted))
    found = count_gathers(order, passes, ())
    assert all(1 <= n <= len(passes) for n in found.times)
    assert found.calls <= len(order.turns) * len(passes)


@pytest.mark.parametrize("limit", [0, 10**9])
def test_buckets_of_sharded_parameters_are_groups_whatever_the_bucket_size(limit: int) -> None:
    items = [Item(name=f"p{number}", shape=(1000,), dtype="float32", gathers=turns(number // 3)) for number in range(6)]
    items.append(Item(name="frozen", shape=(10,), dtype="float32", gathers=turns(1), trainable=False))
    layout = build_layout(items, 2, max(limit, 1))
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [
        ["p5", "p4", "p3"],
        ["p2", "p1", "p0"],
    ]
    assert [bucket.gathers for bucket in (*layout.buckets, *layout.frozen)] == [turns(1), turns(0), turns(1)]
    assert layout.elements == 2 * 3 * 1024 and [bucket.elements for bucket in layout.frozen] == [128]


def test_tied_owners_lay_their_bucket_out_alike_whatever_their_groups() -> None:
    def layout(groups: tuple[int, int]) -> list[list[str]]:
        items = [
            Item(name="a", shape=(10,), dtype="float32", ties=(0, 1), gathers=turns(groups[0])),
            Item(name="b", shape=(20,), dtype="float32", ties=(0, 1), gathers=turns(groups[1])),
        ]
        return [[slot.name for slot in bucket.slots] for bucket in build_layout(items, 2, 1).buckets]

    assert layout((0, 0)) == layout((0, 3)) == [["b", "a"]]
