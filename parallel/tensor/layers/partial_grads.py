"""Partial gradients: one sum over the axis "tp" per step.

A parameter that is replicated on tensor ranks but used on each rank's shard of the activations (the norm of a query
head, a key head that several ranks share) gets a partial gradient on each rank:

    key heads over tp=4     rank 0   rank 1   rank 2   rank 3
    held                     h0       h0       h1       h1
    sent                    [g0 0]   [g1 0]   [0 g2]   [0 g3]   all-reduce, label "replicated gradients"
    received                g0+g1    g0+g1    g2+g3    g2+g3
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.parallel.comm.comm import Comm
from engine.parallel.shard_table import ShardRow, ShardTable

LABEL = "replicated gradients"


class PartialSums:
    """Function object that sums partial gradients, passed by parameter name, over "tp" in place by an all-reduce.

    All ranks must pass the same parameters.
    """

    def __init__(self, table: ShardTable, comm: Comm) -> None:
        self._rows = {row.name: row for row in table if row.partial}
        self._comm = comm

    @torch.no_grad()
    def __call__(self, grads: Mapping[str, Tensor]) -> None:
        """Sums ``grads``, this rank's gradients by name, over "tp" in place; an all-reduce of as many elements as the
        tensor ranks hold together."""
        by_dtype: dict[torch.dtype, list[tuple[ShardRow, Tensor]]] = {}
        for name, grad in grads.items():
            by_dtype.setdefault(grad.dtype, []).append((self._rows[name], grad))
        for dtype, members in by_dtype.items():
            sizes = [grad.numel() if row.equal_on_tensor_ranks else row.elements for row, grad in members]
            flat = members[0][1].new_zeros(sum(sizes), dtype=dtype)
            places = [
                (place, grad)
                for (row, grad), full in zip(members, torch.split(flat, sizes), strict=True)
                for place in [_held(full, row, grad, self._comm.grid.coord().tp)]
            ]
            for parts, grad in places:
                _copy(parts, grad, inward=True)
            self._comm.all_reduce(flat, "tp", LABEL).wait()
            for parts, grad in places:
                _copy(parts, grad, inward=False)


def _held(full: Tensor, row: ShardRow, grad: Tensor, index: int) -> tuple[int, list[Tensor]]:
    """Returns the sharded dim, and views of the ranges of ``full`` that rank ``index`` stores."""
    if row.equal_on_tensor_ranks or row.dim is None:
        return 0, [full.view(grad.shape)]
    dim, full = row.dim, full.view(row.shape)
    return dim, [full.narrow(dim, r.start, r.stop - r.start) for r in row.ranges if index in r.holders]


def _copy(parts: tuple[int, list[Tensor]], grad: Tensor, inward: bool) -> None:
    dim, pieces = parts
    if grad.ndim == 0:
        pieces[0].copy_(grad) if inward else grad.copy_(pieces[0])
        return
    for piece, own in zip(pieces, torch.split(grad, [piece.shape[dim] for piece in pieces], dim), strict=True):
        piece.copy_(own) if inward else own.copy_(piece)
