"""What rank 0 makes for all ranks, and how it fails for all."""

from collections.abc import Callable

import pytest

from engine.errors import EngineError, PlanError
from engine.parallel.comm.agreement import from_first
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads.thread_backend import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid


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


def failing(error: Exception) -> Callable[[], bytes]:
    def make() -> bytes:
        raise error

    return make


@pytest.mark.parametrize("text", ["what rank 0 made: ü", ""])
def test_all_ranks_get_what_rank_0_makes(text: str) -> None:
    assert told(text.encode) == [("bytes", text)] * 3


@pytest.mark.parametrize("kind", [PlanError, EngineError])
def test_an_error_of_ours_is_raised_alike_on_all_ranks(kind: type[EngineError]) -> None:
    assert (
        told(failing(kind("tensor = 3 does not divide: ü."))) == [(kind.__name__, "tensor = 3 does not divide: ü.")] * 3
    )


def test_another_error_stays_where_it_is_and_the_others_name_the_rank() -> None:
    first, *others = told(failing(ValueError("here")))
    assert first == ("ValueError", "here")
    assert (
        others
        == [("EngineError", "rank 0 could not prepare for this run, so no rank starts; its message tells why.")] * 2
    )
