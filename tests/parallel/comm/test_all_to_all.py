"""Slices that some of the data ranks exchange: between real processes, and what the tally says of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.grid import Grid

RunRanks = Callable[..., list[Any]]
GROUPS = ((0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3))


def exchange() -> dict[tuple[int, ...], list[int]]:
    """Body of a rank: what it receives in each of its groups; slice i of rank r is filled with 10 r + i."""
    rank = torch.distributed.get_rank()
    grid = Grid(dp=4, rank=rank)
    comm = Comm(grid, TorchBackend(grid, torch.device("cpu")))
    for members in GROUPS:
        comm.connect_data(members)
    found, pending = dict[tuple[int, ...], Tensor](), list[Pending]()
    for members in (members for members in GROUPS if rank in members):
        given = (10 * rank + torch.arange(len(members), dtype=torch.uint8)).repeat_interleave(3)
        received, found[members] = torch.empty_like(given), torch.zeros_like(given)
        exchange = comm.all_to_all(received, given, members, "test", "dp")
        pending.append(exchange.then(partial(found[members].copy_, received)))
    for one in reversed(pending):
        one.wait()
    (row,) = comm.tally.rows()
    assert (row.axis, row.calls, row.bytes) == ("dp", 3, 9 + 3 + 3), "3 slices of 4, and one of 2, twice"
    comm.close()
    return {members: slices[::3].tolist() for members, slices in found.items()}


def test_each_rank_gets_its_slice_from_every_member(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(exchange, 4)):
        assert set(found) == {members for members in GROUPS if rank in members}
        for members, slices in found.items():
            assert slices == [10 * member + members.index(rank) for member in members]


def large() -> list[list[str]]:
    """Body of a rank: what it asks gloo for, in order, in an exchange, a reduce-scatter and a gather of 64 KB."""
    rank, posted, asked = dist.get_rank(), list[list[str]](), list[str]()
    grid, elements = Grid(dp=2, rank=rank), 1 << 13
    comm = Comm(grid, TorchBackend(grid, torch.device("cpu")))
    plain = {name: getattr(dist, name) for name in ("isend", "irecv")}

    def listened(name: str, *given: Any, **named: Any) -> Any:
        asked.append(name)
        return plain[name](*given, **named)

    given, received, shard = torch.arange(2.0 * elements) + rank, torch.empty(2 * elements), torch.empty(elements)
    own = slice(rank * elements, (rank + 1) * elements)
    calls: list[Callable[[], Pending]] = [
        lambda: comm.all_to_all(received, given, (0, 1), "x", "dp"),
        lambda: comm.reduce_scatter(shard, given, "dp", "x"),
        lambda: comm.all_gather(given, given[own].clone(), "dp", "x"),
    ]
    values = torch.arange(2.0 * elements)
    expected = [torch.cat([values[own], values[own] + 1]), 2 * values[own] + 1, values + values.ge(elements)]
    with pytest.MonkeyPatch.context() as patch:
        for name in plain:
            patch.setattr(dist, name, partial(listened, name))
        for call, result, right in zip(calls, (received, shard, given), expected, strict=True):
            asked.clear()
            call().wait()
            assert torch.equal(result, right)
            posted.append(list(asked))
    comm.close()
    return posted


def test_large_slices_arrive_and_receives_are_posted_first(run_ranks: RunRanks) -> None:
    assert run_ranks(large, 2) == [[["irecv", "isend"]] * 3] * 2
