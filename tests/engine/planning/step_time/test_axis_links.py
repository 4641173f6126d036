"""Speeds of the axes of a grid, computed by hand from where its ranks sit."""

import pytest

from engine.errors import GridError
from engine.parallel.grid import Grid
from engine.planning.cost_model.links import LinkSpeed
from engine.planning.step_time.prediction import HostLinks, place_axes

LINKS = HostLinks(within=LinkSpeed(1e-5, 1000.0), between=LinkSpeed(1e-3, 120.0))
FOUR_BY_TWO = tuple("aabbccdd")


def test_a_ring_of_neighbours_leaves_each_host_once() -> None:
    links = place_axes(Grid(dp=8), FOUR_BY_TWO, LINKS)
    assert links.collectives["dp", "all_reduce"] == LinkSpeed(14 * 1e-3, 120.0)


def test_a_gather_goes_around_the_ring_once() -> None:
    links = place_axes(Grid(dp=8), FOUR_BY_TWO, LINKS)
    assert links.collectives["dp", "all_gather"] == LinkSpeed(7e-3, 120.0)


def test_groups_share_the_way_out_of_a_host() -> None:
    links = place_axes(Grid(dp=4, tp=2), FOUR_BY_TWO, LINKS)
    assert links.collectives["dp", "all_reduce"] == LinkSpeed(6e-3, 60.0)
    assert links.collectives["tp", "all_reduce"] == LinkSpeed(2e-5, 1000.0)


def test_shard_groups_of_a_host_leave_it_with_their_replicas_only() -> None:
    links = place_axes(Grid(dp=8, shard_size=2), FOUR_BY_TWO, LINKS)
    assert links.collectives["dp_shard", "all_gather"] == LinkSpeed(1e-5, 1000.0)
    assert links.collectives["dp_replicate", "all_reduce"] == LinkSpeed(6e-3, 60.0)  # both ranks of a host send


def test_tensor_ranks_of_two_hosts_send_messages() -> None:
    links = place_axes(Grid(dp=2, tp=4), FOUR_BY_TWO, LINKS)
    assert links.collectives["tp", "all_reduce"] == LinkSpeed(6e-3, 120.0)
    assert links.collectives["dp", "all_reduce"] == LinkSpeed(2e-3, 60.0)  # ranks r and r + 4


def test_hops_are_as_fast_as_what_they_cross() -> None:
    links = place_axes(Grid(pp=8), FOUR_BY_TWO, LINKS)
    assert links.hops[0, 1] == LINKS.within and links.hops[1, 2] == LINKS.between
    shared = place_axes(Grid(pp=4, dp=2), FOUR_BY_TWO, LINKS)
    assert shared.hops[0, 1] == LinkSpeed(1e-3, 60.0)


def test_one_host_needs_no_network() -> None:
    links = place_axes(Grid(dp=2), ("a", "a"), LINKS)
    assert links.collectives["dp", "all_reduce"] == LinkSpeed(2e-5, 1000.0)
    assert not links.hops


def test_every_rank_has_a_host() -> None:
    with pytest.raises(GridError, match="hosts has 1 hosts for 2 ranks"):
        place_axes(Grid(dp=2), ("a",), LINKS)


def test_seconds_are_those_of_calls_and_bytes() -> None:
    assert LinkSpeed(0.5, 10.0).seconds(3, 20) == 3.5
