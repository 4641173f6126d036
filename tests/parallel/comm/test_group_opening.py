"""Groups between real gloo processes: which ones a rank opens, what they are called, and for whom it waits."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo
from torch.distributed import distributed_c10d

from engine.parallel.comm import world as world_file
from engine.parallel.comm.backend import Channel, Link, state_link
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.comm.world import OwnedGroups
from engine.parallel.grid import Grid
from tests.parallel.comm.neighbours import run_threads

RunRanks = Callable[..., list[Any]]


def opened_twice() -> list[list[tuple[int, int]]]:
    """Body of a rank of three stages: (call, first rank) of each group that it has opened, of two backends in turn."""
    grid, found = Grid(pp=3, rank=dist.get_rank()), list[list[tuple[int, int]]]()
    first = distributed_c10d._world.group_count
    links = [Link(Channel("forward", here, here + 1), here, here + 1) for here in (0, 1)]
    for turn in range(2):
        comm = Comm(grid, TorchBackend(grid, torch.device("cpu"), linked=True))
        comm.link(links)
        names = [name for group, name in distributed_c10d._world.pg_names.items() if group is not dist.group.WORLD]
        found.append([(int(name.split(".")[0]) - first, int(name.split(".")[1])) for name in names])
        for link in links:
            value = torch.full((3,), float(turn + 1))
            if grid.rank == link.source:
                comm.send(value, link).wait()
            elif grid.rank == link.target:
                comm.receive(value.zero_(), link).wait()
                assert value.tolist() == [turn + 1.0] * 3
        state = torch.full((2,), float(grid.rank))  # over the group of the axis, which is that of the world
        if grid.rank:
            comm.send(state, state_link(grid.rank, 0)).wait()
        else:
            for source in (1, 2):
                comm.receive(state, state_link(source, 0)).wait()
                assert state.tolist() == [source] * 2
        comm.close()
    return found


def test_a_rank_opens_its_own_groups_alone_and_they_are_never_named_twice(run_ranks: RunRanks) -> None:
    """Ranks that have had different numbers of groups still give a new one the same name."""
    assert run_ranks(opened_twice, 3) == [
        [[(0, 0)], [(2, 0)]],
        [[(0, 0), (1, 1)], [(2, 0), (3, 1)]],
        [[(1, 1)], [(3, 1)]],
    ]


def without_others(told: Path) -> int:
    """Body of a rank of four: two ranks open a group and use it before the others have come to that call."""
    owned, rank = OwnedGroups(), dist.get_rank()
    if rank > 1:
        for _ in range(400):
            time.sleep(0.0 if told.exists() else 0.05)
        assert told.exists()
    group = owned.open((0, 1) if rank < 2 else (2, 3) if rank == 2 else (3, 2))
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    if rank == 0:
        told.touch()
    dist.barrier()
    owned.close()
    return int(total)


def test_a_group_does_not_wait_for_ranks_that_are_not_in_it(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(without_others, 4, tmp_path / "told") == [1, 1, 5, 5]


def keys_of(ranks: int, most: int) -> list[int]:
    """Bytes that each rank of a gloo group leaves for the others; the ranks are threads."""
    store = HashStore()
    with patch.object(world_file, "ALL_WITH_ALL", most), world_file.connected_when_needed(ranks):

        def open_rank(rank: int) -> Any:
            return ProcessGroupGloo(store, rank, ranks, timeout=timedelta(seconds=30))

        groups = run_threads(open_rank, ranks)
    sums = [torch.tensor([rank]) for rank in range(ranks)]
    run_threads(lambda rank: groups[rank].allreduce([sums[rank]]).wait(), ranks)
    assert {int(total) for total in sums} == {sum(range(ranks))}
    return [len(store.get(key)) for key in store.list_keys()]


def test_a_rank_of_a_large_group_tells_the_others_one_address() -> None:
    small, large = keys_of(4, most=8), keys_of(12, most=8)
    assert len(small) == 4 and len(large) == 12
    assert set(small) == {len_of_all(4)} and set(large) == {len_of_all(0)}, "eight bytes for each rank, or none"


def len_of_all(ranks: int) -> int:
    """Bytes of a key with an address for each rank; for none, that of the rank alone."""
    return 154 + 8 * ranks
