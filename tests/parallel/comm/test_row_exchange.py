"""Exchange of rows between ranks of an axis: thread ranks and real processes, and the bytes that are counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.comm.traffic import sent_bytes
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid

RunRanks = Callable[..., list[Any]]
GIVES = ((1, 3, 0, 2), (2, 0, 0, 1), (0, 0, 0, 0), (4, 1, 1, 0))
"""Rows from each rank to each index of its axis; an axis of two takes the first two columns."""
WIDTHS: tuple[tuple[int, ...], ...] = ((), (3,), (2, 5))


def exchanged(comm: Comm, axis: str) -> list[list[int]]:
    """Exchanges rows of each width over ``axis``; returns what came; row i of rank r is filled with 10 r + i."""
    rank, index, size = comm.grid.rank, comm.grid.index(axis), comm.grid.size(axis)
    peers, gives = comm.grid.peers(axis), GIVES[rank][:size]
    gets, found = [GIVES[peer][index] for peer in peers], list[list[int]]()
    pending = []
    for width in WIDTHS:
        given = (10 * rank + torch.arange(sum(gives))).view(-1, *(1 for _ in width)).expand(-1, *width).contiguous()
        received = torch.full((sum(gets), *width), -1)
        pending.append((comm.exchange(received, given, gets, gives, axis, f"width {width}"), received))
    for wait, received in reversed(pending):
        wait.wait()
        rows = received.view(len(received), -1)
        assert (rows == rows[:, :1]).all()
        found.append(rows[:, 0].tolist())
    others = sum(gives) - gives[index]
    elements = {f"width {width}": others * int(torch.tensor(width).prod()) for width in WIDTHS}
    assert {row.label: (row.axis, row.calls, row.bytes) for row in comm.tally.rows()} == {
        label: (axis, 1, 8 * count) for label, count in elements.items()
    }
    return found


def expected(grid: Grid, axis: str) -> list[list[int]]:
    """Returns the rows of a rank, counted by hand."""
    index, rows = grid.index(axis), list[int]()
    for peer in grid.peers(axis):
        first = sum(GIVES[peer][:index])
        rows += range(10 * peer + first, 10 * peer + first + GIVES[peer][index])
    return [rows] * len(WIDTHS)


def on_processes() -> list[list[list[int]]]:
    """Body of a rank."""
    found = []
    for experts, axis in ((4, "ep"), (2, "ep"), (2, "edp")):
        grid = Grid(dp=4, experts=experts, rank=dist.get_rank())
        comm = Comm(grid, TorchBackend(grid, torch.device("cpu")))
        found.append(exchanged(comm, axis))
        comm.close()
    return found


def test_real_ranks_receive_the_rows_for_them_in_rank_order(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(on_processes, 4)):
        for rows, (experts, axis) in zip(found, ((4, "ep"), (2, "ep"), (2, "edp")), strict=True):
            assert rows == expected(Grid(dp=4, experts=experts, rank=rank), axis)


@pytest.mark.parametrize(("experts", "axis"), [(4, "ep"), (2, "ep"), (2, "edp")])
def test_thread_ranks_receive_the_rows_for_them_in_rank_order(experts: int, axis: str) -> None:
    def body(world: World) -> tuple[list[list[int]], list[list[int]]]:
        grid = Grid(dp=4, experts=experts, rank=world.rank)
        assert world.connect is not None
        return exchanged(Comm(grid, world.connect(grid)), axis), expected(grid, axis)

    for found, right in run_thread_ranks(4, body):
        assert found == right


def test_an_axis_of_one_rank_copies_its_rows_and_counts_nothing() -> None:
    def body(world: World) -> None:
        grid = Grid(rank=0)
        assert world.connect is not None
        comm, received = Comm(grid, world.connect(grid)), torch.zeros(2, 3)
        comm.exchange(received, torch.ones(2, 3), (2,), (2,), "ep", "rows").wait()
        assert received.all() and not comm.tally.rows()

    run_thread_ranks(1, body)


def test_thread_ranks_that_exchange_rows_of_different_widths_are_refused() -> None:
    def body(world: World) -> None:
        grid = Grid(dp=2, experts=2, rank=world.rank)
        assert world.connect is not None
        comm, given = Comm(grid, world.connect(grid)), torch.ones(2, 3 + world.rank)
        comm.exchange(torch.empty_like(given), given, (1, 1), (1, 1), "ep", "rows").wait()

    with pytest.raises(EngineError, match="calls exchange of 4 float32 elements over ep rows where rank 0 calls"):
        run_thread_ranks(2, body)


def test_all_bytes_of_an_exchange_are_sent() -> None:
    assert sent_bytes("exchange", 120, 4) == 120
