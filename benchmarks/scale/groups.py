"""Communication groups of one rank of a large world: the real backend over torch's fake process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scale.worlds import ScaledWorld
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.grid import axis_groups
from engine.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class OpenedGroups:
    """Process groups that one rank has opened."""

    own: int
    """Number of groups that include the rank, with the world's."""
    names: frozenset[str]
    """Names of the groups except the world's, unique in the world."""
    rounds: int
    """Number of collective calls that open groups."""


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """Opens a fake process group of ``size`` ranks with only ``rank`` present."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with patch.dict(os.environ, {"TRINE_TIMEOUT_SECONDS": "600"}):  # that of the fake one is not known
            yield
    finally:
        dist.destroy_process_group()


def open_groups(world: ScaledWorld, plan: Plan, rank: int, linked: bool) -> OpenedGroups:
    """Opens all groups of a run; ``linked``: message channels have groups, as with NCCL."""
    with fake_world(world.size, rank):
        before = distributed_c10d._world.group_count
        backend = TorchBackend(world.grid(rank), torch.device("meta"), linked)
        for stages in plan.tie_owners:
            backend.connect(stages)
        backend.link(plan.links)
        if plan.gather_groups is not None:
            backend.open_gathers()
        names = {name for group, name in distributed_c10d._world.pg_names.items() if group is not dist.group.WORLD}
        found = OpenedGroups(1 + len(names), frozenset(names), distributed_c10d._world.group_count - before)
        backend.close()
    return found


def all_groups(world: ScaledWorld, plan: Plan, linked: bool) -> int:
    """Returns the number of distinct groups in the whole world."""
    grid = world.grid(0)
    found = sum(world.size // grid.size(axis) for axis, used in axis_groups(grid).items() if axis == used)
    lines = world.size // world.pp
    pairs = sum(link.channel.flow != "state" for link in plan.links) if linked else 0
    gathers = world.size // world.dp if plan.gather_groups is not None else 0
    own_world = not linked  # on gloo an engine has a group of the world to itself, which it can close
    return found + lines * (len(plan.tie_owners) + pairs) + gathers + own_world
