"""Ranks as a box: arithmetic that everything else stands on, checked against itself and a published picture."""

import subprocess
import sys
from itertools import pairwise, product
from typing import Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError, GridError
from engine.parallel.comm.world import color_rounds
from engine.parallel.grid import Axis, Coord, Grid, Order, axis_groups, saved_order

sizes_st = st.integers(1, 6)
orders_st = st.sampled_from(get_args(Order))
grids_st = st.builds(Grid, pp=sizes_st, dp=sizes_st, tp=sizes_st, order=orders_st)
AXES: tuple[Axis, ...] = ("pp", "dp", "tp", "world")


@given(grids_st)
def test_coord_and_rank_at_are_inverse_and_run_in_order(grid: Grid) -> None:
    names = ("pp", "dp", "tp") if grid.order == "tp-dp-pp" else ("dp", "pp", "tp")
    places = product(*(range(grid.size(name)) for name in names))
    positions = [Coord(**dict(zip(names, place, strict=True))) for place in places]
    assert [grid.coord(rank) for rank in range(grid.world_size)] == positions  # tp innermost
    assert [grid.rank_at(**at) for at in positions] == list(range(grid.world_size))


@given(grids_st, st.sampled_from(AXES))
def test_groups_hold_each_rank_once(grid: Grid, axis: Axis) -> None:
    groups = list(grid.groups(axis))
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert {len(group) for group in groups} == {grid.size(axis)}


@given(grids_st, st.sampled_from(AXES), st.data())
def test_peers_are_the_own_group_and_index_finds_oneself(grid: Grid, axis: Axis, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, grid.world_size - 1))
    here = grid.at(rank)
    assert here.peers(axis) == grid.peers(axis, rank)
    assert here.peers(axis) in list(grid.groups(axis))
    assert here.peers(axis)[here.index(axis)] == rank
    assert here.coord() == grid.coord(rank)


@given(grids_st, st.sampled_from(("pp", "dp", "tp")))
def test_peers_differ_along_their_axis_only(grid: Grid, axis: Axis) -> None:
    for group in grid.groups(axis):
        places = [dict(grid.coord(rank)) for rank in group]
        assert [place.pop(axis) for place in places] == list(range(grid.size(axis)))
        assert all(place == places[0] for place in places)


