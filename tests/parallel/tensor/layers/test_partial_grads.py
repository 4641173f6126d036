"""Partial gradients: every holder ends with the whole one, and the bytes are those of the full parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.parallel.comm.comm import Comm
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.grid import Grid, ShardHolder
from engine.parallel.shard_table import Division, Range, ShardRow, build_table
from engine.parallel.tensor.layers.apply_plan import local_shard
from engine.parallel.tensor.layers.partial_grads import LABEL, PartialSums
from engine.parallel.tensor.plan.tensor_plan import ParameterCut

RunRanks = Callable[..., list[Any]]
SHARED = ParameterCut(0, (Range(0, 4, (0, 1)), Range(4, 8, (2, 3))))
COLUMNS = ParameterCut(1, (Range(0, 2, (0, 1)), Range(2, 4, (2, 3)), Range(4, 6, (0, 1)), Range(6, 8, (2, 3))))


class Model(nn.Module):
    """A shared key head, a fused one cut by columns, a norm of each head, a scalar, and what is cut plainly."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.zeros(8, 3))
        self.fused = nn.Parameter(torch.zeros(3, 8, dtype=torch.float64))
        self.norm = nn.Parameter(torch.zeros(5))
        self.scale = nn.Parameter(torch.zeros(()))
        self.plain = nn.Parameter(torch.zeros(8, 2))


def table() -> tuple[ShardRow, ...]:
    plain = ParameterCut(0, tuple(Range(2 * rank, 2 * rank + 2, (rank,)) for rank in range(4)))
    division = Division(4, {"key": SHARED, "fused": COLUMNS, "plain": plain}, partial={"norm", "scale"})
    return build_table(Model(), {}, division).rows


def part(row: ShardRow, rank: int) -> Tensor:
    """What a rank finds by itself: different everywhere."""
    full = torch.arange(row.elements, dtype=row.dtype).reshape(row.shape) + 100 * (rank + 1)
    return full if row.dim is None else local_shard(full, ParameterCut(row.dim, row.ranges), rank)


def sum_up() -> tuple[dict[str, Tensor], list[Any]]:
    """Body of a rank."""
    grid = Grid(tp=4, rank=dist.get_rank())
    comm = Comm(grid, TorchBackend(grid, torch.device("cpu")))
    rows = {row.name: row for row in table()}
    grads = {name: part(row, grid.rank) for name, row in rows.items() if row.partial}
    PartialSums(build_table(Model(), {}, Division(4, {"key": SHARED, "fused": COLUMNS}, {"norm", "scale"})), comm)(
        grads
    )
    sent = [(row.label, row.calls, row.bytes) for row in comm.tally.rows()]
    comm.close()
    return grads, sent


def test_every_holder_gets_the_sum_of_all_holders(run_ranks: RunRanks) -> None:
    found = run_ranks(sum_up, 4)
    rows = {row.name: row for row in table()}
    assert [name for name, row in rows.items() if row.partial] == ["key", "fused", "norm", "scale"]
    for rank, (grads, sent) in enumerate(found):
        for name, grad in grads.items():
            row = rows[name]
            holders = next((r.holders for r in row.ranges if rank in r.holders), range(4))
            assert torch.equal(grad, sum((part(row, other) for other in holders), torch.zeros_like(grad))), name
        # one sum for each dtype: 8*3 + 5 + 1 elements in fp32, 3*8 in fp64
        assert sent == [(LABEL, 2, 2 * 30 * 4 * 3 // 4 + 2 * 24 * 8 * 3 // 4)]


@pytest.mark.parametrize("rank", range(4))
def test_exactly_one_holder_counts(rank: int) -> None:
    counted = {row.name: row.counted(ShardHolder(tp=rank)) for row in table()}
    assert counted == {
        "key": rank in (0, 2), "fused": rank in (0, 2), "norm": rank == 0, "scale": rank == 0, "plain": True,
    }  # fmt: skip
