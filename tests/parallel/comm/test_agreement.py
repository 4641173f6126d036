"""Ranks that fail together, and what the first rank makes for all."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.errors import CheckpointError, EngineError, PlanError
from engine.parallel.comm.agreement import differing, first_rank, from_first, raise_together
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.comm.world import World, patience_seconds
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


RunRanks = Callable[..., list[Any]]


def told(make: Callable[[], bytes]) -> list[tuple[str, str]]:
    """What each of three ranks got, or raised."""

    def body(world: World) -> tuple[str, str]:
        assert world.connect is not None
        grid = Grid(dp=3, rank=world.rank)
        try:
            return "bytes", from_first(make, Comm(grid, world.connect(grid)), world.device).decode()
        except Exception as error:
            return type(error).__name__, str(error)

    return run_thread_ranks(3, body)


def slow(patience: float | None, fails: bool) -> str:
    """Body of a rank: rank 0 takes longer than a group waits."""
    grid = Grid(dp=2, rank=dist.get_rank())
    backend = TorchBackend(grid, torch.device("cpu"))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), backend._groups["world"])
    comm = Comm(grid, backend)

    def make() -> bytes:
        time.sleep(4.0)
        if fails:
            raise PlanError("not so.")
        return b"found"

    try:
        return from_first(make, comm, torch.device("cpu"), patience).decode()
    except EngineError as error:
        return f"{type(error).__name__}: {error}"


def test_what_takes_longer_than_a_group_waits_is_waited_for(run_ranks: RunRanks) -> None:
    assert run_ranks(slow, 2, 0.5, False) == ["found", "found"]
    assert run_ranks(slow, 2, 0.5, True) == ["PlanError: not so."] * 2


def slow_beside_a_short_timeout() -> str:
    """Body of a rank whose environment says how long groups wait."""
    return slow(patience_seconds(), False)


def test_a_short_timeout_of_the_environment_does_not_end_it(run_ranks: RunRanks) -> None:
    found = run_ranks(slow_beside_a_short_timeout, 2, env={"TRINE_TIMEOUT_SECONDS": "2"})
    assert found == ["found", "found"]


def test_without_patience_it_is_given_up(run_ranks: RunRanks) -> None:
    texts = run_ranks(slow, 2, None, False)
    assert all(text.startswith("EngineError: collective #1 all_reduce 'start' over world") for text in texts)


def failing(error: Exception) -> Callable[[], bytes]:
    def make() -> bytes:
        raise error

    return make


@pytest.mark.parametrize("text", ["what rank 0 made: ü", ""])
def test_all_ranks_get_what_rank_0_makes(text: str) -> None:
    assert told(text.encode) == [("bytes", text)] * 3


class NarrowError(PlanError):
    """A kind that only rank 0 need know."""


@pytest.mark.parametrize("kind", [PlanError, EngineError, NarrowError])
def test_an_error_of_ours_is_raised_alike_on_all_ranks(kind: type[EngineError]) -> None:
    sentence = "tensor = 3 does not divide: ü."
    first, *others = told(failing(kind(sentence)))
    assert first == (kind.__name__, sentence)
    assert others == [("EngineError" if kind is EngineError else "PlanError", sentence)] * 2


def test_another_error_stays_where_it_is_and_the_others_name_the_rank() -> None:
    first, *others = told(failing(ValueError("here")))
    assert first == ("ValueError", "here")
    assert others == [("EngineError", "rank 0 could not prepare for this run, so no rank starts; read its error.")] * 2