@given(grids_st, st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_data_axis_is_made_of_shard_groups_and_replicas(
    grid: Grid, size: int, groups: int, data: st.DataObject
) -> None:
    whole = Grid(order=grid.order, shard_size=size, **{**grid.sizes, "dp": size * groups})
    grid = whole.at(data.draw(st.integers(0, whole.world_size - 1)))
    line, inner, outer = grid.peers("dp"), grid.peers("dp_shard"), grid.peers("dp_replicate")
    assert (len(inner), len(outer)) == (grid.size("dp_shard"), grid.size("dp_replicate")) == (size, groups)
    place = line.index(inner[0])
    assert inner == line[place : place + size] and set(inner) & set(outer) == {grid.rank}
    assert {grid.index("dp_shard", rank) for rank in outer} == {grid.index("dp_shard")}
    assert grid.coord().dp == grid.index("dp_replicate") * size + grid.index("dp_shard")
    for axis in ("dp_shard", "dp_replicate"):
        every = list(grid.groups(axis))
        assert sorted(rank for group in every for rank in group) == list(range(grid.world_size))
        assert every == sorted(every) and grid.peers(axis) in every
    assert grid.sharding == ("dp" if groups == 1 else "dp_shard")
    opened = [axis for axis in axis_groups(grid) if axis.startswith("dp_")]
    assert opened == ([axis for axis in ("dp_shard", "dp_replicate") if grid.size(axis) > 1] if groups > 1 else [])


NESTED = [
    (size, groups, experts)
    for size, groups, experts in product((1, 2, 4, 6), (1, 2, 3), (1, 2, 3, 4, 6, 8))
    if size * groups % experts == 0 and max(size, experts) % min(size, experts) == 0
]


@given(grids_st, st.sampled_from(NESTED), st.data())
def test_groups_of_experts_and_shard_groups_are_runs_one_inside_the_other(
    grid: Grid, nested: tuple[int, int, int], data: st.DataObject
) -> None:
    size, groups, experts = nested
    whole = Grid(order=grid.order, shard_size=size, experts=experts, **{**grid.sizes, "dp": size * groups})
    grid = whole.at(data.draw(st.integers(0, whole.world_size - 1)))
    line, own = grid.peers("dp"), grid.coord().dp
    assert grid.peers("ep") == line[own // experts * experts :][:experts] and grid.holder().ep == own % experts
    assert grid.peers("edp") == line[own % experts :: experts]
    inner, outer = set(grid.peers("edp_shard")), set(grid.peers("edp_replicate"))
    assert inner == set(grid.peers("edp")) & set(grid.peers("dp_shard"))
    assert grid.size("edp_shard") * grid.size("edp_replicate") * experts == size * groups
    assert inner & outer == {grid.rank} and outer <= set(grid.peers("edp"))
    shards = {(grid.index("edp_shard", rank), grid.holder(grid.coord(rank)).ep) for rank in outer}
    assert len(shards) == 1, "ranks that sum a shard hold the same shard of the same experts"
    for axis in ("ep", "edp", "edp_shard", "edp_replicate"):
        every = list(grid.groups(axis))
        assert sorted(rank for group in every for rank in group) == list(range(grid.world_size))
        assert grid.peers(axis) in every and grid.peers(axis)[grid.index(axis)] == grid.rank
    spread = grid.expert_spread
    assert spread.ranks == grid.size(spread.sharding) and (spread.sums, spread.copies) == ("edp", "edp")
    assert spread.sharding == ("edp_shard" if groups > 1 else "edp")


@given(grids_st, st.sampled_from(NESTED))
def test_axes_of_experts_have_groups_of_their_own_only_with_experts(grid: Grid, nested: tuple[int, int, int]) -> None:
    size, groups, experts = nested
    used = axis_groups(Grid(order=grid.order, shard_size=size, experts=experts, **{**grid.sizes, "dp": size * groups}))
    opened = [axis for axis in used if axis in ("ep", "edp", "edp_shard", "edp_replicate")]
    if experts == 1:
        assert not opened
    else:
        assert "ep" in opened and ("edp" in opened) == (size * groups > experts)


@given(grids_st, st.sampled_from(("pp", "dp", "tp")))
def test_a_stride_is_the_distance_to_the_next_peer(grid: Grid, axis: Literal["pp", "dp", "tp"]) -> None:
    before = {"tp": 1, "dp": grid.tp, "pp": grid.tp * grid.dp}
    if grid.order == "tp-pp-dp":
        before |= {"pp": grid.tp, "dp": grid.tp * grid.pp}
    assert grid.stride(axis) == before[axis]
    for peers in grid.groups(axis):
        assert {there - here for here, there in pairwise(peers)} <= {grid.stride(axis)}


def test_neighbours_are_as_near_as_their_axis_talks() -> None:
    grid = Grid(pp=2, dp=3, tp=5)
    strides = {axis: grid.peers(axis)[1] - grid.peers(axis)[0] for axis in AXES}
    assert strides == {"tp": 1, "dp": 5, "pp": 15, "world": 1}
    other = Grid(**grid.sizes, order="tp-pp-dp")
    assert [other.peers(axis)[1] - other.peers(axis)[0] for axis in AXES] == [5, 10, 1, 1]
    assert str(other) == f"{grid} in the order tp-pp-dp"


# 32 ranks as in DeepSpeed's 3D figure: 4 pipeline x 2 data x 4 tensor on 8 nodes of 4 GPUs

FIGURE = Grid(pp=4, dp=2, tp=4)


def test_every_tensor_group_stays_inside_one_node() -> None:
    nodes = [{rank // 4 for rank in group} for group in FIGURE.groups("tp")]
    assert nodes == [{node} for node in range(8)]


def test_stage_0_is_ranks_0_to_7_with_one_node_a_data_rank() -> None:
    stage0 = [rank for rank in range(32) if FIGURE.coord(rank).pp == 0]
    assert stage0 == list(range(8))
    assert [rank for rank in stage0 if FIGURE.coord(rank).dp == 0] == [0, 1, 2, 3]
    assert [rank for rank in stage0 if FIGURE.coord(rank).dp == 1] == [4, 5, 6, 7]


def test_data_peers_and_pipeline_neighbours_are_those_of_the_figure() -> None:
    assert list(FIGURE.groups("dp"))[:4] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(FIGURE.groups("pp"))[:2] == [(0, 8, 16, 24), (1, 9, 17, 25)]
    assert list(FIGURE.groups("pp"))[-1] == (7, 15, 23, 31)
    assert Grid(pp=4, dp=2, tp=4, rank=22).peers("world") == tuple(range(32))


def test_the_order_of_a_grid_that_was_written_down() -> None:
    assert saved_order({"dp": 2}) == "tp-dp-pp" and saved_order({"order": "tp-pp-dp"}) == "tp-pp-dp"


# mistakes


@pytest.mark.parametrize(
    ("sizes", "said"),
    [((0, 1, 1), "pipeline size 0"), ((1, -2, 1), "data size -2"), ((1, 1, 0), "tensor size 0")],
)
def test_an_axis_below_one_is_refused_by_name(sizes: tuple[int, int, int], said: str) -> None:
    with pytest.raises(GridError) as caught:
        Grid(pp=sizes[0], dp=sizes[1], tp=sizes[2])
    assert str(caught.value) == f"{said} is below 1; give every axis at least one rank."
    assert isinstance(caught.value, EngineError)


@pytest.mark.parametrize("size", [0, 3, 8])
def test_shard_groups_share_the_data_axis_evenly(size: int) -> None:
    with pytest.raises(GridError, match=f"shard_size = {size} does not divide the 4 data ranks; set it to a divisor"):
        Grid(dp=4, shard_size=size)


@pytest.mark.parametrize("experts", [0, -2, 4, 12])
def test_experts_divide_the_data_axis_evenly(experts: int) -> None:
    with pytest.raises(GridError) as caught:
        Grid(dp=6, experts=experts)
    assert str(caught.value) == (
        f"parallel.expert = {experts} does not divide the 6 data ranks, over which experts are laid; give one "
        "of 1, 2, 3, 6."
    )


def test_experts_and_shard_groups_fit_into_each_other() -> None:
    with pytest.raises(GridError) as caught:
        Grid(dp=12, shard_size=4, experts=6)
    assert str(caught.value) == (
        "parallel.expert = 6 and zero_optimization.shard_size 4 do not fit into each other, but groups of experts and "
        "shard groups are runs of neighbours, one inside the other; give one of 1, 2, 4, 12."
    )
    assert Grid(dp=12, shard_size=2, experts=6).size("ep") == Grid(dp=12, shard_size=6, experts=2).size("edp") == 6


@pytest.mark.parametrize("rank", [-1, 4, 100])
def test_a_rank_outside_the_box_is_refused_with_the_number_of_processes(rank: int) -> None:
    with pytest.raises(GridError) as caught:
        Grid(pp=2, dp=2, rank=rank)
    assert f"rank {rank} is outside a grid of 4 ranks (2 pipeline x 2 data x 1 tensor)" in str(caught.value)
    assert "start exactly 4 processes" in str(caught.value)


@pytest.mark.parametrize("rank", [-1, 4])
def test_the_position_of_a_foreign_rank_is_refused(rank: int) -> None:
    with pytest.raises(GridError, match=f"rank {rank} is outside this grid; give a rank from 0 to 3"):
        Grid(pp=2, dp=2).coord(rank)
    with pytest.raises(GridError, match=f"rank {rank} is outside"):
        Grid(pp=2, dp=2).peers("dp", rank)


def test_a_grid_says_what_it_is() -> None:
    assert str(FIGURE) == "32 ranks = 4 pipeline x 2 data x 4 tensor"


# no torch

LIGHT = {
    "grid": "from engine.parallel.grid import Grid; assert [*Grid(pp=4, dp=2, tp=4).coord(9).values()] == [1, 0, 0, 1]",
    "engine": "import engine; assert 'initialize' in dir(engine); engine.GridError",
    "load_config": "import engine; assert engine.load_config({'train_batch_size': 8}, 4).dp == 4",
    "layout": "import engine.zero.layout as z; assert z.build_layout([z.Item('w', (3,), 'float32')], 2, 9).elements",
    "traffic": "import engine.parallel.comm.traffic as t; assert t.sent_bytes('all_reduce', 8, 2) == 8",
}


@pytest.mark.parametrize("name", LIGHT)
def test_pure_parts_import_no_torch(name: str) -> None:
    check = f"{LIGHT[name]}; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was imported"


@given(grids_st)
def test_a_replica_is_all_ranks_of_one_data_coordinate(grid: Grid) -> None:
    peers = grid.peers("replica")
    assert peers == tuple(sorted(peers)) and len(peers) == grid.size("replica") == grid.pp * grid.tp
    assert peers[grid.index("replica")] == grid.rank
    assert {grid.coord(rank).dp for rank in peers} == {grid.coord().dp}
    assert sorted(rank for group in grid.groups("replica") for rank in group) == list(range(grid.world_size))


@given(grids_st)
def test_an_axis_uses_the_group_of_an_earlier_one_only_if_it_has_the_same_ranks(grid: Grid) -> None:
    used = axis_groups(grid)
    axes: tuple[Axis, ...] = ("world", "pp", "dp", "tp", "replica")
    assert list(used) == ["world", *(axis for axis in axes[1:] if grid.size(axis) > 1)]
    for axis, other in used.items():
        assert grid.peers(axis) == grid.peers(other) and used[other] == other
    opened = [grid.peers(axis) for axis, other in used.items() if axis == other]
    assert len(opened) == len(set(opened)), "no group is opened twice"


@pytest.mark.parametrize("size", [512, 16384])
def test_a_rank_opens_as_many_groups_in_any_world(size: int) -> None:
    used = axis_groups(Grid(pp=8, dp=size // 64, tp=8, rank=size - 1))
    assert [axis for axis, other in used.items() if axis == other] == ["world", "pp", "dp", "tp", "replica"]


def test_groups_of_one_color_are_opened_one_after_another() -> None:
    groups = [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert color_rounds(groups, lambda group: group[0]) == [frozenset(groups)]
    assert color_rounds(groups, lambda group: group[0] % 4) == [frozenset(groups[:2]), frozenset(groups[2:])]
    assert color_rounds(groups, lambda group: 0) == [frozenset({group}) for group in groups]
