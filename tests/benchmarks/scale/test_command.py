"""What a rank of a small and of a large world does: the counts of the table, exactly."""

from functools import cache

import pytest

from benchmarks.scale.checkpoint import paper_checkpoint, read_as
from benchmarks.scale.groups import all_groups, open_groups
from benchmarks.scale.step import replay
from benchmarks.scale.store import start_over_store
from benchmarks.scale.worlds import WORLDS, ScaledWorld
from engine.planning.cost_model.workload import DecoderShape
from engine.planning.plan import Plan

LARGE = (512, 16384)
"""Worlds of which only the number of data ranks differs."""


TINY = DecoderShape(layers=8, width=64, heads=8, vocabulary=64, context=8)


@cache
def plan_of(size: int) -> Plan:
    return WORLDS[size].plan(TINY)


def test_worlds_have_the_sizes_that_they_are_named_by() -> None:
    assert all(world.size == size for size, world in WORLDS.items())
    assert str(WORLDS[3072]) == "3,072 = tp8 x pp64 x dp6"


@pytest.mark.parametrize(
    ("linked", "most", "rounds", "in_all"),
    [(True, 9, 8, {512: 1097, 16384: 33089}), (False, 6, 5, {512: 202, 16384: 4418})],
    ids=["NCCL", "gloo"],
)
def test_a_rank_opens_as_many_groups_in_any_world(linked: bool, most: int, rounds: int, in_all: dict[int, int]) -> None:
    for size in LARGE:
        world = WORLDS[size]
        opened = [open_groups(world, plan_of(512), rank, linked) for rank in world.ranks]
        assert (max(one.own for one in opened), {one.rounds for one in opened}) == (most, {rounds})
        assert all_groups(world, plan_of(512), linked) == in_all[size]


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("world", [ScaledWorld(8, 1, 2), ScaledWorld(8, 2, 1), ScaledWorld(8, 2, 2)], ids=str)
def test_all_ranks_together_open_each_group_once(world: ScaledWorld, linked: bool) -> None:
    opened = [open_groups(world, plan_of(512), rank, linked) for rank in range(world.size)]
    names = frozenset[str]().union(*(one.names for one in opened))
    assert 1 + len(names) == all_groups(world, plan_of(512), linked)
    assert len({one.rounds for one in opened}) == 1, "every rank makes the same calls"


def test_a_rank_asks_the_store_as_much_in_any_world() -> None:
    for size in LARGE:
        for rank in WORLDS[size].ranks[1:]:
            store = start_over_store(size, rank)
            assert dict(store.calls) == {"set": 4, "check": 2, "get": 2, "wait": 1, "add": 1, "delete_key": 1}
            assert len(store.keys) == 5 and store.moved_bytes < 400
        assert start_over_store(size, 0).calls.total() < 6 * size, "rank 0 answers each"


def test_a_rank_sends_as_much_in_any_world() -> None:
    small, large = (replay(WORLDS[size], 0) for size in LARGE)
    assert (small.setup_calls, small.setup_bytes) == (large.setup_calls, large.setup_bytes)
    assert small.by_axis == large.by_axis and small.step_calls == large.step_calls


@pytest.mark.long
def test_a_rank_reads_a_part_of_the_manifest_of_a_large_world() -> None:
    plan = plan_of(16384)
    paper = paper_checkpoint(plan)
    assert (paper.pieces, len(paper.manifest.files)) == (19891, 23103)
    readings = [read_as(paper, plan, rank) for rank in WORLDS[16384].ranks]
    assert {one.manifest_bytes for one in readings} == {2805050}
    assert [one.read_bytes for one in readings[1:]] == [
        262932,
        103848,
    ]
    assert all(one.hash_bytes <= 64 for one in readings)
