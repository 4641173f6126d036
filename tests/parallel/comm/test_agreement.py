"""Ranks that fail together."""

import pytest
import torch

from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.agreement import differing, first_rank, raise_together
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads.thread_backend import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid
from tests.parallel.comm.test_host_group import Desk


def test_all_raise_the_problem_of_the_first_rank_with_the_advice_of_rank_0() -> None:
    desk = Desk()  # ranks 1 and 3 have failed: "a" and "cc"
    with pytest.raises(CheckpointError) as caught, raise_together(desk, str, lambda: " Try another."):
        pass
    assert str(caught.value) == "a Try another."
    assert {text[8:] for text in desk.told.values()} == {b"a Try another."}


def test_rank_0_words_its_own_error_first() -> None:
    desk = Desk()
    with pytest.raises(CheckpointError) as caught, raise_together(desk, lambda error: f"here: {error}"):
        raise ValueError("broken")
    assert str(caught.value) == "here: broken" and caught.value.__suppress_context__


def test_a_lost_rank_is_the_problem() -> None:
    desk = Desk(lost=2)
    with pytest.raises(EngineError, match="has lost rank 2"), raise_together(desk, str):
        pass
    assert desk.unheard == [] and sorted(desk.told) == [1, 3]


@pytest.mark.parametrize(("failed", "first"), [((), None), ((3,), 3), ((1, 2), 1), ((0, 1, 2, 3), 0)])
def test_the_first_rank_that_says_so_is_known_to_all(failed: tuple[int, ...], first: int | None) -> None:
    def body(world: World) -> int | None:
        comm = comm_of(world)
        found = first_rank(world.rank in failed, comm, torch.device("cpu"), "start")
        assert [(row.label, row.calls, row.bytes) for row in comm.tally.rows()] == [("start", 1, 12)]
        return found

    assert run_thread_ranks(4, body) == [first] * 4


def test_numbers_that_differ_anywhere_are_known_to_all() -> None:
    given = [
        [7, -(2**63), 2**63 - 1, -(2**63), 0, rank, -1 if rank < 3 else 0, 2**63 - 1 if rank else -(2**63)]
        for rank in range(4)
    ]

    def body(world: World) -> list[bool]:
        return differing(torch.tensor(given[world.rank]), comm_of(world), torch.device("cpu"), "x")

    assert run_thread_ranks(4, body) == [[False] * 5 + [True] * 3] * 4


def comm_of(world: World) -> Comm:
    assert world.connect is not None
    grid = Grid(dp=4, rank=world.rank)
    return Comm(grid, world.connect(grid))
