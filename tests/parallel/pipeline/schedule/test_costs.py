"""Orders for known costs: no kind is behind torch's order of the same name, in time or in what it holds.

By default a few sizes; ``-m long`` runs p to 16, m to 64, messages to half a forward, gradients of half to twice one.
"""

from collections.abc import Iterator
from itertools import product

import pytest

from engine.parallel.pipeline.schedule.actions import Schedule
from engine.parallel.pipeline.schedule.kinds import make_schedule
from engine.parallel.pipeline.schedule.one_f_one_b import (
    gpipe,
    interleaved_split,
    long_rounds,
    one_f_one_b,
    short_rounds,
    v_split,
)
from engine.parallel.pipeline.schedule.simulate import Cost, StageTimes, peak_live, simulate
from engine.parallel.pipeline.schedule.validate import check
from tests.parallel.pipeline.torch_orders import torch_allows, torch_order

KINDS = [
    ("interleaved", 2),
    ("looped-bfs", 2),
    ("zb-h1", 1),
    ("zb-h1", 2),
    ("zb-h1", 4),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]
"""Kinds with their stages on each rank; torch's gpipe and 1f1b leave nothing to choose."""


def costs(transfers: tuple[float, ...], parts: tuple[float, ...]) -> Iterator[Cost]:
    """Costs of a stage whose forward takes 1."""
    for transfer, into, weight in product(transfers, parts, parts):
        yield Cost.of_parts(1, into, weight, transfer)


def compare(kind: str, sizes: tuple[int, int, int], cost: Cost) -> None:
    """Ours ends no later than torch's order, and holds no more than 1f1b would, or than torch's."""
    p, m, v = sizes
    ours, theirs = make_schedule(kind, p, m, v, cost), torch_order(kind, p, m, v)
    check(ours)
    assert simulate(ours, cost).makespan <= simulate(theirs, cost).makespan + 1e-9, (kind, sizes, cost)
    assert max(peak_live(ours)) <= max(max(peak_live(theirs)), v * min(m, p)), (kind, sizes, cost)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 2), (4, 6), (3, 7), (4, 8)])
@pytest.mark.parametrize(("kind", "v"), KINDS)
def test_no_kind_is_behind_torch_at_known_costs(kind: str, v: int, p: int, m: int) -> None:
    if torch_allows(kind, p, m):
        for cost in costs((0, 0.2, 0.5), (0.5, 2)):
            compare(kind, (p, m, v), cost)


@pytest.mark.long
@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(("kind", "v"), KINDS)
def test_no_kind_is_behind_torch_at_any_cost(kind: str, v: int, p: int) -> None:
    for m in sorted({p - 1, p, p + 1, 2 * p, 3 * p + 1, 4 * p, 64} - {0}):
        if torch_allows(kind, p, m):
            for cost in costs((0, 0.1, 0.2, 0.35, 0.5), (0.5, 1, 2)):
                compare(kind, (p, m, v), cost)


def slices(schedule: Schedule, transfer: float) -> float:
    """Time of the step where the forward of a rank's whole slice takes 1."""
    cost = Cost(transfer=transfer).shared(len(schedule.per_rank), schedule.stages)
    return simulate(schedule, cost).makespan


@pytest.mark.parametrize("transfer", [0.05, 0.1, 0.2, 0.5])
@pytest.mark.parametrize(("kind", "v"), [("zb-h1", 2), ("zb-h1", 4), ("zb-v", 2)])
def test_slow_messages_need_no_costs_to_be_borne(kind: str, v: int, transfer: float) -> None:
    usual = make_schedule(kind, 4, 32, v)
    assert slices(usual, transfer) <= slices(torch_order(kind, 4, 32, v), transfer) + 1e-9
    assert max(peak_live(usual)) == 4 * v
    if (kind, v, transfer) == ("zb-h1", 4, 0.2):
        assert slices(usual, transfer) == pytest.approx(114)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 3), (4, 8), (4, 13), (5, 5)])
def test_the_rules_are_those_of_torch(p: int, m: int) -> None:
    assert v_split(p, m) == torch_order("zb-v", p, m, 2).per_rank
    for v in (1, 2, 3):
        turns = next(iter(long_rounds(p, m)), None) or short_rounds(p, m)[0]
        if torch_allows("zb-h1", p, m):
            assert interleaved_split(p, turns, v) == torch_order("zb-h1", p, m, v).per_rank


def test_rounds_are_at_most_as_long_as_the_pipeline_or_longer_where_it_does_not_divide() -> None:
    def sizes(turns: list[list[range]]) -> list[list[int]]:
        return [list(map(len, each)) for each in turns]

    assert sizes(short_rounds(4, 8)) == [[4, 4]] and long_rounds(4, 8) == []
    assert sizes(short_rounds(4, 9)) == [[4, 4, 1], [3, 3, 3]] and sizes(long_rounds(4, 9)) == [[5, 4]]
    assert sizes(short_rounds(4, 3)) == [[3]] and long_rounds(4, 3) == []


def test_what_is_held_beyond_1f1b_is_held_for_known_costs_only() -> None:
    cost = Cost.of_parts(1, 0.5, 0.5, 0.5)
    assert max(peak_live(make_schedule("zb-h1", 4, 6, 2))) == 8
    assert max(peak_live(make_schedule("zb-h1", 4, 6, 2, cost))) == 10
    assert max(peak_live(make_schedule("zb-h1", 4, 8, 2, cost))) == 8


def test_stages_may_cost_differently() -> None:
    times = tuple(StageTimes(1 + stage % 2, 1, 0.5) for stage in range(8))
    cost = Cost(transfer=0.3, times=times)
    for kind in ("zb-h1", "zb-v"):
        known, usual = make_schedule(kind, 4, 8, 2, cost), make_schedule(kind, 4, 8, 2)
        check(known)
        assert simulate(known, cost).makespan <= simulate(usual, cost).makespan
        assert known.stages_of_rank == usual.stages_of_rank


def test_costs_do_not_change_kinds_without_split_backwards() -> None:
    cost = Cost.of_parts(1, 2, 0.5, 0.5)
    assert make_schedule("1f1b", 3, 6, cost=cost) == one_f_one_b(3, 6)
    assert make_schedule("gpipe", 3, 6, cost=cost) == gpipe(3, 6)
